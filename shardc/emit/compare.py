"""Prove an emitted file, edited or not, against the plan's graphs: capture it again and compare the data flow."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from shardc.capture import Variant
from shardc.capture.fit import Probe
from shardc.capture.graph import ModelGraph, Value, op_name
from shardc.capture.patches import default_dtype
from shardc.capture.symbols import ShardSize
from shardc.emit.canonical import Canonical, Canonicaliser, Numbers, canonical_name, concrete, from_graph
from shardc.emit.retrace import Memo, Retrace, retrace
from shardc.emit.traced_axis import TracedAxis
from shardc.emit.unseen import Unseen
from shardc.errors import ShardcError
from shardc.runtime.mesh import MeshAxis


def compare(
    make_stage: Callable[[MeshAxis], nn.Module],
    stage: Mapping[Variant, ModelGraph],
    *,
    window: int | None = None,
    tp: int = 1,
    sub_axes: Mapping[str, int] | None = None,
    memo: Memo | None = None,
) -> None:
    """Raise ShardcError unless the emitted stage computes what the graphs say, in every variant and on every rank.

    make_stage: builds the stage under the current default dtype and device. window: the sequence length from which the
    `long` variants hold. sub_axes: factors of tp, major first. memo: shared by the stages of a plan.
    Runs on meta tensors: bfloat16 in training, float32 in evaluation; for one rank where all hold as much, and for each
    where shards are uneven. The error names the module and the line of model.py of the first operation that differs.
    """
    memo = {} if memo is None else memo
    for coord in range(tp) if any(map(_is_uneven, stage.values())) else (0,):
        axis = TracedAxis.abstract("tp", tp, coord=coord, sub_axes=sub_axes)
        _compare_on(axis, make_stage, stage, window, memo)


def _is_uneven(graph: ModelGraph) -> bool:
    """Whether ranks hold unequal parts of something, as of an odd vocabulary."""
    shapes = [node.meta["value"].shape for node in graph.graph.nodes if isinstance(node.meta.get("value"), Value)]
    return any(isinstance(dim, ShardSize) and isinstance(dim.size, int) for shape in shapes for dim in shape)


def _compare_on(
    axis: MeshAxis,
    make_stage: Callable[[MeshAxis], nn.Module],
    stage: Mapping[Variant, ModelGraph],
    window: int | None,
    memo: Memo,
) -> None:
    for training, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with default_dtype(dtype), torch.device("meta"):
            module = make_stage(axis)
        module.train(training)
        for variant, graph in stage.items():
            probe = _probe(variant, training, dtype, window, axis.size)
            numbers = Numbers()
            expected = from_graph(graph, probe, axis, numbers)
            trace = _run(module, graph, variant, probe, axis, memo)
            _check(module, variant, expected, _from_trace(trace, graph, numbers), trace)


def _probe(variant: Variant, training: bool, dtype: torch.dtype, window: int | None, tp: int) -> Probe:
    """A batch on the variant's side of the window, its sequence a multiple of tp and unlike any other size."""
    seq = (17 if training else 23) * tp
    if window is not None and variant.long:
        seq += -(-window // tp) * tp
    elif window is not None and seq >= window:
        seq = max((window - 1) // tp, 1) * tp
    return Probe(3 if training else 2, seq, dtype, training)


def _run(module: nn.Module, graph: ModelGraph, variant: Variant, probe: Probe, axis: MeshAxis, memo: Memo) -> Retrace:
    inputs = {}
    for name, node in graph.inputs.items():
        value: Value = node.meta["value"]
        shape = [concrete(dim, probe, axis) for dim in value.shape]
        dtype = concrete(value.dtype, probe, axis)
        inputs[name] = torch.empty(shape, dtype=dtype, device="meta").requires_grad_(value.requires_grad)
    names = ("loss", "logits") if "logits" in graph.outputs else tuple(graph.outputs)
    try:
        with default_dtype(probe.dtype):
            return retrace(module, inputs, names, packed=variant.packed, memo=memo)
    except Unseen:
        raise
    except Exception as error:
        raise ShardcError(
            f"{_raised_at(module, error)}: {type(module).__name__} fails on a {variant.name} batch: {error}", _ADVICE
        ) from error


def _raised_at(module: nn.Module, error: Exception) -> str:
    """`model.py:93`: the innermost line of the module's own file that led to an error."""
    file = type(module).forward.__code__.co_filename
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"model.py:{lines[-1]}" if lines else "model.py"


_ADVICE = "undo the edit, or compile the plan again"


def _from_trace(trace: Retrace, graph: ModelGraph, numbers: Numbers) -> Canonical:
    def value_of(node: fx.Node) -> Value | None:
        return node.meta.get("value")

    def like_of(node: fx.Node) -> Any:
        return node.meta.get("like", node)

    canonical = Canonicaliser(numbers, value_of, canonical_name(graph), lambda item: item, like_of)
    return canonical.run(trace.nodes, trace.outputs)


def _check(module: nn.Module, variant: Variant, expected: Canonical, found: Canonical, trace: Retrace) -> None:
    kind = f"a {variant.name} batch {'in training' if module.training else 'in evaluation'}"
    if expected.outputs != found.outputs:
        needed = _ancestors(trace)
        for node in trace.nodes:
            if node in needed and node.op == "call_function" and found.numbers.get(node, -1) not in {-1, *expected.all}:
                raise ShardcError(
                    f"{_where(node)}: {op_name(node.target)} is not what the plan computes for {kind}", _ADVICE
                )
        names = [name for name in expected.outputs if expected.outputs[name] != found.outputs.get(name)]
        raise ShardcError(
            f"model.py: {type(module).__name__} returns another {' and '.join(names)} for {kind}", _ADVICE
        )
    wanted = [(number, is_sharded) for number, is_sharded, _ in expected.random]
    drawn = [(number, is_sharded) for number, is_sharded, _ in found.random]
    if wanted != drawn:
        same = next(
            (i for i, (a, b) in enumerate(zip(wanted, drawn, strict=False)) if a != b), min(len(wanted), len(drawn))
        )
        where = _where(found.random[same][2]) if same < len(drawn) else f"model.py: {type(module).__name__}"
        raise ShardcError(
            f"{where}: random numbers are drawn in another order, or from another stream, than planned", _ADVICE
        )


def _ancestors(trace: Retrace) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(trace.outputs.values())
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _where(node: fx.Node) -> str:
    """`model.layers.0.mlp (model.py:93)`: the module and the line in which the operation is written."""
    place = node.meta["place"]
    return f"{place.path} (model.py:{place.line})"
