"""Runs a localised graph for all tp ranks in one process, forward and backward, in float64.

A value is a list with one tensor for each rank. Operations run rank by rank with the literals of that rank; conversions
act on the lists, each with its dual for the backward, exactly as the table in docs/architecture.md says. Nothing here
knows how a plan was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from shardc.capture.graph import ModelGraph, Repeat, block_input, block_output, op_name, repeat_block
from shardc.capture.symbols import (
    DEVICE,
    DTYPE_MIN,
    MODEL_DTYPE,
    TRAINING,
    Axis,
    ShardSize,
    Size,
    WhileTraining,
)
from shardc.runtime import collectives
from shardc.runtime.layers import vocab_cross_entropy, vocab_embedding
from shardc.runtime.mesh import MeshAxis
from shardc.runtime.shard_map import ShardMap, shard_tensor
from shardc.sharding.mesh import Mesh
from shardc.sharding.prove import ShardedParameter

Ranks = list[Tensor]  # one tensor a rank


# -- conversions on lists --------------------------------------------------------------------------------------------
def _same(xs: Sequence[Tensor], dim: int) -> Ranks:
    return [x.clone() for x in xs]


def _sum(xs: Sequence[Tensor], dim: int) -> Ranks:
    return [torch.stack(tuple(xs)).sum(0) for _ in xs]


def _join(xs: Sequence[Tensor], dim: int) -> Ranks:
    return [torch.cat(tuple(xs), dim) for _ in xs]


def _keep(xs: Sequence[Tensor], dim: int) -> Ranks:
    return [x.tensor_split(len(xs), dim)[i].clone() for i, x in enumerate(xs)]


def _sum_and_keep(xs: Sequence[Tensor], dim: int) -> Ranks:
    return _keep(_sum(xs, dim), dim)


def _only_first(xs: Sequence[Tensor], dim: int) -> Ranks:
    return [xs[0].clone(), *(torch.zeros_like(x) for x in xs[1:])]


def _spread_first(xs: Sequence[Tensor], dim: int) -> Ranks:
    return [xs[0].clone() for _ in xs]


_ON_LISTS: dict[Callable, tuple[Callable, Callable]] = {
    collectives.copy_to: (_same, _sum),
    collectives.all_reduce: (_sum, _same),
    collectives.all_gather: (_join, _sum_and_keep),
    collectives.reduce_scatter: (_sum_and_keep, _join),
    collectives.shard: (_keep, _join),
    collectives.all_gather_invariant: (_join, _keep),
    collectives.keep_on_first: (_only_first, _spread_first),
}


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ways: tuple[Callable, Callable], dim: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.ways, ctx.dim = ways, dim
        return tuple(ways[0](xs, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.ways[1](grads, ctx.dim))


def convert(function: Callable, xs: Sequence[Tensor], dim: int = 0) -> Ranks:
    """One conversion over the ranks of `xs`, in order of their coord."""
    return list(_Collective.apply(_ON_LISTS[function], dim, *xs))


# -- ranks -----------------------------------------------------------------------------------------------------------
def tp_ranks(mesh: Mesh) -> list[MeshAxis]:
    """The tp axis as each rank sees it."""
    sub_axes = {name.removeprefix("tp."): size for name, size in mesh.sizes.items()} if len(mesh.axes) > 1 else None
    return [MeshAxis.abstract("tp", mesh.total, coord=coord, sub_axes=sub_axes) for coord in range(mesh.total)]


def groups(ranks: Sequence[MeshAxis], axis: str) -> list[list[int]]:
    """The ranks that communicate over an axis, each group in order of coord on it."""
    if axis == "tp":
        return [list(range(len(ranks)))]
    found: dict[tuple, list[int]] = {}
    for rank in ranks:
        others = tuple(sub.coord for sub in rank.sub_axes if sub.name != axis)
        found.setdefault(others, []).append(rank.coord)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors by input name, the same on all ranks, and the sizes that symbols stand for."""

    tensors: Mapping[str, Tensor]
    rows: int
    length: int


class Simulation:
    """One run of a localised graph: `outputs[name]` is a list with one tensor for each rank."""

    def __init__(self, model: ModelGraph, mesh: Mesh, tensors: Mapping[str, Ranks], batch: Batch):
        """tensors: what each rank holds of each parameter and buffer, by canonical name."""
        self.model, self.batch, self.tensors = model, batch, tensors
        self.ranks = tp_ranks(mesh)
        self.env: dict[fx.Node, Any] = {}
        self._run((node for node in model.graph.nodes if node.op != "output"), None)
        self.outputs: dict[str, Ranks] = {name: self.env[node] for name, node in model.outputs.items()}

    def _run(self, nodes: Iterable[fx.Node], repeat: Repeat | None) -> None:
        for node in nodes:
            self.env[node] = self._value(node, repeat)

    def _value(self, node: fx.Node, repeat: Repeat | None) -> Any:
        if node.op == "placeholder":
            return [self.batch.tensors[node.target]] * len(self.ranks)
        if node.op == "get_attr":
            return self.tensors[repeat.rename(node.target) if repeat else node.target]
        if node.target is repeat_block:
            return self._repeat(node)
        if node.target in _ON_LISTS:
            return self._convert(node)
        if node.target is vocab_cross_entropy:
            return self._cross_entropy(node)
        return [self._operation(node, rank) for rank in self.ranks]

    def _operation(self, node: fx.Node, rank: MeshAxis) -> Any:
        args, kwargs = self._literals(node.args, rank), self._literals(node.kwargs, rank)
        name = op_name(node.target)
        if name in ("float", "half", "bfloat16"):
            return args[0].double()
        if node.target is vocab_embedding:
            return vocab_embedding(*args, **kwargs)
        return node.target(*args, **kwargs)

    def _literals(self, item: Any, rank: MeshAxis) -> Any:
        return fx.node.map_aggregate(item, lambda leaf: self._literal(leaf, rank))

    def _literal(self, leaf: Any, rank: MeshAxis) -> Any:
        """What a symbol stands for on one rank; every float dtype is float64 here, and nothing trains."""
        if isinstance(leaf, fx.Node):
            return self.env[leaf][rank.coord]
        if isinstance(leaf, Size):
            return leaf.at(self.batch.rows, self.batch.length)
        if isinstance(leaf, ShardSize):
            start, end = rank.named(leaf.axis).bounds(self._literal(leaf.size, rank))
            return end - start
        if isinstance(leaf, Axis):
            return rank.named(leaf.name)
        if leaf is MODEL_DTYPE or leaf in (torch.float32, torch.float16, torch.bfloat16):
            return torch.float64
        if isinstance(leaf, WhileTraining):
            return 0.0
        symbols = {TRAINING: False, DEVICE: torch.device("cpu"), DTYPE_MIN: torch.finfo(torch.float64).min}
        return next((value for symbol, value in symbols.items() if leaf is symbol), leaf)

    def _convert(self, node: fx.Node) -> Ranks:
        xs, axis = self.env[node.args[0]], node.args[1]
        dim = node.kwargs.get("dim", 0)
        result: Ranks = list(xs)
        for group in groups(self.ranks, axis.name):
            size = sum(xs[rank].shape[dim] for rank in group) if xs[0].dim() else 0
            assert node.kwargs.get("size", size) == size, f"{node.name}: size={node.kwargs['size']}, shards hold {size}"
            for rank, value in zip(group, convert(node.target, [xs[rank] for rank in group], dim), strict=True):
                result[rank] = value
        return result

    def _cross_entropy(self, node: fx.Node) -> Ranks:
        """What the parallel loss computes: that of the joined logits, with each rank's part of the gradient."""
        logits, target, axis, vocabulary = node.args
        whole: Ranks = list(self.env[logits])
        for group in groups(self.ranks, axis.name):
            joined = convert(collectives.all_gather_invariant, [whole[rank] for rank in group], 1)
            for rank, value in zip(group, joined, strict=True):
                whole[rank] = value
        assert all(each.shape[1] == vocabulary for each in whole)
        return [F.cross_entropy(x, y, **node.kwargs) for x, y in zip(whole, self.env[target], strict=True)]

    def _repeat(self, node: fx.Node) -> Any:
        """Run the representative's nodes again, on the instance's parameters."""
        repeat, *actuals = node.args
        body = block_body(self.model, repeat.representative)
        formals = [each for each in body if each.target is block_input]
        given = dict(zip(formals, (self.env[actual] for actual in actuals), strict=True))
        outer = dict(self.env)
        for each in body:
            self.env[each] = given[each] if each in given else self._value(each, repeat)
        results = [self.env[each] for each in body if each.target is block_output]
        self.env = outer
        if "value" in node.meta:
            return results[0]
        return [tuple(result[rank.coord] for result in results) for rank in self.ranks]


def block_body(model: ModelGraph, path: str) -> list[fx.Node]:
    """The nodes that run inside the block `path`."""
    return [
        node
        for node in model.graph.nodes
        if node.op != "output" and any(call.path == path for call in node.meta["call"].chain())
    ]


# -- parameters ------------------------------------------------------------------------------------------------------
def shard_parameters(
    full: Mapping[str, Tensor], table: Mapping[str, ShardedParameter], ranks: Sequence[MeshAxis]
) -> dict[str, Ranks]:
    """What each rank holds of each full tensor; trained tensors become leaves of their own. Unlisted ones are whole."""
    held: dict[str, Ranks] = {}
    for name, tensor in full.items():
        known = table.get(name)
        pieces = [shard_tensor(tensor, _shard_map(known), rank).clone() for rank in ranks]
        held[name] = [piece.requires_grad_(known is not None and known.requires_grad) for piece in pieces]
    return held


def backward(losses: Ranks) -> None:
    """Each rank begins with the gradient 1 of its own loss."""
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])


def reduced_gradients(held: Ranks, parameter: ShardedParameter, ranks: Sequence[MeshAxis]) -> Ranks:
    """The gradient that each rank holds after the table's reductions."""
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in held]
    for axis in parameter.grad_reduce:
        for group in groups(ranks, axis):
            total = torch.stack([grads[rank] for rank in group]).sum(0)
            for rank in group:
                grads[rank] = total
    return grads


def expected_shards(full: Tensor, parameter: ShardedParameter, ranks: Sequence[MeshAxis]) -> Ranks:
    """The part of a full gradient that each rank must hold."""
    return [shard_tensor(full, _shard_map(parameter), rank) for rank in ranks]


def _shard_map(parameter: ShardedParameter | None) -> ShardMap | None:
    return ShardMap.parse(parameter.shard) if parameter is not None and parameter.shard is not None else None
