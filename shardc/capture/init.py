"""How a model initialises each parameter, read off the model's own initialiser without running it on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardc.capture.graph import op_name
from shardc.capture.model_index import ModelIndex

Init = tuple[str, float, float]


class _InitLog(TorchFunctionMode):
    """Keeps the last fill of each tensor."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.found: dict[str, Init] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes all by keyword
        name = self.names.get(id(tensor))
        fill = _fill(op_name(func), args[1:], kwargs) if name else None
        if fill:
            self.found[name] = fill
        return func(*args, **kwargs)


def _fill(op: str, args: tuple, kwargs: dict) -> Init | None:
    if op == "normal_":
        given = dict(zip(("mean", "std"), args, strict=False)) | kwargs
        return ("normal", float(given.get("mean", 0.0)), float(given.get("std", 1.0)))
    if op in ("zero_", "zeros_"):
        return ("constant", 0.0, 0.0)
    if op in ("fill_", "constant_", "ones_"):
        value = 1.0 if op == "ones_" else args[0] if args else kwargs.get("val", kwargs.get("value", 0.0))
        return ("constant", float(value), 0.0)
    return None


def initial_values(index: ModelIndex) -> dict[str, Init]:
    """Parameter name -> ("normal", mean, std) or ("constant", value, 0.0), by the model's `_init_weights`.

    A model without one, or a parameter that it leaves alone, gets torch's own fan-in bound as a normal of that spread.
    """
    model, names = index.model, index.tensor_names
    log = _InitLog(names)
    initialise = getattr(model, "_init_weights", None)
    if initialise is not None:
        seen: set[tuple] = set()
        with log, torch.no_grad():
            for path, module in model.named_modules():
                key = (
                    type(module),
                    path.rsplit(".", 1)[-1],
                    *(tuple(p.shape) for p in module.parameters(recurse=False)),
                )
                own = [names[id(p)] for p in module.parameters(recurse=False)]
                if not own:
                    continue
                if key in seen:  # equal modules are initialised alike: read it off the first
                    continue
                seen.add(key)
                initialise(module)
    found: dict[str, Init] = {}
    patterns: dict[tuple, Init] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            key = (type(module), path.rsplit(".", 1)[-1], leaf, tuple(parameter.shape))
            if name in log.found:
                patterns[key] = log.found[name]
            fallback = (
                ("constant", 0.0, 0.0) if parameter.dim() < 2 else ("normal", 0.0, parameter.shape[-1] ** -0.5 / 3**0.5)
            )
            found.setdefault(name, log.found.get(name) or patterns.get(key) or fallback)
    return found
