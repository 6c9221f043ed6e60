"""Sizes that report what the model compares them with: how capture learns of branches that it did not take."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardc.capture.graph import Source
from shardc.capture.source import running_statement


class Comparison(NamedTuple):
    """`left op right` on the host, in one run: `seq_len >= self.sliding_window`."""

    op: Callable[[Any, Any], bool]
    left: int
    right: int | float
    source: Source | None


def watched_int(log: list[Comparison]) -> type[int]:
    """A subclass of int whose comparisons are appended to `log`; arithmetic on it gives watched sizes again."""

    class WatchedInt(int):
        __hash__ = int.__hash__

        def __reduce__(self) -> tuple:
            return int, (int(self),)

    for op in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        setattr(WatchedInt, f"__{op.__name__}__", _comparison(op, log))
    for name in ("add", "sub", "mul", "floordiv", "mod"):
        for method in (f"__{name}__", f"__r{name}__"):
            setattr(WatchedInt, method, _arithmetic(method, WatchedInt))
    WatchedInt.__bool__ = lambda self: self != 0
    WatchedInt.__neg__ = lambda self: WatchedInt(-int(self))
    return WatchedInt


def _comparison(op: Callable, log: list[Comparison]) -> Callable:
    def compare(self: int, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        left, right = int(self), int(other) if isinstance(other, int) else other
        log.append(Comparison(op, left, right, running_statement()))
        return op(left, right)

    return compare


def _arithmetic(method: str, kind: type[int]) -> Callable:
    plain = getattr(int, method)

    def compute(self: int, other: Any) -> Any:
        result = plain(self, other)
        return kind(result) if type(result) is int else result

    return compute


def watch_sizes(sizes: Any, kind: type[int]) -> Any:
    """A size, or a `torch.Size`, of watched integers."""
    return kind(sizes) if isinstance(sizes, int) else torch.Size([kind(size) for size in sizes])
