"""Nested arguments: tuples, lists, dicts and slices of tensors and literals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def has_tensor(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    return isinstance(item, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in item)


def map_leaves(item: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply to all leaves of one kind, in order."""
    if isinstance(item, kind):
        return function(item)
    if isinstance(item, slice):
        return slice(*[map_leaves(end, kind, function) for end in (item.start, item.stop, item.step)])
    if isinstance(item, (tuple, list)):
        mapped = [map_leaves(x, kind, function) for x in item]
        return type(item)(*mapped) if hasattr(item, "_fields") else type(item)(mapped)
    if isinstance(item, dict):
        return {key: map_leaves(x, kind, function) for key, x in item.items()}
    return item


def map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    return map_leaves(item, torch.Tensor, function)


def tensors_in(item: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(item, found.append)
    return found
