"""Scaled dot product attention: heads may be sharded, sequence and head dim may not."""

from torch import fx

from shardc.sharding.factors import leaves, quotient, regroup, require_whole, unify
from shardc.sharding.rules.registry import argument, dims_of, rule, set_dims, shape_of


@rule("scaled_dot_product_attention", random=True)
def attention(node: fx.Node) -> None:
    """b (k g) t d, b k s d, b k s e, mask? b h t s -> b (k g) t e {whole t, s, d, e}: each KV head k serves g heads."""
    query, key, value = node.args[:3]
    q, k, v = dims_of(query), dims_of(key), dims_of(value)
    unify(q[0], k[0], node)
    unify(k[0], v[0], node)
    unify(k[1], v[1], node)
    unify(k[2], v[2], node)
    unify(q[3], k[3], node)
    heads, kv_heads = shape_of(query)[1], shape_of(key)[1]
    if heads == kv_heads:
        unify(q[1], k[1], node)
    else:
        grouped = regroup([q[1]], (kv_heads, quotient(heads, kv_heads)), node)
        unify(grouped[0], k[1], node)
    mask = argument(node, 3, "attn_mask")
    if mask is not None:
        for of_mask, of_scores in zip(dims_of(mask), (q[0], q[1], q[2], k[2]), strict=True):
            if of_mask:
                unify(of_scores, of_mask, node)
    for factors in (q[2], k[2], q[3], v[3]):
        require_whole(leaves(factors), node)
    set_dims(node, [q[0], q[1], q[2], v[3]])
