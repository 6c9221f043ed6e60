"""How an operation is described: which dims belong together, and what each layout may do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from shardc.capture.graph import op_name
from shardc.sharding.factors import Dims

RelateDims = Callable[[fx.Node], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One record an operation.

    relate: unifies the factors of operands and writes `meta["dims"]` of the result (see `set_dims`).
    summed: a factor that only the operands have is summed over, so a shard of it gives a partial sum (P).
    linear: P may pass: "each" (every operand P: add), "one" (one operand P, the others R: mul, matmul), "" (never).
    random: draws random numbers, so a shard must draw its own.
    """

    name: str
    relate: RelateDims
    summed: bool = False
    linear: str = ""
    random: bool = False


RULES: dict[str, Rule] = {}


def rule(
    *names: str, summed: bool = False, linear: str = "", random: bool = False
) -> Callable[[RelateDims], RelateDims]:
    """Register a function as the rule of the operations `names`; a second rule for one name is refused."""

    def register(relate: RelateDims) -> RelateDims:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = Rule(name, relate, summed, linear, random)
        return relate

    return register


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call; None where nobody has written one."""
    return RULES.get(op_name(node.target))


# -- what rules read and write ---------------------------------------------------------------------------------------
def dims_of(node: fx.Node) -> Dims:
    return node.meta["dims"]


def shape_of(node: fx.Node) -> tuple:
    return node.meta["value"].shape


def set_dims(node: fx.Node, dims: Dims) -> None:
    assert len(dims) == len(shape_of(node)), (node.format_node(), dims)
    node.meta["dims"] = dims


def argument(node: fx.Node, index: int, name: str, default: object = None) -> object:
    """An argument given by position or keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor operands, in order, each once."""
    return [n for n in node.all_input_nodes if "value" in n.meta]
