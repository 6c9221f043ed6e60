"""Operations that move elements and compute nothing: view, transpose, expand, slices, split, cat, pad."""

from __future__ import annotations

import operator
from itertools import pairwise

from torch import fx

from shardc.capture.graph import op_name
from shardc.sharding.factors import Dims, join, new_dim, new_dims_whole, regroup, require_whole, segment, unify
from shardc.sharding.rules.registry import argument, dims_of, rule, set_dims, shape_of


@rule("view", "reshape", "flatten", "unflatten", linear="first")
def view(node: fx.Node) -> None:
    """Row-major regrouping of all factors."""
    set_dims(node, regroup(dims_of(node.args[0]), shape_of(node), node))


@rule("view_as", linear="first")
def view_as(node: fx.Node) -> None:
    """As `view`; the second operand is sharded like the result, since its local shape counts."""
    view(node)
    for mine, other in zip(dims_of(node), dims_of(node.args[1]), strict=True):
        unify(mine, other, node)


@rule("transpose", "swapaxes", linear="first")
def transpose(node: fx.Node) -> None:
    dims = list(dims_of(node.args[0]))
    a, b = (int(argument(node, 1, "dim0")) % len(dims), int(argument(node, 2, "dim1")) % len(dims))
    dims[a], dims[b] = dims[b], dims[a]
    set_dims(node, dims)


@rule("t", "T", linear="first")
def reverse_dims(node: fx.Node) -> None:
    set_dims(node, dims_of(node.args[0])[::-1])


@rule("mT", linear="first")
def matrix_transpose(node: fx.Node) -> None:
    *batch, m, n = dims_of(node.args[0])
    set_dims(node, [*batch, n, m])


@rule("permute", linear="first")
def permute(node: fx.Node) -> None:
    dims = dims_of(node.args[0])
    given = argument(node, 1, "dims")
    order = given if isinstance(given, (tuple, list)) else node.args[1:]
    set_dims(node, [dims[d] for d in order])


@rule("unsqueeze", linear="first")
def unsqueeze(node: fx.Node) -> None:
    dims = list(dims_of(node.args[0]))
    dims.insert(int(argument(node, 1, "dim")) % (len(dims) + 1), [])
    set_dims(node, dims)


@rule("squeeze", linear="first")
def squeeze(node: fx.Node) -> None:
    """Dims of one element go. A named dim of more is whole, since its shard may have one element, which stays."""
    dims, shape = dims_of(node.args[0]), shape_of(node.args[0])
    dim = argument(node, 1, "dim")
    named = range(len(dims)) if dim is None else [d % len(dims) for d in (dim if isinstance(dim, tuple) else (dim,))]
    for d in named:
        require_whole(dims[d], node)
    set_dims(node, [f for d, f in enumerate(dims) if d not in named or shape[d] != 1])


@rule("expand", "broadcast_to", linear="first")
def expand(node: fx.Node) -> None:
    """A dim of one element becomes a dim of its own."""
    own, shape = dims_of(node.args[0]), shape_of(node)
    lead = len(shape) - len(own)
    set_dims(node, [own[d - lead] if d >= lead and own[d - lead] else new_dim(size) for d, size in enumerate(shape)])


@rule("repeat_interleave", linear="first")
def repeat_interleave(node: fx.Node) -> None:
    """d -> (d r)"""
    dims = list(dims_of(node.args[0]))
    dim = argument(node, 2, "dim")
    if dim is None or not isinstance(node.args[1], int):
        set_dims(node, new_dims_whole(shape_of(node), node))
        return
    d = int(dim) % len(dims)
    dims[d] = [*dims[d], *new_dim(node.args[1])]
    set_dims(node, dims)


@rule("repeat", linear="first")
def repeat(node: fx.Node) -> None:
    """d -> (r d)"""
    times = node.args[1] if isinstance(node.args[1], tuple) else node.args[1:]
    own = dims_of(node.args[0])
    lead = len(times) - len(own)
    set_dims(node, [[*new_dim(n), *(own[d - lead] if d >= lead else [])] for d, n in enumerate(times)])


@rule("getitem", linear="first")
def getitem(node: fx.Node) -> None:
    """Slices cut segments, None makes a dim, an integer or a tensor index needs its dim whole."""
    source = node.args[0]
    if node.target is operator.getitem and "value" not in source.meta:
        set_dims(node, source.meta["dims"][node.args[1]])
        return
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    own, shape = dims_of(source), shape_of(source)
    if any(isinstance(i, fx.Node) for i in index):
        _gather(node, index)
        return
    used = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    dims: Dims = []
    d = 0
    for i in index:
        if i is None:
            dims.append([])
        elif i is Ellipsis:
            count = len(own) - used
            dims += own[d : d + count]
            d += count
        elif isinstance(i, slice):
            dims.append(_slice(node, own[d], shape[d], i, shape_of(node)[len(dims)]))
            d += 1
        else:
            require_whole(own[d], node)
            d += 1
    set_dims(node, dims)


def _gather(node: fx.Node, index: tuple) -> None:
    for i in index:
        if isinstance(i, fx.Node):
            for factors in dims_of(i):
                require_whole(factors, node)
    for factors in dims_of(node.args[0]):
        require_whole(factors, node)
    set_dims(node, new_dims_whole(shape_of(node), node))


def _slice(node: fx.Node, factors: list, size: object, cut: slice, out: object) -> list:
    if cut.start in (None, 0) and cut.stop in (None, size) and cut.step in (None, 1):
        return factors
    if out == 0:
        return new_dims_whole([out], node)[0]
    if (
        cut.step in (None, 1)
        and isinstance(size, int)
        and isinstance(out, int)
        and all(isinstance(e, int | None) for e in (cut.start, cut.stop))
    ):
        start, stop, _ = cut.indices(size)
        sizes = [n for n in (start, stop - start, size - stop) if n]
        return segment(factors, sizes, node)[1 if start else 0]
    require_whole(factors, node)
    return new_dims_whole([out], node)[0]


@rule("split", "chunk", "tensor_split", "unbind", linear="first")
def split(node: fx.Node) -> None:
    """d -> segments, one an output; `unbind` drops the dim."""
    own, shape = dims_of(node.args[0]), shape_of(node.args[0])
    name = op_name(node.target)
    d = int(argument(node, 1 if name == "unbind" else 2, "dim", 0)) % len(own)
    if name == "unbind":
        require_whole(own[d], node)
        node.meta["dims"] = [[f for e, f in enumerate(own) if e != d]] * shape[d]
        return
    sizes = _piece_sizes(name, node, shape[d])
    pieces = segment(own[d], sizes, node)
    node.meta["dims"] = [[piece if e == d else f for e, f in enumerate(own)] for piece in pieces]


def _piece_sizes(name: str, node: fx.Node, size: int) -> list[int]:
    how = node.args[1] if len(node.args) > 1 else next(v for k, v in node.kwargs.items() if k != "dim")
    if name == "tensor_split":
        if isinstance(how, int):
            return [size // how + (i < size % how) for i in range(how)]
        edges = [0, *how, size]
        return [end - start for start, end in pairwise(edges)]
    if isinstance(how, (tuple, list)):
        return list(how)
    each = how if name == "split" else -(-size // how)
    return [min(each, size - start) for start in range(0, size, each)]


@rule("cat", "concat", linear="each")
def cat(node: fx.Node) -> None:
    """Pieces along d become segments; all other dims agree."""
    pieces = node.args[0]
    dims = [list(f) for f in dims_of(pieces[0])]
    d = int(argument(node, 1, "dim", 0)) % len(dims)
    for piece in pieces[1:]:
        for e, (mine, other) in enumerate(zip(dims, dims_of(piece), strict=True)):
            if e != d and mine and other:
                unify(mine, other, node)
    dims[d] = join([dims_of(piece)[d] for piece in pieces], shape_of(node)[d])
    for piece in pieces:
        require_whole(dims_of(piece)[d], node)
    require_whole(dims[d], node)
    set_dims(node, dims)


@rule("stack", linear="each")
def stack(node: fx.Node) -> None:
    pieces = node.args[0]
    dims = [list(f) for f in dims_of(pieces[0])]
    for piece in pieces[1:]:
        for mine, other in zip(dims, dims_of(piece), strict=True):
            unify(mine, other, node)
    dims.insert(int(argument(node, 1, "dim", 0)) % (len(dims) + 1), new_dims_whole([len(pieces)], node)[0])
    set_dims(node, dims)


@rule("pad")
def pad(node: fx.Node) -> None:
    """Padded dims are whole and new."""
    own, shape = dims_of(node.args[0]), shape_of(node)
    before = shape_of(node.args[0])
    dims = []
    for d, factors in enumerate(own):
        if before[d] != shape[d]:
            require_whole(factors, node)
            factors = new_dims_whole([shape[d]], node)[0]
        dims.append(factors)
    set_dims(node, dims)


@rule("roll", linear="first")
def roll(node: fx.Node) -> None:
    """All dims are whole."""
    for factors in dims_of(node.args[0]):
        require_whole(factors, node)
    set_dims(node, list(dims_of(node.args[0])))


@rule("arange", "zeros", "ones", "full", "tensor", "scalar_tensor", "linspace", "eye")
def create(node: fx.Node) -> None:
    """A new tensor has dims of its own."""
    set_dims(node, [new_dim(size) for size in shape_of(node)])


@rule("new_zeros", "new_ones", "new_full", "new_tensor", reads=0)
def create_like(node: fx.Node) -> None:
    """A new tensor in the dtype and on the device of another."""
    create(node)
