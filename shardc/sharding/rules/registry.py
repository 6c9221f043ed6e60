"""How an operation is described: which dims belong together, and what each layout may do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from shardc.capture.graph import op_name
from shardc.capture.symbols import WhileTraining
from shardc.sharding.factors import Dims, Factor, dim_of

RelateDims = Callable[[fx.Node], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One record an operation.

    relate: unifies the factors of operands and writes `meta["dims"]` of the result (see `set_dims`).
    summed: a factor that only the operands have is summed over, so a shard of it gives a partial sum (P).
    linear: P may pass: "each" (every operand P: add), "one" (any one operand P, the others R: mul, matmul), "first"
        (the first operand P: div, view), "" (never).
    random: draws random numbers, so a shard must draw its own.
    reads: how many operands it computes with, None for all; the others give a dtype or device only (`type_as`).
    """

    name: str
    relate: RelateDims
    summed: bool = False
    linear: str = ""
    random: bool = False
    reads: int | None = None


RULES: dict[str, Rule] = {}


def rule(
    *names: str, summed: bool = False, linear: str = "", random: bool = False, reads: int | None = None
) -> Callable[[RelateDims], RelateDims]:
    """Register a function as the rule of the operations `names`; a second rule for one name is refused."""

    def register(relate: RelateDims) -> RelateDims:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = Rule(name, relate, summed, linear, random, reads)
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


def result_dims(node: fx.Node) -> list[Dims]:
    """The dims of each result: one, or as many as an operation such as `split` gives."""
    return [dims_of(node)] if "value" in node.meta else node.meta["dims"]


def set_dims(node: fx.Node, dims: Dims) -> None:
    assert len(dims) == len(shape_of(node)), (node.format_node(), dims)
    node.meta["dims"] = dims


def argument(node: fx.Node, index: int, name: str, default: object = None) -> object:
    """An argument given by position or keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor operands that an operation computes with, in order, each once."""
    operands = [n for n in node.all_input_nodes if "value" in n.meta]
    rule = rule_of(node) if node.op == "call_function" else None
    return operands if rule is None or rule.reads is None else operands[: rule.reads]


def makes_copies(node: fx.Node, factor: Factor) -> bool:
    """Whether an operation makes copies that `factor` counts, so that each rank can make its own."""
    if op_name(node.target) not in ("expand", "broadcast_to", "repeat", "repeat_interleave"):
        return False
    return dim_of(dims_of(node), factor) is not None and all(dim_of(dims_of(o), factor) is None for o in tensors(node))


def draws(node: fx.Node) -> bool:
    """Whether a random operation can draw: its probability is not the constant 0."""
    p = argument(node, 1, "p", 0.5) if op_name(node.target) == "dropout" else argument(node, 4, "dropout_p", 0.0)
    return isinstance(p, WhileTraining) or p != 0.0
