"""Which values need no name: those that are used once, in the statement in which the author computed them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from shardc.capture.graph import op_name
from shardc.emit.flow import value_of
from shardc.emit.frames import ChildCall, Frame, Op
from shardc.emit.names import caller_source, result_names
from shardc.emit.roll import Loop, Unit


@dataclass(eq=False, slots=True)
class Statement:
    """One line to be: `root` is computed last, from what is folded into it. `units`: in order of evaluation."""

    root: Unit
    units: list[Unit] = field(default_factory=list)


class Folder:
    """Folds the units of one frame into statements. keep: values that must have a name of their own."""

    def __init__(self, frame: Frame, units: list[Unit], keep: set[fx.Node]):
        self.frame = frame
        self.units = units
        self.place = {unit: i for i, unit in enumerate(units)}
        self.maker = {node: unit for unit in units for node in unit.outputs}
        self.uses: dict[fx.Node, int] = {}
        self.readers: dict[fx.Node, list[Unit]] = {}
        for unit in units:
            for node in unit.operands:
                self.uses[node] = self.uses.get(node, 0) + 1
                self.readers.setdefault(node, []).append(unit)
        for node in frame.results:
            self.uses[node] = self.uses.get(node, 0) + 1
        self.keep = keep
        self.folded: set[fx.Node] = set()

    def statements(self) -> list[Statement]:
        line_of = {unit: Statement(unit, [unit]) for unit in self.units}
        lines = [line_of[unit] for unit in self.units]
        for unit in self.units:
            if not self._may_fold(unit):
                continue
            (node,) = unit.outputs
            reader = self.readers[node][0]
            source, target = line_of[unit], line_of[reader]
            self.folded.add(node)
            merged = self._evaluation_order(target.root)
            if not self._keeps_order(source, target, merged, lines):
                self.folded.discard(node)
                continue
            target.units = merged
            lines.remove(source)
            for moved in source.units:
                line_of[moved] = target
        return lines

    def _may_fold(self, unit: Unit) -> bool:
        if isinstance(unit, Loop) or len(unit.outputs) != 1:
            return False
        (node,) = unit.outputs
        if node in self.keep or self.uses.get(node) != 1 or node in self.frame.results:
            return False
        if draws_sharded(unit):
            return False
        reader = self.readers[node][0]
        if isinstance(reader, Loop):
            return False
        if isinstance(unit, ChildCall):
            return not result_names(self.frame, unit) or self._share_statement(unit, reader)
        if value_of(unit.node) is None:  # a single part of an operation with several results
            return False
        source = unit.node.meta.get("source")
        if source is None or source.name is None:
            return True
        if isinstance(reader, ChildCall):
            return source.line in self._lines(reader)
        return source == reader.node.meta.get("source")

    def _lines(self, call: ChildCall) -> set[int]:
        author, attribute = caller_source(self.frame, call)
        return author.lines.get(attribute, set())

    def _share_statement(self, call: ChildCall, reader: Unit) -> bool:
        if isinstance(reader, ChildCall):
            return not self._lines(call).isdisjoint(self._lines(reader))
        source = reader.node.meta.get("source")
        return source is not None and source.line in self._lines(call)

    def _evaluation_order(self, root: Unit) -> list[Unit]:
        found = []
        for node in root.operands:
            if node in self.folded:
                found.extend(self._evaluation_order(self.maker[node]))
        return [*found, root]

    def _keeps_order(self, source: Statement, target: Statement, merged: list[Unit], lines: list[Statement]) -> bool:
        moved = set(source.units)
        between = lines[lines.index(source) + 1 : lines.index(target)]
        if not all(self._commute(a, b) for a in moved for line in between for b in line.units):
            return False
        position = {unit: i for i, unit in enumerate(merged)}
        for a in moved:
            for b in merged:
                flipped = b not in moved and (self.place[a] < self.place[b]) != (position[a] < position[b])
                if flipped and not self._commute(a, b):
                    return False
        return True

    def _commute(self, a: Unit, b: Unit) -> bool:
        """Whether exchanging two units changes neither random numbers nor the order in which gradients are added.

        A sum of two gradients is the same in either order; of three it is not, unless one is that of a slice."""
        if a.random and b.random:
            return False
        if is_slice(a) or is_slice(b):
            return True
        shared = set(a.operands).intersection(b.operands)
        return not any(self.uses[node] > 2 and value_of(node).requires_grad for node in shared if value_of(node))


def is_slice(unit: Unit) -> bool:
    return isinstance(unit, Op) and op_name(unit.node.target) in ("getitem", "split", "chunk")


def draws_sharded(unit: Unit) -> bool:
    """Whether the unit itself draws random numbers of a sharded stream (a library module draws for its caller)."""
    if isinstance(unit, Op):
        return "rng_axis" in unit.node.meta
    if isinstance(unit, ChildCall):
        return unit.frame.is_library and any(draws_sharded(item) for item in unit.frame.items)
    return False
