"""Values of buffers that no checkpoint holds, though the model was built without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardc.capture.graph import op_name
from shardc.capture.patches import default_dtype


class ConstructionLog(TorchFunctionMode):
    """Records the tensor operations of a model's constructor, so that a few of them can be run again on the CPU.

    Enter it inside `torch.device("meta")`: building stays free, and `values(...)` computes only what a buffer needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype()
        self._calls: list[tuple[Callable, tuple, dict, list[int]]] = []
        self._keep: list[Any] = []  # ids stay unique only while their tensors live

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = args[0] if _fills_meta(func, args) else func(*args, **kwargs)
        items = out if isinstance(out, (tuple, list)) else (out,)
        made = [x for x in items if isinstance(x, torch.Tensor)]
        if made:
            self._calls.append((func, args, kwargs, [id(t) for t in made]))
            self._keep.append((made, args, kwargs))
        return out

    def values(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """id -> the real value, on the CPU, of tensors that the constructor computed."""
        wanted = {id(t) for t in tensors}
        needed = []
        for func, args, kwargs, made in reversed(self._calls):
            writes = args and op_name(func).endswith("_") and id(args[0]) in wanted
            if writes or wanted.intersection(made):
                needed.append((func, args, kwargs, made))
                wanted.update(id(x) for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        real: dict[int, torch.Tensor] = {}

        def load(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return real.get(id(item), item)
            if isinstance(item, torch.device) or item == "meta":
                return torch.device("cpu")
            if isinstance(item, (tuple, list)):
                return type(item)(load(x) for x in item)
            if isinstance(item, dict):
                return {key: load(x) for key, x in item.items()}
            return item

        with torch.device("cpu"), default_dtype(self._dtype):
            for func, args, kwargs, made in reversed(needed):
                out = func(*load(args), **load(kwargs))
                outs = [out] if isinstance(out, torch.Tensor) else [x for x in out if isinstance(x, torch.Tensor)]
                real.update(zip(made, outs, strict=True))
        return real


def _fills_meta(func: Callable, args: tuple) -> bool:
    """Whether a call fills a tensor without data at random, as most of a constructor does: there is nothing to do."""
    return bool(args) and op_name(func) in _RANDOM_FILLS and isinstance(args[0], torch.Tensor) and args[0].is_meta


_RANDOM_FILLS = {"uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "trunc_normal_"}


def _leaves(item: Any) -> Iterable[Any]:
    if isinstance(item, (tuple, list)):
        for x in item:
            yield from _leaves(x)
    elif isinstance(item, dict):
        yield from _leaves(list(item.values()))
    else:
        yield item


def buffer_values(model: nn.Module, log: ConstructionLog, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Name -> value on the CPU of the model's buffers `names`."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    wanted = {name: buffers[name] for name in names}
    real = log.values(wanted.values())
    return {name: real[id(tensor)].detach().clone() for name, tensor in wanted.items()}
