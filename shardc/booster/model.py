"""The model that boost returns: called as the user's own, while ranks hold parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardc.booster.criterion import InFloat32
from shardc.booster.handle import ParameterHandle
from shardc.errors import ShardcError
from shardc.runtime.compile_blocks import compile_blocks
from shardc.runtime.module import PlanModule
from shardc.runtime.recompute import Recompute, disable_recompute, enable_recompute

# What models of transformers take in the order of their forward, and what says only how to return.
_POSITIONAL = ("input_ids", "attention_mask", "position_ids")
_ABOUT_OUTPUTS = {"return_dict": True, "use_cache": False, "output_attentions": False, "output_hidden_states": False}


class BoostedModel(nn.Module):
    """model(**batch) -> outputs with .loss and .logits, as PlanModule's, from CPU tensors or the device's.

    module: the PlanModule of this rank. config, generation_config: the user's model's. Parameters are this rank's,
    under their Hugging Face names, to be counted and looked at: gradients and steps are the optimizer's.
    """

    def __init__(
        self,
        module: PlanModule,
        *,
        config: Any,
        generation_config: Any,
        peft_config: Any,
        float32_outputs: bool,
        cast_inputs: bool,
    ):
        """peft_config: of a PeftModel, else None. float32_outputs, cast_inputs: floating outputs become float32,
        floating inputs the model's dtype."""
        super().__init__()
        self.module = module
        self.config, self.generation_config, self.peft_config = config, generation_config, peft_config
        self.float32_outputs, self.cast_inputs = float32_outputs, cast_inputs
        self.criterion: Callable[[Any, Any], Tensor] | None = None
        self.after_call: Callable[[dict[str, Any], Tensor], None] | None = None
        self._handles: dict[int, ParameterHandle] = {}

    def unwrap(self, unwrap_peft: bool = True) -> PlanModule:
        """This rank's part of the model."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model of transformers: loss over the global batch where labels are given. See PlanModule.forward."""
        batch = self._batch(args, kwargs)
        criterion = self.criterion
        if criterion is not None and self.float32_outputs:
            criterion = InFloat32(criterion)
        outputs = self.module(**batch, criterion=criterion)
        if self.float32_outputs:
            outputs.to_float32()
        if self.after_call is not None and outputs.loss is not None and torch.is_grad_enabled():
            self.after_call(batch, outputs.loss)
        return outputs

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        known = self.module.spec.batch_names
        names = _POSITIONAL if "input_ids" in known else known
        if len(args) > len(names) or set(names[: len(args)]) & set(kwargs):
            raise ShardcError(
                f"{self.module.spec.model}: {len(args)} positional arguments beside {sorted(kwargs)}; "
                f"the first are {', '.join(names)}",
                "call model(**batch)",
            )
        batch = dict(zip(names, args, strict=False)) | kwargs
        for name, value in _ABOUT_OUTPUTS.items():
            given = batch.pop(name, None)
            if given is not None and bool(given) != value:
                raise ShardcError(
                    f"{self.module.spec.model}: {name}={given!r} is not supported; valid: {value}", f"leave {name} out"
                )
        if self.cast_inputs:
            dtype = self.module.spec.dtype
            floating = {key: x for key, x in batch.items() if isinstance(x, Tensor) and x.is_floating_point()}
            batch |= {key: x.to(dtype) for key, x in floating.items()}
        return batch

    # -- parameters ----------------------------------------------------------------------------------------------------
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parts, to be read."""
        for name, parameter in self.module.named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) not in self._handles:
                own = parameter.detach()
                own = own.to_local() if hasattr(own, "to_local") else own  # fully_shard makes DTensors
                self._handles[id(parameter)] = ParameterHandle(own, parameter.requires_grad)
            yield name, self._handles[id(parameter)]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's parts, to be read."""
        yield from (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers under their Hugging Face names."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Of the whole model, shared ones once."""
        specs = self.module.spec.parameters.values()
        return sum(
            torch.Size(spec.shape).numel()
            for spec in specs
            if (spec.requires_grad or not only_trainable) and not (exclude_embeddings and "embed" in spec.name)
        )

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.module.mesh.device

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        return self.module.spec.dtype

    def to(self, *args: Any, **kwargs: Any) -> BoostedModel:
        """Itself, where it is there already. Raises ShardcError for another device or dtype."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if (device is None or device.type == self.device.type) and dtype in (None, self.dtype):
            return self
        raise ShardcError(
            f"model.to({device or dtype}): the model is on {self.device} in {self.dtype} since boost",
            "choose precision= of the plugin, and leave the device to boost",
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        raise ShardcError(
            f"the model is on {self.device} in {self.dtype} since boost",
            "choose precision= of the plugin, and leave the device to boost",
        )

    def cuda(self, device: Any = None) -> BoostedModel:
        """Itself, where it is on a GPU."""
        return self.to("cuda")

    def cpu(self) -> BoostedModel:
        """Itself, where it is on the CPU."""
        return self.to("cpu")

    # -- what else a script does ---------------------------------------------------------------------------------------
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on each rank, where the plugin keeps them whole."""
        return self.module.state.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.module.zero_grad(set_to_none)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """All layers recompute their activations in backward, in place of the plugin's gradient_checkpoint_config."""
        enable_recompute(self.module, Recompute())

    def gradient_checkpointing_disable(self) -> None:
        """No layer recomputes."""
        disable_recompute(self.module)

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """torch.compile each block; see shardc.runtime.compile_blocks."""
        compile_blocks(self.module, **options)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ShardcError: a rank holds a part of the model."""
        raise ShardcError("model.state_dict(): each rank holds a part of it", "call booster.save_model(model, folder)")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ShardcError: a rank holds a part of the model."""
        raise ShardcError(
            "model.load_state_dict(): each rank holds a part of it", "call booster.load_model(model, folder)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises ShardcError: neither a copy nor a pickle of one rank's part is a model."""
        raise ShardcError(
            "a boosted model is neither copied nor pickled: each rank holds a part of it, and is tied to the job",
            "call booster.save_model(model, folder)",
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ShardcError: all ranks write together, by booster.save_model."""
        raise ShardcError(
            "model.save_pretrained: each rank holds a part of the model",
            f"call booster.save_model(model, {str(save_directory)!r}, shard=True) on every rank",
        )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ShardcError: generation is transformers' own."""
        raise ShardcError(
            "model.generate: a model that is split for training does not generate",
            "call booster.save_model(model, folder, shard=True), then from_pretrained(folder) and generate",
        )
