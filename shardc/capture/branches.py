"""Branches on sizes that a run did not take: `if seq_len >= self.sliding_window` below the window.

Every comparison of a size on the host is known from the traces. Where it turns, a further run shows whether the other
side computes something else. Meta tensors make such a run cheap, whatever the size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.capture.fit import FitError, Probe, at, fit_literal
from shardc.capture.graph import Source
from shardc.capture.rows import Trace
from shardc.capture.symbols import Dim
from shardc.errors import ShardcError

_SIGNS = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
_LONGEST = 2**24  # no model trains on longer sequences


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison with symbols: `S >= 4096`."""

    op: Callable[[Any, Any], bool]
    left: Dim
    right: Dim | float
    source: Source | None

    def difference(self, batch: int, seq: int) -> float:
        probe = Probe(batch, seq, None)
        return at(self.left, probe) - at(self.right, probe)

    def holds(self, batch: int, seq: int) -> bool:
        return self.op(self.difference(batch, seq), 0)

    def __str__(self) -> str:
        return f"{self.left} {_SIGNS[self.op]} {self.right} ({self.source})"


@dataclass(frozen=True, slots=True)
class Point:
    """Sizes at which a branch may turn, and why."""

    batch: int
    seq: int
    why: str


def turning_points(traces: Sequence[Trace], probes: Sequence[Probe], low: int, high: float) -> list[Point]:
    """Sizes, with `low <= S < high`, on the other side of each branch on sizes that all traces took alike."""
    batch, seq = 3, max(low, min(probe.seq for probe in probes))
    points: dict[tuple[int, int], Point] = {}
    for condition in _conditions(traces, probes):
        for s in _turns(
            condition, lambda n, c=condition: c.difference(batch, n), lambda n, c=condition: c.holds(batch, n), seq
        ):
            if low <= s < high:
                points.setdefault((batch, s), Point(batch, s, str(condition)))
        for b in _turns(
            condition, lambda n, c=condition: c.difference(n, seq), lambda n, c=condition: c.holds(n, seq), batch
        ):
            points.setdefault((b, seq), Point(b, seq, str(condition)))
    for turn, source in _size_reads(traces):
        if low <= turn < high:
            points.setdefault((batch, turn), Point(batch, turn, f"a value that follows from S ({source})"))
    return sorted(points.values(), key=lambda p: (p.seq, p.batch))


def _conditions(traces: Sequence[Trace], probes: Sequence[Probe]) -> list[Condition]:
    """The comparisons of sizes that follow the batch and had one answer in all runs."""
    if len({len(trace.comparisons) for trace in traces}) > 1:
        raise _unclear(None)
    found = {}
    for row in zip(*(trace.comparisons for trace in traces), strict=True):
        if len({(c.op, c.source) for c in row}) > 1:
            raise _unclear(row[0].source)
        try:
            left = fit_literal([c.left for c in row], probes)
            right = fit_literal([c.right for c in row], probes)
        except FitError:
            raise _unclear(row[0].source) from None
        answers = {c.op(c.left, c.right) for c in row}
        if left != right and len(answers) == 1 and not (isinstance(left, int) and isinstance(right, (int, float))):
            found[Condition(row[0].op, left, right, row[0].source)] = None
    return list(found)


def _unclear(source: Source | None) -> ShardcError:
    return ShardcError(
        f"the model: branches on the size of the batch in a way that capture cannot follow ({source})",
        "rewrite the line so that it follows tensor shapes, or mark the module `opaque`",
    )


def _turns(
    condition: Condition, difference: Callable[[int], float], holds: Callable[[int], bool], known: int
) -> Iterator[int]:
    """Next to where `difference` crosses zero: the nearest sizes on each side with another answer than at `known`."""
    slope = difference(2) - difference(1)
    if not slope:
        return
    root = 1 - difference(1) / slope
    around = [
        n for n in range(math.floor(root) - 1, math.ceil(root) + 2) if 1 <= n <= _LONGEST and holds(n) != holds(known)
    ]
    below, above = [n for n in around if n <= root], [n for n in around if n > root]
    yield from below[-1:]
    yield from above[:1]


def _size_reads(traces: Sequence[Trace]) -> Iterator[tuple[int, Source | None]]:
    """Lengths around each number in the computation of a value that the host read."""
    if len({len(trace.size_reads) for trace in traces}) > 1:
        raise _unclear(None)
    for row in zip(*(trace.size_reads for trace in traces), strict=True):
        constants = frozenset.intersection(*(read.literals for read in row))
        yield 1, row[0].source
        for constant in constants:
            if 2 <= constant <= _LONGEST:
                for turn in range(int(constant) - 1, int(constant) + 3):
                    yield turn, row[0].source
