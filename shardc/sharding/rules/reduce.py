"""Operations that look along a dim: reductions, normalisations, softmax, scans, the loss."""

from torch import fx

from shardc.sharding.factors import Dims, leaves, new_dims_whole, require_whole, unify
from shardc.sharding.rules.pointwise import broadcast
from shardc.sharding.rules.registry import argument, dims_of, rule, set_dims, shape_of, tensors


def _dims_argument(node: fx.Node, rank: int) -> list[int]:
    """The dims along which a reduction runs: all, unless it is given some."""
    dim = argument(node, 1, "dim")
    if dim is None:
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]


def _without(node: fx.Node, drop: list[int]) -> Dims:
    """The dims of the operand less those that are reduced, which stay as dims of one element under `keepdim`."""
    keep = bool(argument(node, 2, "keepdim", False))
    return [[] if d in drop else f for d, f in enumerate(dims_of(node.args[0])) if keep or d not in drop]


@rule("sum", summed=True, linear="first")
def reduce_sum(node: fx.Node) -> None:
    """a* d b* -> a* b* {sum d}"""
    set_dims(node, _without(node, _dims_argument(node, len(dims_of(node.args[0])))))


@rule("mean", linear="first")
def mean(node: fx.Node) -> None:
    """a* d b* -> a* b* {whole d}"""
    reduce_whole(node)


@rule("amax", "amin", "var", "argmax", "all", "any", "prod", "logsumexp")
def reduce_whole(node: fx.Node) -> None:
    """a* d b* -> a* b* {whole d}"""
    own = dims_of(node.args[0])
    drop = _dims_argument(node, len(own))
    for d in drop:
        require_whole(own[d], node)
    set_dims(node, _without(node, drop))


@rule("max", "min")
def extreme(node: fx.Node) -> None:
    """Of two tensors, of all elements, or along a dim, which gives values and indices."""
    if isinstance(argument(node, 1, "other"), fx.Node):
        broadcast(node)
    elif "value" in node.meta:
        reduce_whole(node)
    else:
        own = dims_of(node.args[0])
        drop = _dims_argument(node, len(own))
        require_whole(own[drop[0]], node)
        node.meta["dims"] = [_without(node, drop)] * 2


@rule("softmax", "log_softmax")
def along_dim(node: fx.Node) -> None:
    """a* d b* -> a* d b* {whole d}"""
    own = dims_of(node.args[0])
    for d in _dims_argument(node, len(own)):
        require_whole(own[d], node)
    set_dims(node, list(own))


rule("cumsum", linear="first")(along_dim)


@rule("flip", linear="first")
def flip(node: fx.Node) -> None:
    """a* d b* -> a* d b* {whole d}"""
    own = dims_of(node.args[0])
    given = argument(node, 1, "dims")
    for d in given if isinstance(given, (tuple, list)) else node.args[1:]:
        require_whole(own[d], node)
    set_dims(node, list(own))


@rule("layer_norm", "rms_norm")
def layer_norm(node: fx.Node) -> None:
    """a* d, d?, d? -> a* d {whole d}"""
    own = dims_of(node.args[0])
    normalised = len(argument(node, 1, "normalized_shape"))
    for operand in tensors(node)[1:]:
        for mine, other in zip(own[-normalised:], dims_of(operand), strict=True):
            unify(mine, other, node)
    for factors in own[-normalised:]:
        require_whole(factors, node)
    set_dims(node, list(own))


@rule("cross_entropy", summed=True)
def cross_entropy(node: fx.Node) -> None:
    """n v m*, n m* -> {sum n m*, whole v}: logits of a sharded vocabulary go through `vocab_cross_entropy`."""
    logits, _ = _unify_targets(node)
    # Not `require_whole`: a policy may shard the vocabulary, since `propagate` then replaces the operation.
    node.meta["whole"] = leaves(logits[1])
    reduction = node.kwargs.get("reduction", "mean")
    if reduction == "mean":
        for factors in (logits[0], *logits[2:]):
            require_whole(factors, node)
    set_dims(node, [logits[0], *logits[2:]] if reduction == "none" else [])


@rule("vocab_cross_entropy")
def vocab_cross_entropy(node: fx.Node) -> None:
    """n v, n -> {whole n}: reduces over the axis of v inside."""
    for dims in _unify_targets(node):
        require_whole(dims[0], node)
    set_dims(node, [])


def _unify_targets(node: fx.Node) -> tuple[Dims, Dims]:
    logits, target = dims_of(node.args[0]), dims_of(node.args[1])
    for mine, other in zip((logits[0], *logits[2:]), target, strict=True):
        unify(mine, other, node)
    return logits, target


@rule("diff", linear="each")
def diff(node: fx.Node) -> None:
    """a* d b* -> a* d - 1 b*, or with `prepend` again d {whole d}"""
    dims: Dims = list(dims_of(node.args[0]))
    d = int(argument(node, 2, "dim", -1)) % len(dims)
    for operand in tensors(node):
        for e, (mine, other) in enumerate(zip(dims, dims_of(operand), strict=True)):
            if e != d:
                unify(mine, other, node)
        require_whole(dims_of(operand)[d], node)
    if shape_of(node)[d] != shape_of(node.args[0])[d]:
        dims[d] = new_dims_whole([shape_of(node)[d]], node)[0]
    set_dims(node, dims)


@rule("triu", "tril", linear="first")
def triangle(node: fx.Node) -> None:
    """b* m n -> b* m n {whole m, n}"""
    dims = dims_of(node.args[0])
    for factors in dims[-2:]:
        require_whole(factors, node)
    set_dims(node, list(dims))
