"""From a model to graphs: one for each way in which the model branches on its batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardc.capture.blocks import find_equal_blocks, fold_equal_blocks, remove_dead_nodes
from shardc.capture.buffers import ConstructionLog, buffer_values
from shardc.capture.fit import Probe, fit_literal, fit_traces
from shardc.capture.graph import ModelGraph, Parameter, Repeat, Value, repeat_block
from shardc.capture.init import initial_values
from shardc.capture.loss import normalise_loss
from shardc.capture.symbols import MODEL_DTYPE, B, Dim, DType, S
from shardc.capture.trace import Trace, canonical_names, record
from shardc.errors import ShardcError


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch: shape in B and S, dtype, and whether gradients flow into it (between stages)."""

    shape: tuple[Dim, ...]
    dtype: DType = torch.int64
    requires_grad: bool = False


TOKENS = Input((B, S))


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """The side of each branch that a graph takes.

    masked: an attention mask with zeros is given (an all-ones mask is dropped before the model runs).
    positions: position ids are given. packed: they restart inside a row, so rows hold several sequences.
    long: the sequence reaches the model's attention window, `S >= window`.
    """

    masked: bool = False
    positions: bool = False
    packed: bool = False
    long: bool = False

    @property
    def name(self) -> str:
        parts = [part for part in ("masked", "positions", "packed", "long") if getattr(self, part)]
        return "+".join(parts) or "plain"


@dataclass(slots=True)
class CapturedModel:
    """All graphs of one model. `window`: the sequence length from which the `long` variants hold, None without any."""

    variants: dict[Variant, ModelGraph]
    window: int | None = None
    shortest_sequence: int = 1

    @property
    def plain(self) -> ModelGraph:
        """The graph of the commonest batch: no mask, no positions, below the window where there is one."""
        return self.variants[min(self.variants)]


# 1, B, S and B*S are pairwise non-affine over these, so that no literal has two explanations.
_PROBES = (
    Probe(2, 15, torch.bfloat16),
    Probe(3, 22, torch.float32),
    Probe(5, 13, torch.bfloat16),
    Probe(2, 15, torch.bfloat16, training=False),
    Probe(7, 19, torch.float32),
)


@dataclass(slots=True)
class _Built:
    model: nn.Module
    log: ConstructionLog = field(default_factory=ConstructionLog)


def capture(
    make: Callable[[], nn.Module],
    *,
    inputs: dict[str, Input] | None = None,
    window: int | None = None,
    variants: tuple[Variant, ...] | None = None,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> CapturedModel:
    """Capture the model that `make()` builds under the current default dtype and device.

    inputs: the batch of the plain variant, default input_ids and labels; `attention_mask` and `position_ids` are added
    by the variants that have them. window: the attention window of the config. variants: default, all that the
    window and the batch allow. options: plain keyword arguments of forward. dtype: of the constants that are kept.
    Raises ShardcError where the computation cannot be described for every batch.
    """
    inputs = inputs or {"input_ids": TOKENS, "labels": TOKENS}
    built = {each: _build(make, each) for each in (torch.bfloat16, torch.float32)}
    first = built[_PROBES[0].dtype].model
    shortest = 1
    if variants is None:
        variants, shortest = _default_variants(window)
    same: dict[str, str] | None = None
    graphs: dict[Variant, ModelGraph] = {}
    for variant in sorted(variants):
        probes = [_probe_for(p, variant, window) for p in _PROBES]
        traces = []
        for probe in probes:
            traces.append(_run(built[probe.dtype].model, inputs, variant, probe, options, same))
            if same is None:
                same = find_equal_blocks(first, traces[0])
                fold_equal_blocks(traces[0], same)
        for trace in traces:
            remove_dead_nodes(trace.graph)
        fit_traces(traces, probes)
        graphs[variant] = _model_graph(traces[0], built, probes, dtype)
        normalise_loss(graphs[variant])
    return CapturedModel(graphs, window, shortest)


def _default_variants(window: int | None) -> tuple[tuple[Variant, ...], int]:
    """Every side of every branch; below a window too small to probe, sequences are refused instead."""
    longs = (False,) if window is None else (True,) if window < _SMALLEST_WINDOW else (False, True)
    kinds = [dict(), dict(masked=True), dict(positions=True), dict(positions=True, packed=True), dict(masked=True, positions=True)]
    shortest = window if window is not None and window < _SMALLEST_WINDOW else 1
    return tuple(Variant(**kind, long=long) for long in longs for kind in kinds), shortest


_SMALLEST_WINDOW = 8


def _probe_for(probe: Probe, variant: Variant, window: int | None) -> Probe:
    """The probe with a sequence on the variant's side of the window."""
    if window is None:
        return probe
    if variant.long:
        return Probe(probe.batch, probe.seq + window, probe.dtype, probe.training)
    if window > max(p.seq for p in _PROBES):
        return probe
    short = {15: window - 2, 22: window - 1, 13: window - 4, 19: window - 3}
    return Probe(probe.batch, short[probe.seq], probe.dtype, probe.training)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _build(make: Callable[[], nn.Module], dtype: torch.dtype) -> _Built:
    log = ConstructionLog()
    with _default_dtype(dtype), torch.device("meta"), log:
        return _Built(make(), log)


def _run(
    model: nn.Module,
    inputs: dict[str, Input],
    variant: Variant,
    probe: Probe,
    options: dict[str, Any] | None,
    same: dict[str, str] | None,
) -> Trace:
    given = dict(inputs)
    if variant.masked:
        given["attention_mask"] = TOKENS
    if variant.positions:
        given["position_ids"] = TOKENS
    size = {"batch_size": probe.batch, "seq_length": probe.seq}
    tensors = {}
    for name, spec in given.items():
        shape = [dim if isinstance(dim, int) else dim.at(**size) for dim in spec.shape]
        dtype = probe.dtype if spec.dtype is MODEL_DTYPE else spec.dtype
        tensors[name] = torch.zeros(shape, dtype=dtype, device="meta").requires_grad_(spec.requires_grad)
    model.train(probe.training)
    # What the guards read: `attention_mask.all()`, and "no sequence restarts" for positions.
    answers = {"attention_mask": False, "position_ids": not variant.packed}
    with _default_dtype(probe.dtype):
        return record(model, tensors, options=options, answers=answers, same_block=same)


def _model_graph(trace: Trace, built: dict[torch.dtype, _Built], probes: list[Probe], dtype: torch.dtype) -> ModelGraph:
    models = {each: b.model for each, b in built.items()}
    first = models[probes[0].dtype]
    parameters = _parameters(models, probes)
    blocks: dict[str, list[str]] = {block.path: [block.path] for block in trace.blocks}
    for node in trace.graph.nodes:
        node.meta.pop("concrete", None)
        if node.target is repeat_block and isinstance(node.args[0], Repeat):
            blocks[node.args[0].representative].append(node.args[0].instance)
    used = [node.target for node in trace.graph.nodes if node.op == "get_attr" and parameters[node.target].is_buffer]
    for node in trace.graph.nodes:
        if node.op == "get_attr":
            parameter = parameters[node.target]
            node.meta["value"] = Value(parameter.shape, parameter.dtype, parameter.requires_grad)
    constants = buffer_values(built[dtype].model, built[dtype].log, used) if used else {}
    classes = {path: type(module) for path, module in first.named_modules()}
    return ModelGraph(trace.graph, trace.inputs, trace.outputs, parameters, constants, blocks, classes)


def _parameters(models: dict[torch.dtype, nn.Module], probes: list[Probe]) -> dict[str, Parameter]:
    first = models[probes[0].dtype]
    canonical = canonical_names(first)
    init = initial_values(first)
    other = dict(models[probes[1].dtype].named_parameters(remove_duplicate=False))
    other |= dict(models[probes[1].dtype].named_buffers(remove_duplicate=False))
    names: dict[str, list[str]] = {}
    tensors: dict[str, tuple[torch.Tensor, bool]] = {}
    for is_buffer, named in ((False, first.named_parameters), (True, first.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(canonical[id(tensor)], []).append(name)
            tensors.setdefault(canonical[id(tensor)], (tensor, is_buffer))
    result = {}
    for name, (tensor, is_buffer) in tensors.items():
        dtype = fit_literal([tensor.dtype, other[name].dtype], probes[:2])
        result[name] = Parameter(
            name, tuple(tensor.shape), dtype, tensor.requires_grad, tuple(names[name][1:]), is_buffer, init.get(name)
        )
    return result
