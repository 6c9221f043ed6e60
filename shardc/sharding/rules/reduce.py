"""Operations that look along a dim: reductions, normalisations, softmax, scans, the loss."""

from torch import fx

from shardc.sharding.factors import Dims, new_dims_whole, require_whole, unify
from shardc.sharding.rules.registry import argument, dims_of, rule, set_dims, shape_of, tensors


def _dims_argument(node: fx.Node, rank: int) -> list[int]:
    dim = argument(node, 1, "dim")
    if dim is None:
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, tuple) else (dim,))]


@rule("sum", summed=True, linear="one")
def reduce_sum(node: fx.Node) -> None:
    """a* d b* -> a* b* {sum d}"""
    own = dims_of(node.args[0])
    drop = _dims_argument(node, len(own))
    keep = bool(argument(node, 2, "keepdim", False))
    set_dims(node, [[] if d in drop else f for d, f in enumerate(own) if keep or d not in drop])


@rule("mean", "amax", "amin", "max", "min", "var", "argmax", "all", "any", "prod", "logsumexp")
def reduce_whole(node: fx.Node) -> None:
    """a* d b* -> a* b* {whole d}"""
    own = dims_of(node.args[0])
    drop = _dims_argument(node, len(own))
    keep = bool(argument(node, 2, "keepdim", False))
    for d in drop:
        require_whole(own[d], node)
    if "value" in node.meta:
        set_dims(node, [[] if d in drop else f for d, f in enumerate(own) if keep or d not in drop])
    else:
        node.meta["dims"] = [[f for d, f in enumerate(own) if d not in drop]] * 2


@rule("softmax", "log_softmax", "cumsum", "flip")
def along_dim(node: fx.Node) -> None:
    """a* d b* -> a* d b* {whole d}"""
    own = dims_of(node.args[0])
    for d in _dims_argument(node, len(own)):
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
    """n v, n -> {sum n, whole v}: logits of a sharded vocabulary go through `vocab_cross_entropy`."""
    logits, target = dims_of(node.args[0]), dims_of(node.args[1])
    unify(logits[0], target[0], node)
    set_dims(node, [])


@rule("vocab_cross_entropy", summed=True)
def vocab_cross_entropy(node: fx.Node) -> None:
    """n v, n -> {sum n}: reduces over the axis of v inside."""
    cross_entropy(node)


@rule("diff")
def diff(node: fx.Node) -> None:
    """d -> d - 1, or with `prepend` again d {whole}"""
    dims: Dims = list(dims_of(node.args[0]))
    d = int(argument(node, 2, "dim", -1)) % len(dims)
    require_whole(dims[d], node)
    if node.kwargs.get("prepend") is None or shape_of(node)[d] != shape_of(node.args[0])[d]:
        dims[d] = new_dims_whole([shape_of(node)[d]], node)[0]
    set_dims(node, dims)


@rule("triu", "tril")
def triangle(node: fx.Node) -> None:
    """b* m n -> b* m n {whole m, n}"""
    dims = dims_of(node.args[0])
    for factors in dims[-2:]:
        require_whole(factors, node)
    set_dims(node, list(dims))
