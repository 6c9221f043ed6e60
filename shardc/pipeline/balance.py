"""Where to cut: the stages whose slowest one is fastest, by the work that the graph shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from torch import fx

from shardc.capture.graph import ModelGraph, op_name
from shardc.capture.symbols import ShardSize, Size
from shardc.errors import ShardcError
from shardc.pipeline.units import outline

SEQUENCE = 4096  # tokens of the row for which work is counted
_BACKWARD = 2  # a backward pass costs two products for each one of the forward pass


@dataclass(frozen=True, slots=True)
class Costs:
    """FLOPs of one token, forward and backward: of each block by path in model order, before the first, after the last.

    What runs between two blocks counts with the earlier one."""

    blocks: dict[str, int]
    before: int
    after: int

    def of_stages(self, cuts: Sequence[int]) -> list[int]:
        """FLOPs a token of each stage; cuts: index of the first block of each later stage."""
        rows = list(self.blocks.values())
        sums = [sum(rows[a:b]) for a, b in pairwise((0, *cuts, len(rows)))]
        sums[0] += self.before
        sums[-1] += self.after
        return sums


def measure_costs(model: ModelGraph, only: Sequence[str] | None = None, sequence: int = SEQUENCE) -> Costs:
    """Counts the products of a graph for one row of `sequence` tokens; equal blocks are counted once.

    only: the blocks between which stages may be cut, default all; others count with the one before."""
    by_kind: dict[str, int] = {}
    blocks: dict[str, int] = {}
    rest: dict[str | None, int] = {None: 0}
    last: str | None = None
    for unit in outline(model):
        if unit.block is None:
            rest[last] += node_flops(unit.nodes[0], sequence)
            continue
        kind = unit.block.representative
        if kind not in by_kind:
            by_kind[kind] = sum(node_flops(node, sequence) for node in unit.nodes)
        if only is not None and unit.block.instance not in only:
            rest[last] += by_kind[kind]
            continue
        last = unit.block.instance
        blocks[last], rest[last] = by_kind[kind], 0
    per_token = (1 + _BACKWARD) / sequence
    after = rest[last] if blocks else 0
    for path in list(blocks)[:-1]:
        blocks[path] += rest[path]
    scaled = {path: round(flops * per_token) for path, flops in blocks.items()}
    return Costs(scaled, round(rest[None] * per_token), round(after * per_token))


def choose_cuts(costs: Costs, num_stages: int) -> list[int]:
    """The index of the first block of each later stage that makes the costliest stage cheapest.

    Exact. Among equals the costs that differ least win, then the cuts that come first: early stages hold more
    activations under 1F1B. Raises ShardcError where there are more stages than blocks.
    """
    num_blocks = len(costs.blocks)
    if num_stages == 1:
        return []
    if not 1 <= num_stages <= num_blocks:
        raise ShardcError(
            f"--pp {num_stages}: the model has {num_blocks} blocks and a stage needs at least one",
            f"use --pp 1 to {num_blocks}" if num_blocks else "use --pp 1, or a model whose layers are a ModuleList",
        )
    sums = [0, *accumulate(costs.blocks.values())]

    def cost(first: int, last: int) -> int:
        ends = (costs.before if first == 0 else 0) + (costs.after if last == num_blocks else 0)
        return sums[last] - sums[first] + ends

    def bounded_square(first: int, last: int) -> int:
        flops = cost(first, last)
        return flops * flops if flops <= bound else _TOO_MUCH

    bound, _ = _best(num_blocks, num_stages, cost, max)
    return _best(num_blocks, num_stages, bounded_square, int.__add__)[1]


_TOO_MUCH = 1 << 200  # above any sum of squared costs


def _best(
    num_blocks: int, num_stages: int, cost: Callable[[int, int], int], join: Callable[[int, int], int]
) -> tuple[int, list[int]]:
    """Least joined cost of `num_stages` runs of blocks, and the first cuts that reach it, by dynamic programming."""
    best: list[tuple[int, list[int]] | None] = [(cost(0, end), []) if end else None for end in range(num_blocks + 1)]
    for _ in range(num_stages - 1):
        best = [
            min(
                ((join(best[cut][0], cost(cut, end)), [*best[cut][1], cut]) for cut in range(1, end) if best[cut]),
                default=None,
            )
            for end in range(num_blocks + 1)
        ]
    return best[num_blocks]


def check_cuts(cuts: Sequence[int], num_blocks: int, num_stages: int, place: str = "cuts") -> list[int]:
    """The user's own cuts, if they give `num_stages` stages of at least one block. Raises ShardcError at `place`."""
    if len(cuts) != num_stages - 1:
        raise ShardcError(
            f"{place}: {len(cuts)} cuts make {len(cuts) + 1} stages, but --pp is {num_stages}",
            f"give {num_stages - 1} block indices, or write cuts: auto",
        )
    if any(not 0 < cut < num_blocks for cut in cuts) or any(a >= b for a, b in pairwise(cuts)):
        raise ShardcError(
            f"{place}: cuts {list(cuts)} do not rise between the first and last of {num_blocks} blocks",
            f"valid cuts are from 1 to {num_blocks - 1}, each larger than the one before",
        )
    return list(cuts)


def node_flops(node: fx.Node, sequence: int) -> int:
    """Forward FLOPs of one operation for one row of `sequence` tokens; elementwise work is not counted."""
    if node.op != "call_function":
        return 0
    count = _FLOPS.get(op_name(node.target))
    return count(node, sequence) if count else 0


def _sizes(node: fx.Node, sequence: int) -> tuple[int, ...]:
    return tuple(_size(dim, sequence) for dim in node.meta["value"].shape)


def _size(dim: object, sequence: int) -> int:
    if isinstance(dim, ShardSize):
        return _size(dim.size, sequence)
    return dim.at(1, sequence) if isinstance(dim, Size) else dim


def _operand(node: fx.Node, position: int, name: str) -> fx.Node:
    """An argument that the author gave by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs[name]


def _product(node: fx.Node, sequence: int, left: int = 0, name: str = "input") -> int:
    """output elements * inner size * 2; the inner size is the last dim of the left operand.

    An inner size of 1 adds nothing up: such a product (of positions and frequencies, say) is elementwise work."""
    inner = _sizes(_operand(node, left, name), sequence)[-1]
    return 2 * prod(_sizes(node, sequence)) * inner if inner > 1 else 0


def _attention(node: fx.Node, sequence: int) -> int:
    """Two products of every query with every key, half of them under a causal mask."""
    query, key = (_sizes(_operand(node, i, name), sequence) for i, name in enumerate(("query", "key")))
    full = 4 * prod(query) * key[-2]
    return full // 2 if node.kwargs.get("is_causal") else full


_FLOPS: dict[str, Callable[[fx.Node, int], int]] = {
    "addmm": lambda node, sequence: _product(node, sequence, 1, "mat1"),
    "baddbmm": lambda node, sequence: _product(node, sequence, 1, "batch1"),
    "bmm": _product,
    "linear": _product,
    "matmul": _product,
    "scaled_dot_product_attention": _attention,
    "vocab_embedding": lambda node, sequence: prod(_sizes(node, sequence)),
    "embedding": lambda node, sequence: prod(_sizes(node, sequence)),
}
