"""Layouts: what the ranks of one mesh axis hold of a value, and what they hold of its gradient.

| letter | value | gradient |
|---|---|---|
| I invariant | equal on all ranks | equal on all ranks |
| R replicated | equal on all ranks | a partial sum on each |
| S sharded | each rank a part of one factor | each rank the same part |
| P partial | a partial sum on each | equal on all ranks |

The value with one letter has the gradient of its *dual*: I with I, R with P, S with S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardc.runtime import collectives
from shardc.sharding.factors import Factor


@dataclass(frozen=True, slots=True)
class Layout:
    """One letter; S carries the factor that it shards."""

    letter: str
    factor: Factor | None = None

    def __repr__(self) -> str:
        return f"S({self.factor.size})" if self.factor else self.letter


I = Layout("I")  # noqa: E741  the letter of the table
R = Layout("R")
P = Layout("P")
# A value computed from parameters alone: I or R, whichever its users need, so that no activation is reduced for it.
FREE = Layout("free")

Layouts = dict[str, Layout]


def sharded(factor: Factor) -> Layout:
    return Layout("S", factor)


def same_layouts(a: dict[str, Layout], b: dict[str, Layout], has_gradient: bool) -> bool:
    """Whether two values are held alike on every axis; without a gradient I and R are the same."""
    return all(a[axis] == b[axis] or (not has_gradient and {a[axis], b[axis]} == {I, R}) for axis in a)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A change of layout: the runtime function, and the letters before and after."""

    function: Callable
    before: str
    after: str


CONVERSIONS = {
    conversion.function: conversion
    for conversion in (
        Conversion(collectives.copy_to, "I", "R"),
        Conversion(collectives.all_reduce, "P", "I"),
        Conversion(collectives.all_gather, "S", "R"),
        Conversion(collectives.reduce_scatter, "P", "S"),
        Conversion(collectives.shard, "I", "S"),
        Conversion(collectives.all_gather_invariant, "S", "I"),
        Conversion(collectives.keep_on_first, "I", "P"),
    )
}
FUNCTION_OF = {(c.before, c.after): c.function for c in CONVERSIONS.values()}
