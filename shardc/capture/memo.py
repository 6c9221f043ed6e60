"""What torch operations return on meta tensors, computed once for equal operands.

A meta kernel in Python costs up to some milliseconds; layer after layer and variant after variant asks for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from shardc.capture.graph import op_name


class Concrete(NamedTuple):
    """What one run shows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Concrete:
        with torch._C.DisableTorchFunction():
            return Concrete(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride())

    def make(self) -> torch.Tensor:
        """A new meta tensor of this kind."""
        shape, dtype, requires_grad, stride = self
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


class Made(NamedTuple):
    """One tensor that an operation returned. view_of: the operand whose memory it shares, by number."""

    concrete: Concrete
    view_of: int | None


class Slot:
    """Where a template has a tensor operand."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Signature:
    """One operation with all but its operands: equal calls share one object.

    args, kwargs: templates with a `Slot` for each operand. kind: None if it returns one tensor, else the sequence type.
    made: what it returns; items of a sequence that are not tensors stand for themselves.
    """

    __slots__ = ("args", "func", "kind", "kwargs", "made")

    def __init__(self, func: Callable, args: tuple, kwargs: dict, kind: type | None = None, made: tuple = ()) -> None:
        self.func, self.args, self.kwargs, self.kind, self.made = func, args, kwargs, kind, made

    @classmethod
    def of(cls, func: Callable, args: tuple, kwargs: dict, out: Any, operands: list[torch.Tensor]) -> Signature:
        """The signature of a call that returned `out`."""
        args, kwargs = _template((args, kwargs), iter(range(len(operands))), op_name(func) == "getitem")
        kind = None if isinstance(out, torch.Tensor) else type(out)
        items = (out,) if kind is None else out
        return cls(
            func, args, kwargs, kind, tuple([_made(x, operands) if isinstance(x, torch.Tensor) else x for x in items])
        )


def _template(item: Any, numbers: Iterator[int], keep_lists: bool) -> Any:
    """Lists become tuples, but for indices: x[[0, 1]] is not x[0, 1]."""
    if isinstance(item, torch.Tensor):
        return Slot(next(numbers))
    if isinstance(item, (tuple, list)):
        items = [_template(x, numbers, keep_lists) for x in item]
        return items if keep_lists and isinstance(item, list) else tuple(items)
    if isinstance(item, dict):
        return {key: _template(x, numbers, keep_lists) for key, x in item.items()}
    if isinstance(item, slice):
        return slice(*[_template(end, numbers, keep_lists) for end in (item.start, item.stop, item.step)])
    return item


def fill(template: Any, operands: list) -> Any:
    """The template with operand i in slot i."""
    if isinstance(template, Slot):
        return operands[template.number]
    if isinstance(template, (tuple, list)):
        return type(template)([fill(x, operands) for x in template])
    if isinstance(template, dict):
        return {key: fill(x, operands) for key, x in template.items()}
    if isinstance(template, slice):
        return slice(*[fill(end, operands) for end in (template.start, template.stop, template.step)])
    return template


def _made(tensor: torch.Tensor, operands: list[torch.Tensor]) -> Made:
    view_of = None
    for i, operand in enumerate(operands):
        base = tensor._base
        if tensor is operand or (base is not None and (base is operand or base is operand._base)):
            view_of = i
            break
    return Made(Concrete.of(tensor), view_of)


_PLAIN = frozenset((
    type(None), str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis), type,
))  # fmt: skip


class NotPlain(Exception):
    """An argument that a key cannot hold; the call is then like no other."""


def flatten(item: Any, operands: list[torch.Tensor], concrete: Callable[[torch.Tensor], Concrete]) -> Any:
    """A hashable key of one argument; its tensors go to `operands` and stand in the key by their `Concrete`."""
    kind = type(item)
    if kind is int or kind in _PLAIN:
        return item
    if isinstance(item, torch.Tensor):
        operands.append(item)
        return concrete(item)
    if kind is float:
        return (float, item.hex())  # 0.0 == -0.0
    if kind is bool:
        return (bool, item)  # True == 1
    if isinstance(item, (tuple, list)):
        return (kind, *[flatten(x, operands, concrete) for x in item])
    if kind is slice:
        return (slice, *[flatten(end, operands, concrete) for end in (item.start, item.stop, item.step)])
    if kind is dict:
        return (dict, *[(key, flatten(x, operands, concrete)) for key, x in item.items()])
    if isinstance(item, int):
        return int(item)
    raise NotPlain
