"""The type rule of the layouts: what an operation gives on one axis, from what its operands are. Used by the proof.

It infers nothing and inserts nothing: a graph types, or the operation that does not is named.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from shardc.capture.graph import op_name
from shardc.capture.symbols import Axis
from shardc.sharding.factors import Factor, contains, dim_of, is_whole_dim, leaves
from shardc.sharding.layout import CONVERSIONS, I, Layout, P, R, sharded
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import argument, dims_of, rule_of, tensors


class Mismatch(Exception):
    """An operation whose operands' layouts do not fit it; the text says which and why."""


def _covers(node: fx.Node, position: int, axis: str, mesh: Mesh) -> bool:
    symbol = argument(node, position, "axis")
    return isinstance(symbol, Axis) and axis in mesh.atomic(symbol.name)


def type_node(
    node: fx.Node, axis: str, mesh: Mesh, layouts: dict[fx.Node, Layout], copies: Collection[Factor] = ()
) -> Layout:
    """The layout of a node's result (of every result, where there are several) on one atomic axis.

    layouts: of the operands. copies: factors of which each rank may make only its own part, where the operation makes
    copies (`expand` of KV heads for the query heads of this rank). Raises Mismatch.
    """
    conversion = CONVERSIONS.get(node.target)
    if conversion is not None and _covers(node, 1, axis, mesh):
        return _type_conversion(node, layouts, conversion.before, conversion.after)
    name = op_name(node.target)
    if name in ("vocab_embedding", "vocab_cross_entropy") and _covers(node, 2, axis, mesh):
        return _type_vocabulary(node, name, layouts)
    return _type_operation(node, layouts, copies, axis)


def _type_conversion(node: fx.Node, layouts: dict[fx.Node, Layout], before: str, after: str) -> Layout:
    operand = node.args[0]
    have = layouts[operand]
    if have.letter != before:
        raise Mismatch(f"{op_name(node.target)} takes {before}, but {operand.name} is {have}")
    if "S" not in (before, after):
        return I if after == "I" else R if after == "R" else P
    dim = int(argument(node, 2, "dim"))
    factors = dims_of(operand)[dim]
    if before == "S":
        if not is_whole_dim(factors, have.factor):
            raise Mismatch(f"dim {dim} of {operand.name} is not the sharded factor alone")
        return R if after == "R" else I
    if len(leaves(factors)) != 1 or leaves(factors)[0].segments:
        raise Mismatch(f"dim {dim} of {operand.name} is several factors: a shard of it is not contiguous")
    return sharded(leaves(factors)[0])


def _type_vocabulary(node: fx.Node, name: str, layouts: dict[fx.Node, Layout]) -> Layout:
    other, table = (node.args[0], node.args[1]) if name == "vocab_embedding" else (node.args[1], node.args[0])
    vocabulary = leaves(dims_of(table)[0 if name == "vocab_embedding" else 1])
    have = layouts[table]
    if have.letter != "S" or vocabulary != [have.factor]:
        raise Mismatch(f"{name} takes a table sharded along the vocabulary, but {table.name} is {have}")
    if layouts[other].letter not in "IR":
        raise Mismatch(f"{name} takes whole ids, but {other.name} is {layouts[other]}")
    return P if name == "vocab_embedding" else I


def _type_operation(node: fx.Node, layouts: dict[fx.Node, Layout], copies: Collection[Factor], axis: str) -> Layout:
    rule = rule_of(node)
    operands = tensors(node)
    letters = {layouts[o].letter for o in operands}
    if "S" in letters:
        if rule is None:
            raise Mismatch(f"{op_name(node.target)} has no rule, and an operand is sharded")
        return _type_sharded(node, operands, layouts, axis)
    if "P" in letters:
        return _type_partial(node, operands, layouts)
    with_gradient = {layouts[o].letter for o in operands if o.meta["value"].requires_grad}
    if len(with_gradient) > 1:
        raise Mismatch(
            "operands with whole and with partial gradients meet: "
            + ", ".join(f"{o.name} is {layouts[o]}" for o in operands if o.meta["value"].requires_grad)
        )
    result = R if with_gradient == {"R"} else I
    made = next((factor for factor in copies if _makes_copies(node, factor)), None)
    return sharded(made) if made is not None and result is R else result


def _makes_copies(node: fx.Node, factor: Factor) -> bool:
    """Whether an operation makes copies that `factor` counts, so that each rank can make its own."""
    if op_name(node.target) not in ("expand", "repeat_interleave", "repeat", "broadcast_to"):
        return False
    return dim_of(dims_of(node), factor) is not None and all(dim_of(dims_of(o), factor) is None for o in tensors(node))


def _type_sharded(node: fx.Node, operands: list[fx.Node], layouts: dict[fx.Node, Layout], axis: str) -> Layout:
    factors = {layouts[o].factor for o in operands if layouts[o].letter == "S"}
    if len(factors) > 1:
        raise Mismatch("operands are sharded differently: " + ", ".join(f"{o.name} is {layouts[o]}" for o in operands))
    (factor,) = factors
    if contains(node.meta.get("whole", ()), factor):
        raise Mismatch(f"{op_name(node.target)} needs all of a dim that is sharded over {axis}")
    rule = rule_of(node)
    results = _result_dims(node)
    kept = [dim_of(dims, factor) is not None for dims in results]
    summed = rule.summed and not any(kept)
    for operand in operands:
        have = layouts[operand]
        if dim_of(dims_of(operand), factor) is not None:
            if have.letter != "S":
                raise Mismatch(f"{operand.name} is {have} and must be sharded like the other operands")
        elif op_name(node.target) == "linear" and operand is argument(node, 2, "bias") and summed:
            if have is not P:
                raise Mismatch(f"the bias {operand.name} would be added once a rank of {axis}")
        elif have.letter == "P" or (have.letter == "I" and operand.meta["value"].requires_grad):
            raise Mismatch(f"{operand.name} is {have} beside a sharded operand and must be R: its gradient is partial")
    if all(kept):
        return sharded(factor)
    if summed:
        return P
    raise Mismatch(f"{op_name(node.target)} loses the sharded factor of size {factor.size}")


def _result_dims(node: fx.Node) -> list:
    return [dims_of(node)] if "value" in node.meta else node.meta["dims"]


def _type_partial(node: fx.Node, operands: list[fx.Node], layouts: dict[fx.Node, Layout]) -> Layout:
    rule = rule_of(node)
    partial = [o for o in operands if layouts[o].letter == "P"]
    how = rule.linear if rule else ""
    others = [o for o in operands if o not in partial]
    if how == "each":
        numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        if not others and not (numbers and op_name(node.target) in ("add", "sub")):
            return P
        raise Mismatch(f"{op_name(node.target)} adds something whole to the partial sum {partial[0].name}")
    if how == "one" and len(partial) == 1:
        bias = argument(node, 2, "bias") if op_name(node.target) == "linear" else None
        if bias is None and all(layouts[o].letter == "R" or not o.meta["value"].requires_grad for o in others):
            return P
    raise Mismatch(f"the partial sum {partial[0].name} enters {op_name(node.target)} before it is reduced")
