"""Give a stage that was built on the meta device its values."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import MeshAxis
from shardc.runtime.spec import ParameterSpec, PlanSpec
from shardc.runtime.weights import Weights

CONSTANTS_FILE = "constants.safetensors"


def materialize(
    stage: nn.Module,
    index: int,
    spec: PlanSpec,
    tp: MeshAxis,
    weights: Weights,
    constants: Path,
    device: torch.device,
    made: dict[str, nn.Parameter],
) -> None:
    """Replace the meta parameters and buffers of a stage.

    made: parameters by canonical name; a tied parameter is looked up there before it is made, so that all its names on
    this rank are one tensor. Raises ShardcError where stage and plan disagree, or a buffer is found nowhere.
    """
    known = spec.by_any_name()
    names = [name for name, _ in stage.named_parameters(remove_duplicate=False)]
    _check_names(index, spec, known, names)
    for name in names:
        parameter = known[name]
        if parameter.name not in made:
            _check_shape(index, parameter, stage.get_parameter(name), tp)
            value = weights.shard(parameter, tp, spec.dtype, device)
            made[parameter.name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        _assign(stage, name, made[parameter.name])
    for name, _ in list(stage.named_buffers(remove_duplicate=False)):
        value = _constant(name, constants, weights)
        _assign(stage, name, value.to(device=device, dtype=spec.buffers.get(name, value.dtype)))


def _check_names(index: int, spec: PlanSpec, known: dict[str, ParameterSpec], names: list[str]) -> None:
    unknown = sorted(set(names) - set(known))
    held = {known[name].name for name in names if name in known}
    missing = sorted(p.name for p in spec.parameters.values() if index in p.stages and p.name not in held)
    if unknown or missing:
        raise ShardcError(
            f"model.py: stage {index} has parameters that plan.json lacks: {unknown}; it lacks: {missing}",
            "compile the plan again",
        )


def _check_shape(index: int, spec: ParameterSpec, parameter: Tensor, tp: MeshAxis) -> None:
    expected = spec.shape if spec.shard is None else spec.shard.local_shape(spec.shape, tp)
    if tuple(parameter.shape) != expected:
        raise ShardcError(
            f"model.py: stage {index}: {spec.name} is {list(parameter.shape)} here, plan.json says {list(expected)}",
            "compile the plan again",
        )


def _constant(name: str, constants: Path, weights: Weights) -> Tensor:
    if constants.is_file():
        with safe_open(constants, "pt") as file:
            if name in file.keys():  # noqa: SIM118 -- the file is no mapping
                return file.get_tensor(name)
    found = weights.buffer(name)
    if found is not None:
        return found
    raise ShardcError(
        f"buffer {name} is neither in {CONSTANTS_FILE} of the plan nor in the weights", "compile the plan again"
    )


def _assign(stage: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = stage.get_submodule(path)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    else:
        owner.register_buffer(leaf, value, persistent=leaf not in owner._non_persistent_buffers_set)
