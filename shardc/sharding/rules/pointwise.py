"""Operations that act element by element, broadcasting dims of one element."""

from torch import fx

from shardc.sharding.factors import Dims, unify
from shardc.sharding.rules.registry import dims_of, rule, set_dims, shape_of, tensors


def broadcast(node: fx.Node) -> None:
    """a* , b* -> a* b*: dims align at the end; a dim of one element takes the other's."""
    rank = len(shape_of(node))
    dims: Dims = [[] for _ in range(rank)]
    for operand in tensors(node):
        own = dims_of(operand)
        for d, factors in enumerate(own, start=rank - len(own)):
            if factors and dims[d]:
                unify(dims[d], factors, node)
            elif factors:
                dims[d] = factors
    set_dims(node, dims)


# Linear in all operands together: a sum of partial sums is the partial sum of the sum.
rule("add", "sub", linear="each")(broadcast)
# Linear in each operand alone.
rule(
    "neg",
    "to",
    "float",
    "type_as",
    "contiguous",
    "clone",
    "detach",
    "half",
    "bfloat16",
    "double",
    "block_input",
    "block_output",
    linear="one",
)(broadcast)
rule("mul", linear="one")(broadcast)
rule("dropout", random=True)(broadcast)
rule(
    "div", "rdiv", "true_divide", "rsub", "pow", "rpow", "rsqrt", "sqrt", "reciprocal", "exp", "log", "abs", "cos", "sin", "tanh", "sigmoid",
    "relu", "silu", "gelu", "softplus", "erf", "clamp", "clip", "where", "masked_fill", "maximum", "minimum", "bool", "long", "int", "type",
    "logical_not", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
    "lt", "le", "gt", "ge", "eq", "ne", "floor_divide", "remainder", "zeros_like", "ones_like", "full_like", "square", "leaky_relu", "mish", "elu", "isnan", "isinf",
)(broadcast)  # fmt: skip
