"""Booster: a plugin says how a model is trained; the script's loop stays as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardc.booster import checkpoint, lora
from shardc.booster.compiled import plan_for, weights_of
from shardc.booster.criterion import BoostedCriterion
from shardc.booster.data import ShardedLoader, check_schedule_length, shard_dataloader
from shardc.booster.elementwise import adopt, check_elementwise, group_of_parameters
from shardc.booster.loss_scale import LossScaler
from shardc.booster.microbatches import count_microbatches
from shardc.booster.model import BoostedModel
from shardc.booster.optimizer import BoostedOptimizer
from shardc.booster.plugin import Plugin, TorchDDPPlugin
from shardc.booster.precision import check_mixed_precision, choose_dtype
from shardc.booster.scheduler import BoostedScheduler
from shardc.errors import ShardcError
from shardc.models.source import hf_config, without_peft
from shardc.runtime.module import PlanModule
from shardc.runtime.monitor import Monitor
from shardc.runtime.plan import Plan
from shardc.runtime.recompute import Recompute, enable_recompute
from shardc.runtime.state import StateOptions

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

Boosted = tuple[BoostedModel, BoostedOptimizer | None, BoostedCriterion | None, ShardedLoader | None, Any]


class Booster:
    """Trains a model as its plugin says, in the script's own loop:

    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, criterion, dataloader)
    for batch in dataloader:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    batch_size is of a data-parallel rank (plugin.dp_size of them). A loss is over the call's global batch, equal on
    every rank: the gradient is that of one process on all of it. monitor: see `__init__`, None without one.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | None = None,
        plugin: Plugin | None = None,
        *,
        monitor: bool | Mapping[str, Any] = False,
    ):
        """plugin: None trains as TorchDDPPlugin(). device: without a plugin; None is this rank's GPU, or the CPU.

        mixed_precision: "fp16", "bf16" or "fp32", where the plugin has no precision of its own. monitor: True, or
        arguments of shardc.runtime.monitor.Monitor, log loss, speed and memory: {"json_path": "log.jsonl"}.
        """
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ShardcError(
                f"Booster: plugin={plugin!r} is no plugin", "use one of shardc.booster.plugin, such as GeminiPlugin()"
            )
        if plugin is not None and device is not None:
            warnings.warn("Booster: device has no effect beside a plugin, which chooses it", stacklevel=2)
            device = None
        self.plugin = plugin or TorchDDPPlugin()
        self.device = device
        self.precision = check_mixed_precision(mixed_precision, self.plugin)
        self.monitor_settings = {} if monitor is True else monitor
        self.monitor: Monitor | None = None

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """(model, optimizer, criterion, dataloader, lr_scheduler), to be used in place of what was given.

        model: a live model of transformers, or any nn.Module that can be compiled; it is compiled, proved and split,
        and this rank keeps its part; the first time takes seconds, then the plan comes from a cache. optimizer: an
        elementwise one over the model's parameters; what it does not hold is frozen. criterion: (outputs, batch) ->
        mean loss, runs inside the call of the model. dataloader: is divided over the data-parallel ranks unless it
        already is. Raises ShardcError, on every rank and before anything was changed, for what cannot be trained.
        """
        self._check(model, optimizer, criterion, lr_scheduler)
        module = self._build(model, optimizer, dataloader)
        loader = self._divide(dataloader, lr_scheduler, module)
        base = without_peft(model)
        boosted = BoostedModel(
            module,
            config=hf_config(model),
            generation_config=getattr(base, "generation_config", None),
            peft_config=getattr(model, "peft_config", None) if base is not model else None,
            float32_outputs=self.plugin.recipe.force_outputs_fp32,
            cast_inputs=self.plugin.recipe.cast_inputs,
        ).train(model.training)
        boosted.criterion = criterion
        stepped = None if optimizer is None else self._optimizer(optimizer, module)
        if stepped is not None:
            stepped.dataloader = loader
            if self.monitor_settings is not False:
                self._watch(boosted, stepped)
        schedule = BoostedScheduler(lr_scheduler, stepped) if lr_scheduler is not None and stepped else lr_scheduler
        return boosted, stepped, BoostedCriterion(criterion) if criterion else None, loader, schedule

    # -- boost, step by step -------------------------------------------------------------------------------------------
    def _check(self, model: Any, optimizer: Any, criterion: Any, lr_scheduler: Any) -> None:
        if isinstance(model, (BoostedModel, PlanModule, Plan)):
            raise ShardcError(
                f"boost: the model is a {type(model).__name__}",
                "give boost the live model; a plan goes to HybridParallelPlugin(plan=...)",
            )
        if not isinstance(model, nn.Module):
            raise ShardcError(
                f"boost: model is {type(model).__name__}, no nn.Module",
                "boost takes (model, optimizer, criterion, dataloader, lr_scheduler), in this order",
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ShardcError(
                f"boost: optimizer is {type(optimizer).__name__}, no torch.optim.Optimizer",
                "boost takes (model, optimizer, criterion, dataloader, lr_scheduler), in this order",
            )
        if isinstance(optimizer, BoostedOptimizer):
            raise ShardcError("boost: the optimizer was boosted before", "make one for each model")
        if criterion is not None and not callable(criterion):
            raise ShardcError(
                f"boost: criterion is {type(criterion).__name__}", "give a function (outputs, batch) -> loss"
            )
        if lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
            raise ShardcError(
                f"boost: lr_scheduler is {type(lr_scheduler).__name__}", "give one of torch or transformers"
            )
        if optimizer is not None:
            check_elementwise(optimizer)

    def _build(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, dataloader: Any) -> PlanModule:
        """Compile the model and build this rank's part of it."""
        recipe = self.plugin.recipe
        dtype = choose_dtype(model, recipe.precision or self.precision)
        plan = plan_for(model, recipe, dtype, microbatches=count_microbatches(recipe, dataloader))
        known = plan.spec.by_any_name()
        named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if name in known]
        names = {id(parameter): known[name].name for name, parameter in named}
        groups = {} if optimizer is None else group_of_parameters(optimizer, names)
        self._warn_of_frozen(optimizer, groups, {known[name].name for name, p in named if p.requires_grad})
        options = StateOptions(
            groups=groups,
            max_elements=recipe.bucket_elements,
            communication_dtype=recipe.communication_dtype,
            master_weights=recipe.master_weights,
            reshard_after_forward=recipe.reshard_after_forward,
            offload=recipe.offload,
        )
        module = plan.build(
            weights_of(model), dtype=dtype, device=self.device, placement=recipe.placement, options=options
        )
        module.gather_training_logits = not recipe.parallel_output
        self._recompute(model, module)
        return module

    def _warn_of_frozen(self, optimizer: Any, groups: Mapping[str, int], trainable: set[str]) -> None:
        left_out = sorted(trainable - set(groups))
        if optimizer is not None and left_out:
            warnings.warn(
                f"boost: {len(left_out)} parameter(s) that require gradients are in no group of the optimizer, and are "
                f"frozen: {', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}",
                stacklevel=4,
            )

    def _recompute(self, model: nn.Module, module: PlanModule) -> None:
        """Gradient checkpointing as the plugin says, or as the model was told."""
        config = self.plugin.recipe.recompute
        if config is not None:
            counts = tuple(
                config.get_num_ckpt_layers(stage.num_blocks or 0, stage.index) for stage in module.spec.stages
            )
            enable_recompute(module, Recompute(layers_per_stage=counts, attention_only=config.attention_only))
        elif any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
            enable_recompute(module, Recompute())

    def _divide(self, dataloader: Any, lr_scheduler: Any, module: PlanModule) -> ShardedLoader | None:
        if dataloader is None:
            return None
        dp = module.mesh.dp
        loader = shard_dataloader(dataloader, coord=dp.coord, size=dp.size)
        if lr_scheduler is not None:
            undivided, divided = _length(dataloader), _length(loader)
            if undivided is not None and divided is not None:
                check_schedule_length(lr_scheduler, undivided, divided)
        return loader

    def _optimizer(self, optimizer: torch.optim.Optimizer, module: PlanModule) -> BoostedOptimizer:
        recipe, device = self.plugin.recipe, module.mesh.device
        adopt(optimizer, module.state, device)
        scaler = LossScaler(recipe.scaler, device) if module.spec.dtype == torch.float16 else None
        boosted = BoostedOptimizer(optimizer, module, scaler, recipe.max_norm)
        if scaler is not None:
            module.loss_scale = scaler.scale
            module.backward_guard = boosted.check_backward
        return boosted

    def _watch(self, model: BoostedModel, optimizer: BoostedOptimizer) -> None:
        """Log each call and step."""
        monitor = self.monitor = Monitor(model.module, **self.monitor_settings)
        optimizer.monitor = monitor

        def called(batch: Mapping[str, Any], loss: Tensor) -> None:
            tokens = next(value for name, value in batch.items() if name.startswith("input"))
            monitor.call(tokens.shape[0] * tokens.shape[1], tokens.shape[0], loss)

        def stepped(optimizer: BoostedOptimizer) -> None:
            scale = None if optimizer.scaler is None else optimizer.scaler.value
            lr = optimizer.param_groups[0]["lr"]
            monitor.step(lr, optimizer.get_grad_norm(), skipped=optimizer.skipped, loss_scale=scale)

        model.after_call, optimizer.after_step = called, stepped

    # -- the loop ------------------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Gradients of a loss that the model returned, added to those that the optimizer has.

        Raises ShardcError for an optimizer that boost did not return."""
        if not isinstance(optimizer, BoostedOptimizer):
            raise ShardcError(
                f"backward: given {type(optimizer).__name__}, not the optimizer that boost returned",
                "write model, optimizer, ... = booster.boost(model, optimizer, ...), and use that optimizer",
            )
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: BoostedModel,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One batch of data_iter through the model, backward included unless under torch.no_grad().

        criterion: (outputs, micro-batch) -> mean loss of it; weighted by its share of the batch's tokens. Returns
        {"loss": 0-d, "outputs"}, on every rank; None what was not asked for. The plain loop does the same.
        """
        batch = next(data_iter)
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
        trains = torch.is_grad_enabled()
        if trains and optimizer is None:
            raise ShardcError("execute_pipeline: no optimizer", "give optimizer=, or call it under torch.no_grad()")
        previous, gathers = model.criterion, model.module.gather_training_logits
        inner = criterion.function if isinstance(criterion, BoostedCriterion) else criterion
        model.criterion = inner or previous
        model.module.gather_training_logits = gathers or return_outputs
        try:
            outputs = model(*args, **kwargs)
        finally:
            model.criterion, model.module.gather_training_logits = previous, gathers
        if trains:
            optimizer.backward(outputs.loss)
        loss = outputs.loss.detach() if return_loss and outputs.loss is not None else None
        return {"loss": loss, "outputs": outputs if return_outputs else None}

    def no_sync(
        self, model: BoostedModel | None = None, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """Inside, gradients of several calls add up on each rank and are reduced once, before the step.

        Where the plugin splits gradients over the ranks they are reduced in each call: the sums are the same."""
        found = model if model is not None else optimizer
        if found is None:
            raise ShardcError("no_sync: neither model nor optimizer is given", "call booster.no_sync(model)")
        return found.no_sync()

    # -- adapters ------------------------------------------------------------------------------------------------------
    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: LoraConfig | None = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> PeftModel:
        """The model with adapters to train; before the optimizer is made, and before boost. See lora.enable_lora."""
        return lora.enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config, quantize)

    def save_lora_as_pretrained(
        self, model: BoostedModel, checkpoint_path: str | Path, use_safetensors: bool = True
    ) -> None:
        """Write the adapters, in PEFT's format. Every rank calls it."""
        checkpoint.save_adapters(model, checkpoint_path)

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def save_model(
        self,
        model: BoostedModel,
        checkpoint_path: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool | None = None,
        use_async: bool = False,
    ) -> None:
        """shard=True: a Hugging Face folder, for from_pretrained. shard=False: one file. Every rank calls it.

        size_per_shard: MiB of a file in the folder. use_safetensors: of one file, None goes by its name."""
        checkpoint.check_arguments("save_model", gather_dtensor=gather_dtensor, prefix=prefix, use_async=use_async)
        checkpoint.save_model(model, checkpoint_path, shard, size_per_shard, use_safetensors)

    def load_model(
        self,
        model: BoostedModel,
        checkpoint_path: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Take the weights of a folder or file of save_model, or of save_pretrained. Every rank calls it.

        Raises ShardcError, before anything is changed, where a parameter is missing or has another shape."""
        checkpoint.load_model(model, checkpoint_path)

    def save_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint_path: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write master weights, states, loss scale, random states and the data's position: a folder.

        Every rank calls it. size_per_shard: MiB of a file in the folder; rank 0 has one in memory."""
        checkpoint.check_arguments("save_optimizer", gather_dtensor=gather_dtensor, prefix=prefix, use_async=use_async)
        checkpoint.save_optimizer(optimizer, checkpoint_path, size_per_shard)

    def load_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint_path: str | Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Go on from a folder of save_optimizer, of any layout, the dataloader too. Every rank calls it.

        On the layout that saved it training goes on bit by bit. Raises ShardcError for a folder of another model."""
        checkpoint.load_optimizer(optimizer, checkpoint_path)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint_path: str | Path) -> None:
        """Write the schedule's state, a file. Every rank calls it."""
        checkpoint.save_schedule(lr_scheduler, checkpoint_path)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint_path: str | Path) -> None:
        """Go on from a file of save_lr_scheduler."""
        checkpoint.load_schedule(lr_scheduler, checkpoint_path)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream
        return None
