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
        self._training: dict[bool, list[bool]] = {}

    def state(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Attributes and buffers of all modules: what a forward writes to them can be undone."""
        return [(dict(vars(module)), dict(module._buffers)) for module in self.modules.values()]

    def restore(self, state: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
        """Undo what changed since `state` was taken; returns it by dotted name."""
        changed = {}
        for (path, module), (attributes, buffers) in zip(self.modules.items(), state, strict=True):
            for now, before in ((vars(module), attributes), (module._buffers, buffers)):
                if _unchanged(now, before):
                    continue
                changed |= {f"{path}.{name}": x for name, x in now.items() if before.get(name) is not x}
                now.clear()
                now.update(before)
        return changed

    def train(self, mode: bool) -> None:
        """`model.train(mode)`; from the second time on only the flags are set, which is faster."""
        if mode not in self._training:
            self.model.train(mode)
            self._training[mode] = [module.training for module in self.modules.values()]
        for module, flag in zip(self.modules.values(), self._training[mode], strict=True):
            module.__dict__["training"] = flag


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


_ARGUMENT_NAMES: dict[type, list[str]] = {}
