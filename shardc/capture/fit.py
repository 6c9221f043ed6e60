"""From several runs of one model to one graph whose literals follow the batch: (2, 15, 64) becomes (B, S, 64)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.capture.graph import Repeat, Value, op_name
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, TRAINING, Size, WhileTraining
from shardc.capture.trace import Trace
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
    if all(isinstance(v, torch.dtype) for v in values) and all(v == p.dtype for v, p in zip(values, probes, strict=True)):
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


def fit_traces(traces: Sequence[Trace], probes: Sequence[Probe]) -> None:
    """Rewrite the first trace: symbols for literals, `meta["value"]` for shapes. The other traces only explain.

    Raises ShardcError with the source line where the traces differ in more than literals.
    """
    first, *others = traces
    columns = list(zip(*(trace.graph.nodes for trace in traces), strict=False))
    if any(len(trace.graph.nodes) != len(columns) for trace in traces):
        row = next((c for c in columns if len({_kind(n) for n in c}) > 1), columns[-1])
        raise _differs(row[0], f"{len(first.graph.nodes)} and {[len(t.graph.nodes) for t in others]} operations")
    twin = [dict(zip(trace.graph.nodes, first.graph.nodes, strict=True)) for trace in traces]
    for row in columns:
        node = row[0]
        if len({_kind(n) for n in row}) > 1:
            raise _differs(node, " or ".join(sorted({_kind(n) for n in row})))
        try:
            args = _merge([n.args for n in row], probes, twin)
            kwargs = _merge([n.kwargs for n in row], probes, twin)
            if "concrete" in node.meta:
                found = [n.meta["concrete"] for n in row]
                shape = tuple(fit_literal(dim, probes) for dim in zip(*(f.shape for f in found), strict=True))
                dtype = fit_literal([f.dtype for f in found], probes)
                node.meta["value"] = Value(shape, dtype, found[0].requires_grad)
        except FitError as error:
            raise _differs(node, str(error)) from None
        node.args, node.kwargs = args, kwargs


def _kind(node: fx.Node) -> str:
    if node.op == "call_function":
        return op_name(node.target)
    return f"{node.op} {node.target}"


def _differs(node: fx.Node, what: str) -> ShardcError:
    call, source = node.meta.get("call"), node.meta.get("source")
    return ShardcError(
        f"{(call and call.path) or 'the model'}: the computation changes with the size of the batch at {source or node.name}: {what}",
        "rewrite the line so that it follows tensor shapes, or mark the module `opaque`",
    )


def _merge(items: list[Any], probes: Sequence[Probe], twin: list[dict[fx.Node, fx.Node]]) -> Any:
    first = items[0]
    if isinstance(first, fx.Node):
        if any(twin[i].get(item) is not first for i, item in enumerate(items)):
            raise FitError("operands come from different operations")
        return first
    if isinstance(first, Repeat):
        return first
    if isinstance(first, (tuple, list)):
        if len({len(item) for item in items}) > 1:
            raise FitError(f"{sorted({len(item) for item in items})} arguments")
        return tuple(_merge(list(column), probes, twin) for column in zip(*items, strict=True))
    if isinstance(first, dict):
        if len({tuple(item) for item in items}) > 1:
            raise FitError("different keyword arguments")
        return {key: _merge([item[key] for item in items], probes, twin) for key in first}
    if isinstance(first, slice):
        return slice(*(_merge([getattr(item, end) for item in items], probes, twin) for end in ("start", "stop", "step")))
    return fit_literal(items, probes)
