"""The axes of tensor parallelism, as layouts name them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Mesh:
    """The atomic axes of tp: ("tp",), or ("tp.kv", "tp.replica") where KV heads are replicated; their sizes."""

    sizes: dict[str, int]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def atomic(self, name: str) -> tuple[str, ...]:
        """The atomic axes that a collective's axis covers."""
        return self.axes if name == "tp" else (name,)

    def name(self, axes: tuple[str, ...]) -> str:
        """The shortest name for some atomic axes."""
        return "tp" if axes == self.axes else axes[0]

    @property
    def total(self) -> int:
        return prod(self.sizes.values())
