"""From what all ranks compute together to what one rank computes: local shapes, and size literals that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import fx

from shardc.capture.graph import ModelGraph, Parameter, Value, op_name
from shardc.capture.symbols import Dim, ShardSize, Size
from shardc.errors import ShardcError
from shardc.sharding.analyse import describe
from shardc.sharding.factors import Dims, Factor, leaves, product, quotient
from shardc.sharding.layout import Layouts
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import argument, dims_of


def localise(
    model: ModelGraph, mesh: Mesh, parameter_dims: dict[str, Dims], parameter_layouts: dict[str, Layouts]
) -> None:
    """Rewrite, in place, `Value.shape`, size literals and parameter shapes to what one rank holds.

    Before: global shapes, factors and layouts on every node. After: as architecture.md, section 5. A size that differs
    between ranks (an odd vocabulary) becomes a `ShardSize`.
    """
    local = _Localiser(mesh)
    for node in model.graph.nodes:
        if "value" in node.meta:
            value: Value = node.meta["value"]
            node.meta["global_shape"] = value.shape
            shape = local.shape(value.shape, dims_of(node), node.meta["layouts"])
            node.meta["value"] = Value(shape, value.dtype, value.requires_grad)
    for node in model.operations():
        local.literals(node)
    for name, parameter in list(model.parameters.items()):
        if name in parameter_layouts:
            shape = local.shape(parameter.shape, parameter_dims[name], parameter_layouts[name])
            model.parameters[name] = Parameter(
                parameter.name,
                shape,
                parameter.dtype,
                parameter.requires_grad,
                parameter.aliases,
                parameter.is_buffer,
                parameter.init,
            )


class _Localiser:
    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def shape(self, shape: tuple[Dim, ...], dims: Dims, layouts: Layouts) -> tuple[Dim, ...]:
        return tuple(self.dim(size, factors, layouts) for size, factors in zip(shape, dims, strict=True))

    def dim(self, size: Dim, factors: list[Factor], layouts: Layouts) -> Dim:
        """What a rank holds of a dim: the product of its factors' parts, the sum of its segments' parts."""
        if not any(layout.letter == "S" for layout in layouts.values()):
            return size
        found = leaves(factors)
        if len(found) == 1 and found[0].segments is not None:
            parts = [self.dim(product([f.size for f in leaves(s)]) if s else 1, s, layouts) for s in found[0].segments]
            if not all(isinstance(part, int) for part in parts):
                raise ShardcError(f"a segment of {size} has uneven shards", "use a tp that divides it")
            return sum(parts)
        local = [self._leaf(leaf, layouts) for leaf in found]
        if local == [leaf.size for leaf in found]:
            return size
        return _product(local)

    def _leaf(self, leaf: Factor, layouts: Layouts) -> Dim:
        axes = tuple(axis for axis, layout in layouts.items() if layout.factor is leaf)
        ranks = prod(self.mesh.sizes[axis] for axis in axes)
        if ranks == 1:
            return self.dim(leaf.size, [leaf], layouts) if leaf.segments is not None else leaf.size
        if isinstance(leaf.size, int) and leaf.size % ranks == 0:
            return leaf.size // ranks
        return ShardSize(leaf.size, self.mesh.name(axes))

    # -- literals -----------------------------------------------------------------------------------------------------
    def literals(self, node: fx.Node) -> None:
        """Make an operation's size literals those of its local result."""
        if not any(layout.letter == "S" for layouts in _all_layouts(node) for layout in layouts.values()):
            return
        name = op_name(node.target)
        if name in ("view", "reshape", "expand", "broadcast_to"):
            self._sizes(node)
        elif name == "unflatten":
            self._unflattened(node)
        elif name in ("repeat", "repeat_interleave"):
            self._copies(node)
        elif name == "split" and not isinstance(argument(node, 1, "split_size_or_sections"), int):
            self._pieces(node)
        elif name == "split":
            self._piece(node)
        elif name == "getitem" and "value" in node.args[0].meta:
            self._slices(node)

    def _sizes(self, node: fx.Node) -> None:
        """The whole result shape: view(x, 2, 3), view(x, (2, 3)), view(x, size=(2, 3))."""
        shape = node.meta["value"].shape
        if len(node.args) == 1:
            node.kwargs = {name: _local_sizes(old, shape) for name, old in node.kwargs.items()}
        elif isinstance(node.args[1], (tuple, list)):
            node.args = (node.args[0], _local_sizes(node.args[1], shape))
        else:
            node.args = (node.args[0], *_local_sizes(node.args[1:], shape))

    def _unflattened(self, node: fx.Node) -> None:
        d = int(argument(node, 1, "dim")) % len(node.args[0].meta["value"].shape)
        sizes = argument(node, 2, "sizes")
        node.args = (node.args[0], d, _local_sizes(sizes, node.meta["value"].shape[d : d + len(sizes)]))
        node.kwargs = {}

    def _copies(self, node: fx.Node) -> None:
        """Each rank makes its own copies only, where they are what is sharded."""
        source, result = node.args[0].meta, node.meta
        added = len(result["value"].shape) - len(source["value"].shape)
        before = (1,) * added + source["value"].shape
        ratios = [_ratio(new, old) for new, old in zip(result["value"].shape, before, strict=True)]
        whole = [
            _ratio(n, o) for n, o in zip(result["global_shape"], (1,) * added + source["global_shape"], strict=True)
        ]
        if ratios == whole:
            return
        if op_name(node.target) == "repeat_interleave":
            d = int(argument(node, 2, "dim")) % len(ratios)
            node.args = (node.args[0], ratios[d], *node.args[2:])
        else:
            times = tuple(ratios)
            node.args = (node.args[0], times) if isinstance(node.args[1], (tuple, list)) else (node.args[0], *times)

    def _results(self, node: fx.Node) -> list[fx.Node]:
        return sorted(node.users, key=lambda user: user.args[1])

    def _pieces(self, node: fx.Node) -> None:
        d = int(argument(node, 2, "dim", 0)) % len(node.args[0].meta["value"].shape)
        results = self._results(node)
        if len(results) != len(node.args[1]):
            raise ShardcError(
                f"{describe(node)}: a piece of a sharded split is not used", "mark the module that makes it `replicate`"
            )
        node.args = (node.args[0], tuple(user.meta["value"].shape[d] for user in results), *node.args[2:])

    def _piece(self, node: fx.Node) -> None:
        d = int(argument(node, 2, "dim", 0)) % len(node.args[0].meta["value"].shape)
        node.args = (node.args[0], self._results(node)[0].meta["value"].shape[d], *node.args[2:])

    def _slices(self, node: fx.Node) -> None:
        """Slices between segments of a sharded dim move with the segments."""
        source = node.args[0]
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        used = sum(i is not None and i is not Ellipsis for i in index)
        rank = len(source.meta["value"].shape)
        new: list[Any] = []
        d = 0
        for i in index:
            if i is Ellipsis:
                d += rank - used
            elif i is not None:
                if isinstance(i, slice):
                    i = self._slice(node, source, d, i)
                d += 1
                new.append(i)
                continue
            new.append(i)
        node.args = (source, tuple(new) if isinstance(node.args[1], tuple) else new[0])

    def _slice(self, node: fx.Node, source: fx.Node, d: int, cut: slice) -> slice:
        whole, local = source.meta["global_shape"][d], source.meta["value"].shape[d]
        if whole == local or (cut.start in (None, 0) and cut.stop in (None, whole)):
            return slice(cut.start, local if cut.stop == whole else cut.stop, cut.step) if whole != local else cut
        (leaf,) = leaves(dims_of(source)[d])
        edges = {0: 0}
        at = at_local = 0
        for piece in leaf.segments or ():
            at += product([f.size for f in leaves(piece)])
            at_local += self.dim(product([f.size for f in leaves(piece)]), piece, source.meta["layouts"])
            edges[at] = at_local
        start, stop, _ = cut.indices(whole)
        if start not in edges or stop not in edges:
            raise ShardcError(
                f"{describe(node)}: slices a sharded dim between its segments",
                "mark the module that makes it `replicate`",
            )
        return slice(
            edges[start] if cut.start is not None else None, edges[stop] if cut.stop is not None else None, cut.step
        )


def _local_sizes(old: Sequence[Dim], shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The local shape, but -1 where the author left the size open."""
    return tuple(-1 if size == -1 else local for size, local in zip(old, shape, strict=True))


def _ratio(new: Dim, old: Dim) -> int:
    """How often a dim of `old` elements is repeated in one of `new`."""
    return 1 if new == old else quotient(new, old)


def _all_layouts(node: fx.Node) -> list[Layouts]:
    nodes = [node, *node.all_input_nodes]
    return [n.meta["layouts"] for n in nodes if isinstance(n.meta.get("layouts"), dict)]


def _product(sizes: list[Dim]) -> Dim:
    """Product of local sizes; a ShardSize that follows the batch takes the other factors into its size."""
    shares = [s for s in sizes if isinstance(s, ShardSize)]
    if not shares:
        return product(sizes)
    (share,) = shares
    if len(sizes) == 1:
        return share
    rest = [s for s in sizes if s is not share]
    if isinstance(share.size, Size):
        return ShardSize(product([*rest, share.size]), share.axis)
    raise ShardcError(f"an uneven shard of {share.size} is viewed together with {rest}", "use a tp that divides it")
