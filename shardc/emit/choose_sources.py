"""Which tensor each printed size, dtype and device of a forward is read off, and how long that keeps its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from shardc.emit.fold import Statement
from shardc.emit.frames import Frame, Op
from shardc.emit.roll import Unit
from shardc.emit.sources import Need, gathered, gives, may_be_missing, needs_of, parts_of


class ChosenSources:
    """source: for an operation and what it needs, the tensor that shows it.

    last_use, last_dtype_use: the index of the last statement that reads a value, or no more than its dtype.
    """

    def __init__(self, frame: Frame, statements: Sequence[Statement], extra_uses: Mapping[fx.Node, int]):
        """extra_uses: values that are read at other statements than the operations say."""
        self.frame = frame
        self.statements = statements
        self.source: dict[tuple[fx.Node, Need], fx.Node] = {}
        self.last_use: dict[fx.Node, int] = {}
        self.last_dtype_use: dict[fx.Node, int] = {}
        for i, statement in enumerate(statements):
            for unit in statement.units:
                for node in unit.operands:
                    self.last_use[node] = i
        for node in frame.results:
            self.last_use[node] = len(statements)
        for node, i in extra_uses.items():
            self.last_use[node] = max(self.last_use.get(node, 0), i)

    def choose(self, folded: set[fx.Node], common: frozenset[str]) -> fx.Node | None:
        """Finds every source, or returns a folded value that must get a name because only it shows what is needed.

        folded: values that are written inside the statement that reads them. common: formals of all variants."""
        real = dict(self.last_use)
        pairs = zip(self.frame.formals, self.frame.formal_names, strict=True)
        # Other variants have to read the same; a run without labels reads none of them.
        formals = [node for node, name in pairs if name in common and not may_be_missing(node)]
        rest = [node for node in self.frame.formals if node not in formals and not may_be_missing(node)]
        named = list(formals)
        inside: list[fx.Node] = []  # of this forward, but folded
        for i, statement in enumerate(self.statements):
            leaves = _read_by(statement.units, folded)
            for unit in statement.units:
                if not isinstance(unit, Op):
                    continue
                own = _read_by([unit], folded)
                for need in needs_of(self.frame.flow, unit.node):
                    live = [x for x in named if real.get(x, -1) >= i]
                    nearest = [*formals, *live] if need == "dtype" else [*live, *formals]
                    shards = [x for x in formals if gathered(need, x)]
                    if shards and not any(gives(x, need) for x in (*own, *leaves, *formals)):
                        order = [*own, *leaves, *shards]  # write what every variant can
                    else:
                        order = [*own, *leaves, *nearest, *reversed(named)]
                    if self._pick(unit.node, need, order, i):
                        continue
                    parameters = [x for x in leaves if x.op == "get_attr"]
                    if need == "dtype" and self._pick(unit.node, need, parameters, i, parameters_too=True):
                        continue
                    hidden = [*inside, *(x for u in statement.units for x in u.outputs if x in folded)]
                    shown = (x for x in hidden for part in parts_of(need) if gives(x, part) or gathered(part, x))
                    if (found := next(shown, None)) is not None:
                        return found
                    picked = self._pick(unit.node, need, [*order, *rest], i)
                    assert picked, f"{need} is shown by no tensor"
            inside.extend(x for unit in statement.units for x in unit.outputs if x in folded)
            named.extend(statement.root.outputs)
        return None

    def _pick(self, node: fx.Node, need: Need, order: list[fx.Node], i: int, parameters_too: bool = False) -> bool:
        """The first of the tensors that shows it, for the operation `node` of statement `i`; False if none does."""
        order = [x for x in order if parameters_too or x.op != "get_attr"]
        for part in [need] if any(gives(x, need) for x in order) else parts_of(need):
            chosen = next((x for x in order if gives(x, part)), None) or next(
                (x for x in order if gathered(part, x)), None
            )
            if chosen is None:
                return False
            self.source[node, part] = chosen
            uses = self.last_dtype_use if part == "dtype" else self.last_use
            uses[chosen] = max(uses.get(chosen, -1), i)
        return True


def _read_by(units: Sequence[Unit], folded: set[fx.Node]) -> list[fx.Node]:
    return [node for unit in units for node in unit.operands if node not in folded]
