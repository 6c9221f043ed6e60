"""From a model to graphs: one for each way in which the model branches on its batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardc.capture.blocks import find_equal_blocks
from shardc.capture.branches import Point, turning_points
from shardc.capture.buffers import ConstructionLog, buffer_values
from shardc.capture.fit import Fitted, Probe, build_graph, first_difference, fit_traces
from shardc.capture.graph import ModelGraph, Parameter, Repeat, Value, repeat_block
from shardc.capture.kept import check_kept
from shardc.capture.loss import normalise_loss
from shardc.capture.memo import Signature
from shardc.capture.model_index import ModelIndex, accepted_names
from shardc.capture.parameters import model_parameters
from shardc.capture.patches import collection_paused, default_dtype
from shardc.capture.rows import Trace
from shardc.capture.symbols import MODEL_DTYPE, B, Dim, DType, S
from shardc.capture.trace import record
from shardc.capture.variants import PROBES, SMALLEST_WINDOW, Variant, default_variants, probes_for
from shardc.errors import ShardcError


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch: shape in B and S, dtype, and whether gradients flow into it (between stages)."""

    shape: tuple[Dim, ...]
    dtype: DType = torch.int64
    requires_grad: bool = False


TOKENS = Input((B, S))


@dataclass(slots=True)
class CapturedModel:
    """All graphs of one model.

    window: the sequence length from which the `long` variants hold, None without any. shortest_sequence: below it the
    model computes something else (attention kernels treat a single token apart), so the runtime refuses it.
    """

    variants: dict[Variant, ModelGraph]
    window: int | None = None
    shortest_sequence: int = 1

    @property
    def plain(self) -> ModelGraph:
        """The graph of the commonest batch: no mask, no positions, below the window where there is one."""
        return self.variants[min(self.variants)]


@collection_paused()
def capture(
    make: Callable[[], nn.Module],
    *,
    inputs: dict[str, Input] | None = None,
    window: int | None = None,
    variants: tuple[Variant, ...] | None = None,
    options: dict[str, Any] | None = None,
) -> CapturedModel:
    """Capture the model that `make()` builds under the current default dtype and device.

    inputs: the batch of the plain variant, default input_ids and labels; `attention_mask` and `position_ids` are added
    by the variants that have them. window: the attention window of the config; one that is not given is found where it
    lies above the probed lengths. variants: default, all that the window and forward's arguments allow. options: plain
    keyword arguments of forward. Constants are kept in float32 where their dtype follows the model's, so that a plan in
    any dtype rounds them once.
    Raises ShardcError where the computation cannot be described for every batch.
    """
    model = _Model(make, inputs or {"input_ids": TOKENS, "labels": TOKENS}, options)
    result = CapturedModel({}, window, window if window is not None and window < SMALLEST_WINDOW else 1)
    wanted = list(variants or default_variants(model.arguments, window))
    model.find_equal_blocks(min(wanted), window)
    while left := [variant for variant in wanted if variant not in result.variants]:
        _capture_variant(model, min(left), result)
        if window is None and result.window is not None and variants is None:
            wanted = default_variants(model.arguments, result.window)
    return result


def _capture_variant(model: _Model, variant: Variant, result: CapturedModel) -> None:
    """Add the variant's graph to `result`, and what it shows of the sequence lengths for which graphs hold."""
    probes = probes_for(variant, result.window)
    traces = [model.run(variant, probe) for probe in probes]
    check_kept(traces)
    fitted = fit_traces(traces, probes, model.fit_cache)
    low = max(result.shortest_sequence, result.window if variant.long else 1)
    high = math.inf if variant.long or result.window is None else result.window
    for point in turning_points(traces, probes, low, high):
        if point.seq < result.shortest_sequence or point.seq >= (result.window or math.inf) > probes[0].seq:
            continue  # a turn found meanwhile makes this one unreachable
        difference = first_difference(
            fitted, model.run(variant, probe := Probe(point.batch, point.seq, torch.bfloat16)), probe
        )
        if difference:
            _keep_to_one_side(model, point, difference, min(p.seq for p in probes), result)
    result.variants[variant] = model.graph(fitted)


def _keep_to_one_side(model: _Model, point: Point, difference: str, probed: int, result: CapturedModel) -> None:
    """The computation changes at `point`: bound the sequences, or refuse where no bound describes it."""
    if point.seq < probed:
        result.shortest_sequence = point.seq + 1
    elif point.seq > probed and result.window is None:
        result.window = point.seq
    else:
        fields = model.fields_equal_to(
            {point.seq - 1, point.seq, point.seq + 1} if point.seq > probed else {point.batch}
        )
        fields = f"; config fields of this size: {', '.join(fields)}" if fields else ""
        where = f"batch size {point.batch}, sequence length {point.seq}"
        raise ShardcError(
            f"the model: the computation changes at {where} by {point.why}: {difference}{fields}",
            "set the field so that training stays on one side of it, or rewrite the line to follow tensor shapes",
        )


@dataclass(slots=True)
class _Built:
    index: ModelIndex
    log: ConstructionLog
    memo: dict[Any, Signature] = field(default_factory=dict)


class _Model:
    """One model, built once a dtype, with all that its runs share."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        inputs: dict[str, Input],
        options: dict[str, Any] | None,
    ) -> None:
        self.inputs = inputs
        self.options = options
        self.built = {each: _build(make, each) for each in dict.fromkeys([p.dtype for p in PROBES])}
        self.first = self.built[PROBES[0].dtype].index
        self.parameters = model_parameters({each: built.index for each, built in self.built.items()})
        self.arguments = accepted_names(self.first.model)
        self.same_block: dict[str, str] = {}
        self.fit_cache: dict[Any, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def find_equal_blocks(self, variant: Variant, window: int | None) -> None:
        """Run all blocks once; later runs repeat those that equal an earlier one."""
        self.same_block = find_equal_blocks(self.first, self.run(variant, probes_for(variant, window)[0]))

    def run(self, variant: Variant, probe: Probe) -> Trace:
        built = self.built[probe.dtype]
        given = dict(self.inputs)
        if variant.masked:
            given["attention_mask"] = TOKENS
        if variant.positions:
            given["position_ids"] = TOKENS
        tensors = {name: _meta_tensor(spec, probe) for name, spec in given.items()}
        built.index.train(probe.training)
        # What the guards read: `attention_mask.all()`, and "no sequence restarts" for positions.
        answers = {"attention_mask": False, "position_ids": not variant.packed}
        with default_dtype(probe.dtype):
            return record(
                built.index, tensors, memo=built.memo, options=self.options, answers=answers, same_block=self.same_block
            )

    def graph(self, fitted: Fitted) -> ModelGraph:
        graph, inputs, outputs = build_graph(fitted)
        blocks = {path: [path] for path in fitted.blocks}
        repeats: list[Repeat] = []
        used: list[Parameter] = []
        for node in graph.nodes:
            if node.target is repeat_block:
                repeats.append(node.args[0])
                blocks[node.args[0].representative].append(node.args[0].instance)
            if node.op == "get_attr":
                parameter = self.parameters[node.target]
                node.meta["value"] = Value(parameter.shape, parameter.dtype, parameter.requires_grad)
                used.append(parameter)
        classes = {path: type(module) for path, module in self.first.modules.items()}
        model = ModelGraph(
            graph, inputs, outputs, dict(self.parameters), self._constants(used, repeats), blocks, classes
        )
        normalise_loss(model)
        return model

    def _constants(self, used: list[Parameter], repeats: list[Repeat]) -> dict[str, torch.Tensor]:
        """Values of the buffers that the graph reads, also in the repeats of its blocks."""
        names = [parameter.name for parameter in used if parameter.is_buffer]
        names = list(dict.fromkeys([*names, *(repeat.rename(name) for name in names for repeat in repeats)]))
        missing = [name for name in names if name not in self.constants]
        if missing:
            built = self.built[torch.float32]
            self.constants |= buffer_values(built.index.model, built.log, missing)
        return {name: self.constants[name] for name in names}

    def fields_equal_to(self, sizes: set[int]) -> list[str]:
        """Config fields with one of these values, nested ones dotted."""
        config = getattr(self.first.model, "config", None)
        return sorted(_fields(config.to_dict(), sizes)) if hasattr(config, "to_dict") else []


def _fields(fields: dict, sizes: set[int], prefix: str = "") -> list[str]:
    found = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += _fields(value, sizes, f"{prefix}{name}.")
        elif type(value) is int and value in sizes:
            found.append(f"{prefix}{name}={value}")
    return found


def _build(make: Callable[[], nn.Module], dtype: torch.dtype) -> _Built:
    with default_dtype(dtype), torch.device("meta"), ConstructionLog() as log:
        model = make()
    return _Built(ModelIndex(model), log)


def _meta_tensor(spec: Input, probe: Probe) -> torch.Tensor:
    shape = [dim if isinstance(dim, int) else dim.at(probe.batch, probe.seq) for dim in spec.shape]
    dtype = probe.dtype if spec.dtype is MODEL_DTYPE else spec.dtype
    return torch.zeros(shape, dtype=dtype, device="meta").requires_grad_(spec.requires_grad)
