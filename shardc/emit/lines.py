"""What a forward is written as: statements, and the names that they need."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One statement: its text, one string a line with indentation of its own, and the names that it assigns."""

    text: tuple[str, ...]
    defines: frozenset[str] = frozenset()


@dataclass(slots=True)
class Body:
    """A forward in one variant. absent: names of formals that this variant does not have, they are None.

    none_names: names that must be None where they are read though an argument or an earlier value has that name.
    """

    lines: list[Line] = field(default_factory=list)
    absent: frozenset[str] = frozenset()
    none_names: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
