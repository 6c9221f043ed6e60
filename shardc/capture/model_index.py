"""What a built model is made of, looked up once and used by every run: paths, names, where its blocks are."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class ModelIndex:
    """Names of a model's modules and tensors by identity."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.tensor_names = canonical_names(model)
        self.block_paths = {
            f"{path}.{i}" if path else str(i)
            for path, module in self.modules.items()
            if isinstance(module, nn.ModuleList) and len(module) > 1
            for i in range(len(module))
        }
        self._states: dict[bool, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def train(self, mode: bool) -> None:
        """`model.train(mode)`; from the second time on only the flags are set, which is faster."""
        if mode not in self._states:
            self.model.train(mode)
            modules = self.modules.values()
            self._states[mode] = [(dict(vars(module)), dict(module._buffers)) for module in modules]
        for module, (attributes, _) in zip(self.modules.values(), self._states[mode], strict=True):
            vars(module)["training"] = attributes["training"]

    def restore(self) -> dict[str, Any]:
        """Undo what a forward wrote to attributes and buffers since `train`; returns it by dotted name."""
        changed = {}
        state = self._states[self.model.training]
        for (path, module), (attributes, buffers) in zip(self.modules.items(), state, strict=True):
            for now, before in ((vars(module), attributes), (module._buffers, buffers)):
                if _unchanged(now, before):
                    continue
                changed |= {f"{path}.{name}": x for name, x in now.items() if before.get(name) is not x}
                now.clear()
                now.update(before)
        return changed


def _unchanged(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now == before  # compares identities first, so it is fast
    except (RuntimeError, ValueError):  # two tensors or arrays
        return False


def canonical_names(model: nn.Module) -> dict[int, str]:
    """id of each parameter and buffer -> its first name in `named_parameters` order (the others are aliases)."""
    names: dict[int, str] = {}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            names.setdefault(id(tensor), name)
    return names


def argument_names(module_class: type) -> list[str]:
    """The parameters of a module's forward, without self."""
    names = _ARGUMENT_NAMES.get(module_class)
    if names is None:
        names = _ARGUMENT_NAMES[module_class] = list(inspect.signature(module_class.forward).parameters)[1:]
    return names


def accepted_names(model: nn.Module) -> set[str]:
    """The keywords that a model's forward takes; a wrapper around one other module passes on what it does not name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = {parameter.name for parameter in parameters} - {"self"}
    inner = list(model.children())
    if len(inner) == 1 and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names |= accepted_names(inner[0])
    return names


_ARGUMENT_NAMES: dict[type, list[str]] = {}
