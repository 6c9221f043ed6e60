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
rule("mul", linear="one")(broadcast)
# Linear in the first operand.
rule("neg", "to", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", linear="first")(broadcast)
rule("block_input", "block_output", "div", "true_divide", "expand_as", linear="first")(broadcast)
rule("type_as", linear="first", reads=1)(broadcast)
# Not linear.
rule("dropout", random=True)(broadcast)
rule("rdiv", "rsub", "pow", "rpow", "rsqrt", "sqrt", "reciprocal", "square", "exp", "expm1", "log", "log1p")(broadcast)
rule("abs", "cos", "sin", "tanh", "sigmoid", "erf")(broadcast)
rule("relu", "relu6", "silu", "hardswish", "gelu", "softplus", "leaky_relu", "mish", "elu", "selu")(broadcast)
rule("clamp", "clip", "where", "masked_fill", "maximum", "minimum", "floor_divide", "remainder")(broadcast)
rule("bool", "long", "int", "type", "zeros_like", "ones_like", "full_like", "isnan", "isinf")(broadcast)
rule("logical_not", "logical_and", "logical_or")(broadcast)
rule("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor")(broadcast)
rule("lt", "le", "gt", "ge", "eq", "ne")(broadcast)
