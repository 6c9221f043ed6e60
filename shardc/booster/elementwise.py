"""Give a user's optimizer the flat tensors of a placement in place of the model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.runtime.state import OptimizedState

# A chunk is one flat tensor of many parameters: an optimizer must treat each element by itself. All of torch that do:
_NAMES = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
_elementwise: set[type] = {getattr(torch.optim, name) for name in _NAMES}


def declare_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Say that a class updates each element from that element's own gradient and state; usable as a decorator.

    Norms over a parameter, factored states or a parameter's shape must not enter its update."""
    _elementwise.add(optimizer_class)
    return optimizer_class


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises ShardcError for an optimizer that is not known to be elementwise, or has taken steps already."""
    kind = type(optimizer)
    if kind not in _elementwise:
        raise ShardcError(
            f"optimizer {kind.__name__}: it is not known to update each element by itself; "
            f"valid: {', '.join(_NAMES)} of torch.optim",
            "if its update of an element depends on nothing else, call shardc.booster.declare_elementwise"
            f"({kind.__name__})",
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ShardcError(
            f"optimizer {kind.__name__}: it has taken steps before boost",
            "make it anew, boost, and load its state with booster.load_optimizer",
        )


def group_of_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, int]:
    """Parameter group of each parameter by canonical name. names: by id of the live model's parameters.

    Raises ShardcError for a parameter that is not the model's."""
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise ShardcError(
                    f"optimizer: parameter {position} of group {index}, {list(parameter.shape)}, is not of the model",
                    "make the optimizer from the parameters of the model that is given to boost",
                )
            if parameter.requires_grad:
                groups[name] = index
    return groups


def adopt(optimizer: torch.optim.Optimizer, state: OptimizedState, device: torch.device) -> None:
    """Let the optimizer update the masters of `state`; its groups keep their options.

    The object stays the same, so that schedules that were made from it go on to set its learning rates. Where the class
    has a fused kernel and the user chose no implementation, it is used on a GPU."""
    groups = [{**group, "params": state.masters(index)} for index, group in enumerate(optimizer.param_groups)]
    for group in groups:
        if device.type == "cuda" and group.get("fused", True) is None and group.get("foreach") is None:
            group["fused"] = True
    taken = inspect.signature(type(optimizer)).parameters
    # Some classes make state when they are constructed (Adagrad).
    filled = [group for group in groups if group["params"]] or [{"params": [nn.Parameter(torch.zeros(0))]}]
    fresh = type(optimizer)(filled, **{key: value for key, value in optimizer.defaults.items() if key in taken})
    optimizer.state.clear()
    optimizer.state.update({key: value for key, value in fresh.state.items() if key.numel()})
    for group, adopted in zip(optimizer.param_groups, groups, strict=True):
        group.update(adopted)


def _has_stepped(state: Mapping[str, object]) -> bool:
    """Whether a parameter's state is more than what a constructor makes."""
    step = state.get("step", 0)
    return bool(step != 0) if "step" in state else bool(state)
