"""In-place operations: which they are, and what returns the value that they write."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def writes_in_place(name: str, kwargs: dict) -> bool:
    """Whether a call changes one of its operands."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or kwargs.get("inplace") is True or kwargs.get("out") is not None or name in _IN_PLACE


def out_of_place(name: str) -> Callable | None:
    """The operation that returns what an in-place one writes; None where there is none: x[i] = y, random fills."""
    if name in _IN_PLACE:
        return _IN_PLACE[name]
    plain = name.rstrip("_")
    return getattr(torch.Tensor, plain, None) or getattr(nn.functional, plain, None)


_IN_PLACE: dict[str, Callable | None] = {
    "__iadd__": torch.Tensor.add,
    "__isub__": torch.Tensor.sub,
    "__imul__": torch.Tensor.mul,
    "__itruediv__": torch.Tensor.div,
    "__idiv__": torch.Tensor.div,
    "__ipow__": torch.Tensor.pow,
    "__imod__": torch.Tensor.remainder,
    "__ifloordiv__": torch.Tensor.floor_divide,
    "__imatmul__": torch.Tensor.matmul,
    "__iand__": torch.Tensor.bitwise_and,
    "__ior__": torch.Tensor.bitwise_or,
    "__ixor__": torch.Tensor.bitwise_xor,
    "__setitem__": None,
    "zero_": torch.zeros_like,
    "fill_": torch.full_like,
}
