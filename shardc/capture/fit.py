"""From several runs of one model to one graph whose literals follow the batch: (2, 15, 64) becomes (B, S, 64)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.capture.blocks import live_rows, remove_dead_nodes
from shardc.capture.graph import Value, op_name
from shardc.capture.memo import Concrete, Slot, fill
from shardc.capture.rows import Row, Trace
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, TRAINING, Size, Symbol, WhileTraining
from shardc.errors import ShardcError


@dataclass(frozen=True, slots=True)
class Probe:
    """How one run was made. Over the probes of a fit 1, B, S and B*S must not be affine in one another."""

    batch: int
    seq: int
    dtype: torch.dtype
    training: bool = True


class FitError(Exception):
    """A literal with no explanation, or with two."""


def fit_literal(values: Sequence[Any], probes: Sequence[Probe]) -> Any:
    """The symbol that explains one literal over all probes; the literal itself where it is the same in all.

    Raises FitError where no form fits, and where two do: a wrong guess would be silent.
    """
    first = values[0]
    if all(type(v) is type(first) and v == first for v in values):
        return DEVICE if isinstance(first, torch.device) else first
    if all(isinstance(v, torch.dtype) for v in values) and all(
        v == p.dtype for v, p in zip(values, probes, strict=True)
    ):
        return MODEL_DTYPE
    if all(isinstance(v, bool) for v in values) and all(v == p.training for v, p in zip(values, probes, strict=True)):
        return TRAINING
    if all(isinstance(v, float) for v in values):
        if all(v == torch.finfo(p.dtype).min for v, p in zip(values, probes, strict=True)):
            return DTYPE_MIN
        on = next((v for v, p in zip(values, probes, strict=True) if p.training), 0.0)
        if all(v == (on if p.training else 0.0) for v, p in zip(values, probes, strict=True)):
            return WhileTraining(on)
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        fits = [size for form in ((1, 0), (0, 1), (1, 1)) if (size := _fit_size(values, probes, *form))]
        if len(fits) == 1:
            return fits[0]
        if not fits and (size := _fit_shifted_tokens(values, probes)):
            return size
        if fits:
            raise FitError(f"{list(values)} has more than one explanation: {', '.join(map(str, fits))}")
    raise FitError(f"{list(values)} does not follow batch size, sequence length, dtype or training mode")


def _fit_size(values: Sequence[int], probes: Sequence[Probe], batch: int, seq: int) -> Size | None:
    forms = [p.batch**batch * p.seq**seq for p in probes]
    other = next(i for i, form in enumerate(forms) if form != forms[0])
    coefficient, rest = divmod(values[other] - values[0], forms[other] - forms[0])
    if rest or not coefficient:
        return None
    size = Size(coefficient, batch, seq, values[0] - coefficient * forms[0])
    return size if all(size.at(p.batch, p.seq) == v for v, p in zip(values, probes, strict=True)) else None


def _fit_shifted_tokens(values: Sequence[int], probes: Sequence[Probe]) -> Size | None:
    """`c*B*(S+k)`: what is left of all tokens when labels are shifted."""
    one, two = probes[:2]
    rows = [value // p.batch if value % p.batch == 0 else None for value, p in zip(values[:2], probes, strict=False)]
    if None in rows or one.seq == two.seq:
        return None
    coefficient, rest = divmod(rows[1] - rows[0], two.seq - one.seq)
    if rest or not coefficient:
        return None
    size = Size(coefficient, 1, 1, Size(rows[0] - coefficient * one.seq, 1, 0))
    return size if all(size.at(p.batch, p.seq) == v for v, p in zip(values, probes, strict=True)) else None


@dataclass(slots=True)
class Fitted:
    """What the traces of one variant have in common, with symbols for what follows the batch.

    rows: those of the first trace that its outputs need. literals: args and kwargs as templates, a row.
    """

    rows: list[Row]
    literals: list[tuple[tuple, dict]]
    values: list[Value | None]
    outputs: dict[str, Row]
    blocks: list[str]  # paths of the blocks that the rows hold


def fit_traces(traces: Sequence[Trace], probes: Sequence[Probe], cache: dict[Any, Any]) -> Fitted:
    """Explain the first trace by the others. cache: shared by the fits of one model.

    Raises ShardcError with the source line where the traces differ in more than literals.
    """
    columns = [live_rows(trace) for trace in traces]
    _check_outputs(traces)
    numbers = [{row: i for i, row in enumerate(column)} for column in columns]
    literals, values = [], []
    for rows in zip(*columns, strict=False):
        if difference := _structure_differs(rows, numbers):
            raise _differs(rows[0], difference)
        try:
            fitted_literals, value = _fit_row(rows, probes, cache)
        except FitError as error:
            raise _differs(rows[0], str(error)) from None
        literals.append(fitted_literals)
        values.append(value)
    if len({len(column) for column in columns}) > 1:
        shortest = min(map(len, columns))
        extra = next(column[shortest] for column in columns if len(column) > shortest)
        raise _differs(extra, f"{[len(column) for column in columns]} operations")
    blocks = list(dict.fromkeys(block.path for block in traces[0].blocks))
    return Fitted(columns[0], literals, values, traces[0].outputs, blocks)


def first_difference(fitted: Fitted, trace: Trace, probe: Probe) -> str | None:
    """Where a further trace computes something else than `fitted` says for its sizes; None if nowhere."""
    rows = live_rows(trace)
    if fitted.outputs.keys() != trace.outputs.keys():
        return f"outputs {sorted(fitted.outputs)} or {sorted(trace.outputs)}"
    numbers = [{row: i for i, row in enumerate(column)} for column in (fitted.rows, rows)]
    for i, pair in enumerate(zip(fitted.rows, rows, strict=False)):
        if difference := _structure_differs(pair, numbers):
            return f"{pair[0].source or pair[0].target}: {difference}"
        found = pair[1].literals()
        if not _same_literals(fitted.literals[i], found, probe):
            return f"{pair[0].source or op_name(pair[0].target)}: {op_name(pair[0].target)} with other arguments"
        value = fitted.values[i]
        if value and tuple(at(dim, probe) for dim in value.shape) != pair[1].concrete.shape:
            return f"{pair[0].source or pair[0].target}: another shape"
    return None if len(rows) == len(fitted.rows) else f"{len(fitted.rows)} or {len(rows)} operations"


def at(literal: Any, probe: Probe) -> Any:
    """What a fitted literal is in one run."""
    if isinstance(literal, Size):
        return literal.at(probe.batch, probe.seq)
    if isinstance(literal, WhileTraining):
        return literal.value if probe.training else 0.0
    if isinstance(literal, Symbol):
        known = {
            MODEL_DTYPE: probe.dtype,
            DTYPE_MIN: torch.finfo(probe.dtype).min,
            TRAINING: probe.training,
            DEVICE: torch.device("meta"),
        }
        return known[literal]
    return literal


def _same_literals(fitted: Any, found: Any, probe: Probe) -> bool:
    if isinstance(found, Slot):
        return isinstance(fitted, Slot) and fitted.number == found.number
    if isinstance(found, (tuple, list)):
        return len(fitted) == len(found) and all(
            _same_literals(a, b, probe) for a, b in zip(fitted, found, strict=True)
        )
    if isinstance(found, dict):
        return fitted.keys() == found.keys() and all(_same_literals(fitted[key], found[key], probe) for key in found)
    if isinstance(found, slice):
        return all(
            _same_literals(getattr(fitted, end), getattr(found, end), probe) for end in ("start", "stop", "step")
        )
    expected = at(fitted, probe)
    return type(expected) is type(found) and expected == found


def build_graph(fitted: Fitted) -> tuple[fx.Graph, dict[str, fx.Node], dict[str, fx.Node]]:
    """(graph, inputs, outputs) as fx, without what no output needs."""
    graph = fx.Graph()
    node_of: dict[Row, fx.Node] = {}
    for row, (args, kwargs), value in zip(fitted.rows, fitted.literals, fitted.values, strict=True):
        operands = [node_of[operand] for operand in row.operands]
        node = graph.create_node(row.op, row.target, fill(args, operands), fill(kwargs, operands), name=row.name)
        node.meta["call"] = row.call
        if row.op == "call_function":
            node.meta["source"] = row.source
        if value:
            node.meta["value"] = value
        node_of[row] = node
    outputs = {name: node_of[row] for name, row in fitted.outputs.items()}
    graph.output(tuple(outputs.values()))
    remove_dead_nodes(graph)
    kept = set(graph.nodes)
    for call in {row.call for row in fitted.rows}:
        named = {node_of.get(row): name for row, name in call.argument_names.items()}
        call.argument_names = {node: name for node, name in named.items() if node in kept}
    inputs = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    return graph, inputs, outputs


def _check_outputs(traces: Sequence[Trace]) -> None:
    names = {tuple(trace.outputs) for trace in traces}
    if len(names) > 1:
        found = " or ".join(", ".join(each) for each in sorted(names))
        raise ShardcError(
            f"the model: what it returns changes with the size of the batch: {found}",
            "return the same outputs for every batch",
        )


def _structure_differs(rows: Sequence[Row], numbers: Sequence[dict[Row, int]]) -> str | None:
    first = rows[0]
    if any(row.target is not first.target and row.target != first.target for row in rows):
        return " or ".join(sorted({_kind(row) for row in rows}))
    wanted = [numbers[0][operand] for operand in first.operands]
    if any(
        [number[operand] for operand in row.operands] != wanted
        for row, number in zip(rows[1:], numbers[1:], strict=True)
    ):
        return "operands come from different operations"
    return None


def _kind(row: Row) -> str:
    return op_name(row.target) if row.op == "call_function" else f"{row.op} {row.target}"


def _differs(row: Row, what: str) -> ShardcError:
    where, line = row.call.path or "the model", row.source or row.target
    return ShardcError(
        f"{where}: the computation changes with the size of the batch at {line}: {what}",
        "rewrite the line so that it follows tensor shapes, or mark the module `opaque`",
    )


def _fit_row(
    rows: Sequence[Row], probes: Sequence[Probe], cache: dict[Any, Any]
) -> tuple[tuple[tuple, dict], Value | None]:
    signatures = tuple([row.signature for row in rows])
    concretes = tuple([row.concrete for row in rows])
    key = (tuple(probes), *map(id, signatures), concretes)
    if key not in cache:  # the signatures are kept too: an id stays unique only while its object lives
        args = _merge([row.literals() for row in rows], probes)
        cache[key] = signatures, args, _fit_value(concretes, probes)
    return cache[key][1:]


def _fit_value(concretes: Sequence[Concrete | None], probes: Sequence[Probe]) -> Value | None:
    if concretes[0] is None:
        return None
    if len({len(c.shape) for c in concretes}) > 1:
        raise FitError(f"{sorted({len(c.shape) for c in concretes})} dims")
    shape = tuple(fit_literal(dim, probes) for dim in zip(*(c.shape for c in concretes), strict=True))
    return Value(shape, fit_literal([c.dtype for c in concretes], probes), concretes[0].requires_grad)


def _merge(items: Sequence[Any], probes: Sequence[Probe]) -> Any:
    first = items[0]
    if isinstance(first, Slot):
        if any(not isinstance(item, Slot) or item.number != first.number for item in items):
            raise FitError("a tensor or a number")
        return first
    if any(type(item) is not type(first) for item in items):
        raise FitError(f"{' or '.join(sorted({type(item).__name__ for item in items}))} as an argument")
    if isinstance(first, (tuple, list)) and not hasattr(first, "_fields"):
        if len({len(item) for item in items}) > 1:
            raise FitError(f"{sorted({len(item) for item in items})} arguments")
        return type(first)([_merge(column, probes) for column in zip(*items, strict=True)])
    if isinstance(first, dict):
        if len({tuple(item) for item in items}) > 1:
            raise FitError("different keyword arguments")
        return {key: _merge([item[key] for item in items], probes) for key in first}
    if isinstance(first, slice):
        return slice(*(_merge([getattr(item, end) for item in items], probes) for end in ("start", "stop", "step")))
    return fit_literal(items, probes)
