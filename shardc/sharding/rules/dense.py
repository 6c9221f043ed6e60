"""Products that sum over a dim: linear, matmul, embedding."""

from torch import fx

from shardc.sharding.factors import unify
from shardc.sharding.rules.registry import argument, dims_of, rule, set_dims


@rule("linear", summed=True, linear="one")
def linear(node: fx.Node) -> None:
    """b* i, o i, o? -> b* o {sum i}"""
    x, weight = dims_of(node.args[0]), dims_of(node.args[1])
    bias = argument(node, 2, "bias")
    unify(x[-1], weight[1], node)
    if bias is not None:
        unify(weight[0], dims_of(bias)[0], node)
    set_dims(node, [*x[:-1], weight[0]])


@rule("matmul", "bmm", summed=True, linear="one")
def matmul(node: fx.Node) -> None:
    """b* m k, b* k n -> b* m n {sum k}; batch dims broadcast."""
    x, y = dims_of(node.args[0]), dims_of(node.args[1])
    assert len(x) >= 2 and len(y) >= 2, "vectors are views of matrices here"
    unify(x[-1], y[-2], node)
    batch = [list(factors) for factors in (x if len(x) >= len(y) else y)[:-2]]
    shorter = (y if len(x) >= len(y) else x)[:-2]
    for d, factors in enumerate(shorter, start=len(batch) - len(shorter)):
        if factors and batch[d]:
            unify(batch[d], factors, node)
        elif factors:
            batch[d] = list(factors)
    set_dims(node, [*batch, x[-2], y[-1]])


@rule("embedding", "vocab_embedding")
def embedding(node: fx.Node) -> None:
    """t*, v d -> t* d {whole v}: rows of a sharded vocabulary are looked up by `vocab_embedding`, which gives P."""
    set_dims(node, [*dims_of(node.args[0]), dims_of(node.args[1])[1]])
