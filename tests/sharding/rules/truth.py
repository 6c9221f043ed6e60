"""Decides on simulated ranks, forward and backward, whether an operation keeps a layout's promise."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from shardc.capture.graph import Call, ModelGraph, Value
from shardc.capture.symbols import Axis
from shardc.errors import ShardcError
from shardc.runtime.mesh import MeshAxis
from shardc.sharding.factors import Factor, all_leaves, dim_of, leaves
from shardc.sharding.layout import CONVERSIONS, I, Layout, P, R, sharded
from shardc.sharding.localise import localise
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import dims_of, rule_of, set_dims
from shardc.sharding.typing import Mismatch, type_node
from tests.sharding.clone import clone_graph
from tests.sharding.families import InFloat64
from tests.sharding.simulate import Batch, Simulation

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sample:
    """One call of an operation. relate: states, before the rule runs, which dims of the operands count the same."""

    call: Callable[..., Tensor | Sequence[Tensor]]
    operands: tuple[Tensor, ...]
    relate: Callable[[fx.Node], None] | None = None


class _OneCall(TorchFunctionMode):
    """Remembers the first operation that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple | None = None

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.found = self.found or (func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Trial:
    """The graph of one sample, with its factors, and what one process computes."""

    def __init__(self, sample: Sample):
        self.operands = sample.operands
        with InFloat64(), _OneCall() as mode:
            result = sample.call(*sample.operands)
        self.results = (result,) if isinstance(result, Tensor) else tuple(result)
        graph, root = fx.Graph(), Call("", torch.nn.Module, None)
        names = {id(x): graph.create_node("get_attr", f"x{i}") for i, x in enumerate(sample.operands)}
        for node, x in zip(names.values(), sample.operands, strict=True):
            _describe(node, x, root)
        func, args, kwargs = mode.found or (sample.call, sample.operands, {})

        def to_nodes(item: object) -> object:
            if isinstance(item, (tuple, list)):
                return tuple(map(to_nodes, item))
            return Axis(item.name) if isinstance(item, MeshAxis) else names.get(id(item), item)

        self.node = graph.call_function(func, to_nodes(args), {key: to_nodes(value) for key, value in kwargs.items()})
        self.node.meta["call"] = root
        outputs = [self.node]
        if isinstance(result, Tensor):
            _describe(self.node, result, root)
        else:
            outputs = [graph.call_function(operator.getitem, (self.node, i)) for i in range(len(self.results))]
            for node, x in zip(outputs, self.results, strict=True):
                _describe(node, x, root)
        graph.output(tuple(outputs))
        self.model = ModelGraph(graph, {}, {str(i): n for i, n in enumerate(outputs)}, {}, {}, {}, {})
        self.inputs = list(names.values())
        self._relate(sample)

    def _relate(self, sample: Sample) -> None:
        for node in self.inputs:
            set_dims(node, [[] if size == 1 else [Factor(size)] for size in node.meta["value"].shape])
        if sample.relate:
            sample.relate(self.node)
        if self.node.target in CONVERSIONS:
            set_dims(self.node, dims_of(self.inputs[0]))
        else:
            rule_of(self.node).relate(self.node)
        if "value" not in self.node.meta:
            for node, dims in zip(self.model.outputs.values(), self.node.meta["dims"], strict=True):
                set_dims(node, dims)

    def assignments(self) -> Iterator[tuple[Layout, ...]]:
        """Every layout of every operand."""
        choices = [self._choices(node, node.meta["value"].dtype.is_floating_point) for node in self.inputs]
        return _product(choices)

    def results_possible(self) -> list[Layout]:
        found = [I, R, P]
        for node in self.model.outputs.values():
            found += [layout for layout in self._choices(node, False) if layout.factor and layout not in found]
        return found

    def _choices(self, node: fx.Node, is_float: bool) -> list[Layout]:
        factors = dict.fromkeys(f for f in all_leaves(dims_of(node)) if dim_of(dims_of(node), f) is not None)
        return [I, *([R, P] if is_float else []), *map(sharded, factors)]

    def typed(self, layouts: tuple[Layout, ...], ranks: int, copies: Collection[Factor] = ()) -> Layout | None:
        """The layout that the type rule gives, None where it refuses."""
        operands = dict(zip(self.inputs, layouts, strict=True))
        try:
            return type_node(self.node, "tp", Mesh({"tp": ranks}), operands, copies)
        except Mismatch:
            return None

    def holds(self, layouts: tuple[Layout, ...], result: Layout, ranks: int) -> bool | None:
        """Whether the ranks compute what `result` says, forward and backward; None where localising refuses."""
        generator = torch.Generator().manual_seed(5)
        model = clone_graph(self.model)
        nodes = list(model.graph.nodes)[:-1]
        of_nodes = [*layouts, *[result] * (len(nodes) - len(layouts))]
        for node, layout in zip(nodes, of_nodes, strict=True):
            node.meta["layouts"] = {"tp": layout}
        try:
            localise(model, Mesh({"tp": ranks}), {}, {})
        except ShardcError:
            return None
        held = {}
        for node, x, layout in zip(nodes, self.operands, layouts, strict=False):
            shards = _distribute(x, dims_of(node), layout, ranks, generator, forward=True)
            held[node.target] = [shard.requires_grad_(x.requires_grad) for shard in shards]
        try:
            outputs = list(Simulation(model, Mesh({"tp": ranks}), held, Batch({}, 0, 0)).outputs.values())
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            return False
        for found, x, node in zip(outputs, self.results, self.model.outputs.values(), strict=True):
            if not _equal(found, x, dims_of(node), result, forward=True):
                return False
        return self._gradients_hold(held, outputs, layouts, result, generator)

    def _gradients_hold(
        self,
        held: dict[str, list[Tensor]],
        outputs: list[list[Tensor]],
        layouts: tuple[Layout, ...],
        result: Layout,
        generator: torch.Generator,
    ) -> bool:
        """Send one gradient back through the ranks and through one process, and compare what reaches the operands."""
        ends: list[Tensor] = []
        starts: list[Tensor] = []
        upstream = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in self.results]
        for found, x, g, node in zip(outputs, self.results, upstream, self.model.outputs.values(), strict=True):
            if x.requires_grad:
                ends += found
                starts += _distribute(g, dims_of(node), result, len(found), generator, forward=False)
        if not ends:
            return True
        if not all(end.requires_grad for end in ends):
            return False
        dense_ends = [(x, g) for x, g in zip(self.results, upstream, strict=True) if x.requires_grad]
        trained = [i for i, x in enumerate(self.operands) if x.requires_grad]
        dense = _grad(*zip(*dense_ends, strict=True), [self.operands[i] for i in trained])
        flat = [shard for i in trained for shard in held[self.inputs[i].target]]
        grads = iter(_grad(ends, starts, flat))
        return all(
            _equal(list(islice(grads, len(outputs[0]))), wanted, dims_of(self.inputs[i]), layouts[i], forward=False)
            for i, wanted in zip(trained, dense, strict=True)
        )


def _grad(ends: Sequence[Tensor], starts: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(ends, leaves, starts, retain_graph=True, allow_unused=True, materialize_grads=True)


def _describe(node: fx.Node, x: Tensor, call: Call) -> None:
    node.meta.update(call=call, value=Value(tuple(x.shape), x.dtype, x.requires_grad))


def _product(choices: list[list[Layout]]) -> Iterator[tuple[Layout, ...]]:
    if not choices:
        yield ()
        return
    for rest in _product(choices[1:]):
        for first in choices[0]:
            yield (first, *rest)


# -- what a layout promises ------------------------------------------------------------------------------------------
def _is_partial(layout: Layout, forward: bool) -> bool:
    """Whether ranks hold parts of a sum: P of its value, R of its gradient."""
    return layout == (P if forward else R)


def _distribute(
    x: Tensor, dims: list, layout: Layout, ranks: int, generator: torch.Generator, *, forward: bool
) -> list[Tensor]:
    x = x.detach()
    if layout.factor is not None:
        return [_take(x, dims, layout.factor, coord, ranks) for coord in range(ranks)]
    if not _is_partial(layout, forward):
        return [x.clone() for _ in range(ranks)]
    parts = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(ranks - 1)]
    return [*parts, x - sum(parts)]


def _equal(found: Sequence[Tensor], x: Tensor, dims: list, layout: Layout, *, forward: bool) -> bool:
    """Whether tensors are what a layout says of `x`."""
    if layout.factor is None and _is_partial(layout, forward):
        if any(each.shape != x.shape for each in found):
            return False
        return _close(functools.reduce(torch.add, found), x)
    expected = [x] * len(found)
    if layout.factor is not None:
        expected = [_take(x, dims, layout.factor, coord, len(found)) for coord in range(len(found))]
    return all(map(_close, found, expected))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE)


def _take(x: Tensor, dims: list, factor: Factor, coord: int, ranks: int) -> Tensor:
    """The part of `x` that a coord holds where `factor` is sharded."""
    for d, factors in enumerate(dims):
        if dim_of([factors], factor) is not None:
            x = x.index_select(d, _indices(factors, factor, coord, ranks))
    return x.clone()


def _indices(factors: Sequence[Factor], factor: Factor, coord: int, ranks: int) -> Tensor:
    index = torch.zeros(1, dtype=torch.int64)
    for leaf in leaves(factors):
        if leaf is factor:
            own = torch.arange(leaf.size).tensor_split(ranks)[coord]
        elif leaf.segments is not None:
            pieces, start = [], 0
            for segment in leaf.segments:
                pieces.append(start + _indices(segment, factor, coord, ranks))
                start += _size(segment)
            own = torch.cat(pieces)
        else:
            own = torch.arange(leaf.size)
        index = (index[:, None] * leaf.size + own).flatten()
    return index


def _size(factors: Sequence[Factor]) -> int:
    return functools.reduce(operator.mul, (leaf.size for leaf in leaves(factors)), 1)
