"""The type rule of the layouts: what an operation gives on one axis, from what its operands are. Used by the proof.

It infers nothing and inserts nothing: a graph types, or the operation that does not is named.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from torch import fx

from shardc.capture.graph import op_name
from shardc.capture.symbols import Axis, Dim
from shardc.sharding.factors import Dims, Factor, contains, dim_of, is_whole_dim, leaves, splits, times
from shardc.sharding.layout import CONVERSIONS, Conversion, I, Layout, P, R, sharded
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import argument, dims_of, makes_copies, result_dims, rule_of, tensors


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
    if conversion is not None:
        if _covers(node, 1, axis, mesh):
            return _type_conversion(node, layouts, conversion, mesh)
        return _type_other_axis(node, layouts[node.args[0]])
    name = op_name(node.target)
    if name in ("vocab_embedding", "vocab_cross_entropy") and _covers(node, 2, axis, mesh):
        return _type_vocabulary(node, name, layouts)
    return _type_operation(node, layouts, copies, axis)


def _type_conversion(node: fx.Node, layouts: dict[fx.Node, Layout], conversion: Conversion, mesh: Mesh) -> Layout:
    operand = node.args[0]
    have = layouts[operand]
    if have.letter != conversion.before:
        raise Mismatch(f"{op_name(node.target)} takes {conversion.before}, but {operand.name} is {have}")
    if "S" not in (conversion.before, conversion.after):
        return Layout(conversion.after)
    dim = int(argument(node, 2, "dim")) % len(dims_of(operand))
    factors = leaves(dims_of(operand)[dim])
    if conversion.before == "S":
        if not is_whole_dim(factors, have.factor) or times(dims_of(operand), have.factor) > 1:
            raise Mismatch(f"dim {dim} of {operand.name} is not the sharded factor alone")
        _check_gathered_size(node, operand.meta["value"].shape[dim], mesh)
        return Layout(conversion.after)
    if len(factors) != 1 or factors[0].segments:
        raise Mismatch(f"dim {dim} of {operand.name} is several factors: a shard of it is not contiguous")
    if times(dims_of(operand), factors[0]) > 1:
        raise Mismatch(f"dim {dim} of {operand.name} counts the same as another of its dims")
    return sharded(factors[0])


def _check_gathered_size(node: fx.Node, length: Dim, mesh: Mesh) -> None:
    """Unequal shards cannot be joined without the global length."""
    size = argument(node, 3, "size")
    ranks = prod(mesh.sizes[axis] for axis in mesh.atomic(node.args[1].name))
    if size not in (None, length) or (size is None and isinstance(length, int) and length % ranks):
        raise Mismatch(f"{op_name(node.target)} joins a dim of {length} over {ranks} ranks with size={size}")


def _type_other_axis(node: fx.Node, have: Layout) -> Layout:
    """A conversion over one axis changes nothing on another, unless both split the dim that it joins or cuts."""
    dim = argument(node, 2, "dim")
    if have.letter == "S" and dim is not None and splits(dims_of(node.args[0])[int(dim)], have.factor):
        raise Mismatch(f"dim {dim} of {node.args[0].name} is sharded over another axis too")
    return have


def _type_vocabulary(node: fx.Node, name: str, layouts: dict[fx.Node, Layout]) -> Layout:
    is_embedding = name == "vocab_embedding"
    other, table = (node.args[0], node.args[1]) if is_embedding else (node.args[1], node.args[0])
    have, dim = layouts[table], 0 if is_embedding else 1
    if have.letter != "S" or leaves(dims_of(table)[dim]) != [have.factor]:
        raise Mismatch(f"{name} takes a table sharded along the vocabulary, but {table.name} is {have}")
    if layouts[other].letter not in "IR":
        raise Mismatch(f"{name} takes whole ids, but {other.name} is {layouts[other]}")
    if node.args[3] != table.meta["value"].shape[dim]:
        raise Mismatch(f"{name} is told of {node.args[3]} words, but {table.name} has {table.meta['value'].shape[dim]}")
    return P if is_embedding else I


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
    made = next((factor for factor in copies if makes_copies(node, factor)), None)
    return sharded(made) if made is not None and result == R else result


def _type_sharded(node: fx.Node, operands: list[fx.Node], layouts: dict[fx.Node, Layout], axis: str) -> Layout:
    factors = {layouts[o].factor for o in operands if layouts[o].letter == "S"}
    if len(factors) > 1:
        raise Mismatch("operands are sharded differently: " + ", ".join(f"{o.name} is {layouts[o]}" for o in operands))
    (factor,) = factors
    if contains(node.meta.get("whole", ()), factor):
        raise Mismatch(f"{op_name(node.target)} needs all of a dim that is sharded over {axis}")
    results = result_dims(node)
    for dims in (*map(dims_of, operands), *results):
        _check_once(dims, factor, axis)
    kept = [dim_of(dims, factor) is not None for dims in results]
    summed = rule_of(node).summed and not any(kept)
    for operand in operands:
        _check_beside_shard(node, operand, factor, layouts[operand], summed)
    if all(kept):
        return sharded(factor)
    if summed:
        return P
    raise Mismatch(f"{op_name(node.target)} loses the sharded factor of size {factor.size}")


def _check_once(dims: Dims, factor: Factor, axis: str) -> None:
    """A shard is a part of one dim: of scores (rows, columns) that count the same it would be a diagonal block."""
    count = times(dims, factor)
    if count > 1:
        raise Mismatch(f"a factor that is sharded over {axis} occurs {count} times in one value")
    if count and dim_of(dims, factor) is None:
        raise Mismatch(f"a factor that is sharded over {axis} lies in some of a dim's segments only")


def _check_beside_shard(node: fx.Node, operand: fx.Node, factor: Factor, have: Layout, summed: bool) -> None:
    if dim_of(dims_of(operand), factor) is not None:
        if have.letter != "S":
            raise Mismatch(f"{operand.name} is {have} and must be sharded like the other operands")
    elif op_name(node.target) == "linear" and operand is argument(node, 2, "bias") and summed:
        if have != P:
            raise Mismatch(f"the bias {operand.name} would be added once a rank")
    elif have.letter == "P" or (have.letter == "I" and operand.meta["value"].requires_grad):
        raise Mismatch(f"{operand.name} is {have} beside a sharded operand and must be R: its gradient is partial")


def _type_partial(node: fx.Node, operands: list[fx.Node], layouts: dict[fx.Node, Layout]) -> Layout:
    rule = rule_of(node)
    how = rule.linear if rule else ""
    partial = [o for o in operands if layouts[o].letter == "P"]
    others = [o for o in operands if o not in partial]
    if how == "each":
        if not others and not _adds_number(node):
            return P
        raise Mismatch(f"{op_name(node.target)} adds something whole to the partial sum {partial[0].name}")
    alone = _uses(node, partial[0]) == 1 and len(partial) == 1
    passes = alone and (how == "one" or (how == "first" and node.args[0] is partial[0])) and not _has_bias(node)
    if passes and all(layouts[o].letter == "R" or not o.meta["value"].requires_grad for o in others):
        return P
    raise Mismatch(f"the partial sum {partial[0].name} enters {op_name(node.target)} before it is reduced")


def _adds_number(node: fx.Node) -> bool:
    """Whether `add` or `sub` adds a plain number, which would count once a rank."""
    return op_name(node.target) in ("add", "sub") and any(isinstance(a, (int, float)) for a in node.args)


def _has_bias(node: fx.Node) -> bool:
    return op_name(node.target) == "linear" and argument(node, 2, "bias") is not None


def _uses(node: fx.Node, operand: fx.Node) -> int:
    """How often an operand stands among the arguments: x * x is not linear in x."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found.count(operand)
