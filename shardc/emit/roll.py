"""Runs of calls of one ModuleList's elements become loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from shardc.emit.frames import ChildCall, Frame, Item


@dataclass(eq=False, slots=True)
class Loop:
    """Calls of `container`'s elements `first`, `first + 1`, ..., each taking over what the one before returned.

    carried: for each formal name of an element that takes over a result, the index of that result.
    """

    container: str
    first: int
    calls: list[ChildCall]
    carried: dict[str, int] = field(default_factory=dict)

    @property
    def outputs(self) -> list[fx.Node]:
        return self.calls[-1].outputs

    @property
    def random(self) -> bool:
        return any(call.random for call in self.calls)

    @property
    def operands(self) -> list[fx.Node]:
        """What enters from outside: the first call's arguments, and those of later calls that no call before made."""
        made: set[fx.Node] = set()
        found = []
        for call in self.calls:
            found.extend(node for node in call.actuals if node not in made)
            made.update(call.outputs)
        return list(dict.fromkeys(found))

    def initial(self, result: int) -> fx.Node:
        """The value that the variable of a carried result has before the loop."""
        names = [name for name, index in self.carried.items() if index == result]
        call = self.calls[0]
        return next(actual for actual, name in zip(call.actuals, call.frame.formal_names, strict=True) if name in names)


Unit = Item | Loop


def split_index(path: str) -> tuple[str, int] | None:
    """ "model.layers.3" -> ("model.layers", 3)."""
    container, _, index = path.rpartition(".")
    return (container, int(index)) if index.isdigit() else None


def roll(frame: Frame) -> list[Unit]:
    """The frame's items, with runs of two and more chained calls replaced by loops."""
    readers: dict[fx.Node, list[object]] = {}
    for item in frame.items:
        for node in item.operands:
            readers.setdefault(node, []).append(item)
    for node in frame.results:
        readers.setdefault(node, []).append(None)
    blocks = {path for paths in frame.flow.model.blocks.values() for path in paths}
    units: list[Unit] = []
    run: list[ChildCall] = []

    def close() -> None:
        if len(run) > 1 or (run and frame.rolls_single and run[0].path in blocks):
            container, first = split_index(run[0].path)
            units.append(Loop(container, first, list(run), _carried(run)))
        else:
            units.extend(run)
        run.clear()

    for item in frame.items:
        if not isinstance(item, ChildCall) or split_index(item.path) is None:
            close()
            units.append(item)
            continue
        if run and not _continues(run, item, readers):
            close()
        run.append(item)
    close()
    return units


def _continues(run: Sequence[ChildCall], item: ChildCall, readers: dict[fx.Node, list[object]]) -> bool:
    last = run[-1]
    (container, index), (next_container, next_index) = split_index(last.path), split_index(item.path)
    if next_container != container or next_index != index + 1 or len(item.outputs) != len(last.outputs):
        return False
    carried = [node for node in last.outputs if node in item.actuals]
    alone = all(reader is item for node in last.outputs for reader in readers.get(node, ()))
    return bool(carried) and alone and _carried([*run, item]) is not None


def _carried(run: Sequence[ChildCall]) -> dict[str, int] | None:
    """Formal name -> index of the result that it takes over; None where two calls disagree."""
    seen: dict[str, int | None] = {}
    for before, call in pairwise(run):
        for name, actual in zip(call.frame.formal_names, call.actuals, strict=True):
            index = before.outputs.index(actual) if actual in before.outputs else None
            if seen.setdefault(name, index) != index:
                return None
    carried = {name: index for name, index in seen.items() if index is not None}
    first = run[0]
    starts: dict[int, fx.Node] = {}
    for name, actual in zip(first.frame.formal_names, first.actuals, strict=True):
        if name in carried and starts.setdefault(carried[name], actual) is not actual:
            return None
    return carried if set(carried.values()) <= set(starts) else None


def index_condition(chosen: Sequence[int], indices: Sequence[int]) -> str:
    """A condition on `i` that holds for `chosen` among `indices`: "i % 2 == 0", "i < 3", "i in (1, 4)"."""
    inside = set(chosen)
    if len(inside) == 1:
        return f"i == {chosen[0]}"
    if len(inside) == len(indices) - 1:
        return f"i != {next(i for i in indices if i not in inside)}"
    for period in range(2, len(indices) // 2 + 1):
        for sign, match in (("==", True), ("!=", False)):
            for rest in range(period):
                if all(((i % period == rest) == match) == (i in inside) for i in indices):
                    return f"i % {period} {sign} {rest}"
    if list(chosen) == list(indices[: len(chosen)]):
        return f"i < {chosen[-1] + 1}"
    if list(chosen) == list(indices[-len(chosen) :]):
        return f"i >= {chosen[0]}"
    return f"i in ({', '.join(map(str, chosen))})"
