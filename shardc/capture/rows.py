"""What a recorded run consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardc.capture.graph import Call, Source
from shardc.capture.memo import Concrete, Signature
from shardc.capture.sizes import Comparison


@dataclass(eq=False, slots=True)
class Row:
    """One recorded operation, input or parameter. Light: a deep model has thousands, few of which become fx nodes."""

    op: str
    target: Any
    signature: Signature | None = None
    operands: tuple[Row, ...] = ()
    call: Call | None = None
    source: Source | None = None
    name: str | None = None
    concrete: Concrete | None = None  # None on operations that return several tensors

    def literals(self) -> tuple[tuple, dict]:
        """(args, kwargs) as templates."""
        return (self.signature.args, self.signature.kwargs) if self.signature else ((), {})


@dataclass(eq=False, slots=True)
class BlockCall:
    """One call of a ModuleList element: what entered it, its rows `first:last`, what left it."""

    path: str
    first: int
    inputs: list[Row] = field(default_factory=list)
    outputs: list[Row] = field(default_factory=list)
    last: int = 0
    output_tree: Any = None
    skeleton: Any = None  # arguments with tensors replaced by their kind


class SizeRead(NamedTuple):
    """A value that follows from sizes alone and that the host read."""

    literals: frozenset[int | float]  # the numbers in its computation: where it may turn
    source: Source | None


@dataclass(slots=True)
class Trace:
    """One recorded run: literals are those of this run."""

    rows: list[Row] = field(default_factory=list)
    outputs: dict[str, Row] = field(default_factory=dict)
    blocks: list[BlockCall] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    size_reads: list[SizeRead] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)  # what forward kept on its modules: dotted name -> value
