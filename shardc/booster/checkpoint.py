"""What Booster writes and reads: weights, adapters, the optimizer with all that a resumed run needs, a schedule."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardc.booster.lora import save_adapter, saved_names
from shardc.booster.model import BoostedModel
from shardc.booster.optimizer import BoostedOptimizer
from shardc.errors import ShardcError
from shardc.runtime import checkpoint
from shardc.runtime.optimizer_checkpoint import load_optimizer as read_optimizer
from shardc.runtime.optimizer_checkpoint import save_optimizer as write_optimizer
from shardc.runtime.replace_folder import replacing_file
from shardc.runtime.weights import open_weights


def check_arguments(caller: str, *, gather_dtensor: bool, prefix: str | None, use_async: bool) -> None:
    """Arguments of ColossalAI that no checkpoint here has. Raises ShardcError for a prefix, warns of the others."""
    if prefix:
        raise ShardcError(f"{caller}: prefix={prefix!r} is not supported", "leave it out: files have fixed names")
    without_effect = {"gather_dtensor=False": not gather_dtensor, "use_async=True": use_async}
    found = [name for name, is_given in without_effect.items() if is_given]
    if found and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(f"{caller}: {', '.join(found)} has no effect: whole tensors are written, at once", stacklevel=3)


def save_model(
    model: BoostedModel, path: str | Path, shard: bool, size_per_shard: int, use_safetensors: bool | None
) -> None:
    """A Hugging Face folder, or one file; see Booster.save_model."""
    module = _module(model, "save_model")
    _refuse_adapters(model, "save_model", "call booster.save_lora_as_pretrained(model, folder)")
    pieces = checkpoint.gather(module.state.parameter, module.spec, module.mesh, module.pipeline.schedule)
    if not shard:
        checkpoint.save_file(Path(path), pieces, module.spec, module.mesh, use_safetensors)
        return

    def finish(folder: Path) -> None:
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)

    checkpoint.save_pretrained(
        Path(path), pieces, module.spec, module.mesh, module.folder, size_per_shard * 2**20, finish=finish
    )


def load_model(model: BoostedModel, path: str | Path) -> None:
    """The weights of a folder or a file."""
    module = _module(model, "load_model")
    _refuse_adapters(model, "load_model", "give the adapters' folder to booster.enable_lora(pretrained_dir=)")
    weights = open_weights(path)
    weights.check(module.spec.parameters.values())
    module.state.load(weights)


def save_adapters(model: BoostedModel, folder: str | Path) -> None:
    """The adapters of a boosted PeftModel, as peft writes them."""
    module = _module(model, "save_lora_as_pretrained")
    if model.peft_config is None:
        raise ShardcError("save_lora_as_pretrained: the model has no adapters", "call booster.enable_lora before boost")
    (config,) = model.peft_config.values()
    names = saved_names(module.spec.parameters, config)
    spec = replace(module.spec, parameters={name: module.spec.parameters[name] for name in names})
    tensors = dict(checkpoint.gather(module.state.parameter, spec, module.mesh, module.pipeline.schedule))
    with checkpoint.agreed():
        if module.mesh.rank == 0:
            save_adapter(folder, tensors, config)


def save_optimizer(optimizer: BoostedOptimizer, folder: str | Path, size_per_shard: int) -> None:
    """All that a run needs to go on, besides the weights."""
    _boosted(optimizer, BoostedOptimizer, "save_optimizer")
    extra: dict[str, Any] = {"steps": optimizer.num_steps}
    if optimizer.scaler is not None:
        extra["scaler"] = optimizer.scaler.state_dict()
    if optimizer.dataloader is not None:
        extra["dataloader"] = optimizer.dataloader.state_dict()
    write_optimizer(Path(folder), optimizer.module, optimizer.optim, extra=extra, max_file_bytes=size_per_shard * 2**20)


def load_optimizer(optimizer: BoostedOptimizer, folder: str | Path) -> None:
    """Go on from such a folder."""
    _boosted(optimizer, BoostedOptimizer, "load_optimizer")
    extra = read_optimizer(Path(folder), optimizer.module, optimizer.optim)
    optimizer.num_steps = extra["steps"]
    if optimizer.scaler is not None and "scaler" in extra:
        optimizer.scaler.load_state_dict(extra["scaler"])
    if optimizer.dataloader is not None and "dataloader" in extra:
        optimizer.dataloader.load_state_dict(extra["dataloader"])
    if optimizer.monitor is not None:
        optimizer.monitor.steps = optimizer.num_steps


def save_schedule(lr_scheduler: Any, path: str | Path) -> None:
    """The state of a learning rate schedule, by rank 0."""
    path = Path(path)
    with checkpoint.agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:
            with replacing_file(path) as partial:
                torch.save(lr_scheduler.state_dict(), partial)


def load_schedule(lr_scheduler: Any, path: str | Path) -> None:
    """Go on from it."""
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # of the file system, zipfile, pickle or torch, as the damage has it
        raise ShardcError(
            f"load_lr_scheduler: {path} cannot be read: {error}", "pass a file that booster.save_lr_scheduler wrote"
        ) from error
    lr_scheduler.load_state_dict(state)


def _refuse_adapters(model: BoostedModel, caller: str, advice: str) -> None:
    if model.peft_config is not None:
        raise ShardcError(f"{caller}: the model has adapters, which no Hugging Face folder of a model holds", advice)


def _module(model: Any, caller: str) -> Any:
    _boosted(model, BoostedModel, caller)
    return model.module


def _boosted(found: Any, kind: type, caller: str) -> None:
    if not isinstance(found, kind):
        raise ShardcError(
            f"{caller}: given {type(found).__name__}, not what boost returned", "call booster.boost first"
        )
