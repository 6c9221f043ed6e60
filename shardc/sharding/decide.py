"""What one operation does on one axis: what its operands must be, and what its result is then."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from shardc.capture.graph import block_input, op_name
from shardc.errors import ShardcError
from shardc.policy import Rule
from shardc.policy.types import INSIDE
from shardc.sharding.analyse import describe
from shardc.sharding.factors import Factor, contains, dim_of, is_whole_dim, splits, times
from shardc.sharding.layout import FREE, I, Layout, P, R, sharded
from shardc.sharding.mark import Marks
from shardc.sharding.rules import dims_of, makes_copies, result_dims, rule_of, tensors


@dataclass(frozen=True, slots=True)
class Decision:
    """needs: what operands must be, where that matters. copies: whether each rank makes only its own copies."""

    result: Layout
    needs: dict[fx.Node, Layout] = field(default_factory=dict)
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Decider:
    """sequence: the factor that sequence parallelism shards between the products, None without it."""

    marks: Marks
    roles: dict[str, Rule]
    sequence: Factor | None

    def decide(self, node: fx.Node, axis: str) -> Decision:
        """Read `meta["layouts"]` of the operands. Raises ShardcError naming the module and the operation."""
        operands = tensors(node)
        have = {operand: operand.meta["layouts"][axis] for operand in operands}
        vocabulary = self._vocabulary(node, have)
        if vocabulary is not None:
            return vocabulary
        factor = self._factor(node, have)
        if factor is not None:
            return self._sharded(node, axis, factor, have)
        if node.target is block_input and self._follows_sequence(node):
            return Decision(sharded(self.sequence), {node.args[0]: sharded(self.sequence)})
        if self._enters(node):
            return Decision(R, dict.fromkeys(operands, R))
        if _is_free(node, have):
            return Decision(FREE)
        if any(have[o] == R and o.meta["value"].requires_grad for o in operands):
            return self._partial_gradient(node, axis)
        return Decision(I, {o: I for o in operands if have[o] is FREE or have[o].letter == "S"})

    def _vocabulary(self, node: fx.Node, have: dict[fx.Node, Layout]) -> Decision | None:
        """A lookup in a sharded table gives partial sums; the loss of sharded logits reduces them itself."""
        name = op_name(node.target)
        if name not in ("embedding", "cross_entropy"):
            return None
        table, dim = (node.args[1], 0) if name == "embedding" else (node.args[0], 1)
        if have[table].letter != "S" or dim_of(dims_of(table), have[table].factor) != dim:
            return None
        return Decision(P if name == "embedding" else I, {table: have[table]})

    def _factor(self, node: fx.Node, have: dict[fx.Node, Layout]) -> Factor | None:
        """The factor by which an operation works in shards; the sequence gives way to any other."""
        found = {layout.factor for layout in have.values() if layout.letter == "S"}
        others = found - {self.sequence}
        if len(others) > 1:
            shown = ", ".join(f"{operand.name} {layout}" for operand, layout in have.items())
            refuse(node, f"operands are sharded along different factors: {shown}")
        if others:
            return others.pop()
        return self.sequence if found and not self._must_gather(node) else None

    def _must_gather(self, node: fx.Node) -> bool:
        """Whether an operation takes the sequence whole: a product with a role, scores of all pairs, a view of rows."""
        named = op_name(node.target) in ("linear", "matmul") and node.meta["call"].path in self.roles
        named |= self._is_inside(node)
        paired = any(times(dims, self.sequence) > 1 for dims in (*map(dims_of, tensors(node)), *result_dims(node)))
        merged = any(
            splits(factors, self.sequence) and not is_whole_dim(factors, self.sequence)
            for dims in result_dims(node)
            for factors in dims
        )
        return named or paired or merged or contains(node.meta.get("whole", ()), self.sequence)

    def _sharded(self, node: fx.Node, axis: str, factor: Factor, have: dict[fx.Node, Layout]) -> Decision:
        rule, name, origin = rule_of(node), op_name(node.target), self._origin(factor)
        if rule is None:
            refuse(
                node,
                f"no rule for {name}, and an operand is sharded over {axis}",
                "write one (CONTRIBUTING.md, An op rule), or mark the module `replicate`",
            )
        needs: dict[fx.Node, Layout] = {}
        for operand, layout in have.items():
            if dim_of(dims_of(operand), factor) is None:
                needs[operand] = R
                continue
            if layout.letter == "I" and factor is not self.sequence and operand.meta["value"].requires_grad:
                refuse(
                    node,
                    f"{operand.name} is whole, but {origin} shards it",
                    "mark the module that makes it `column`, or this one `replicate`",
                )
            needs[operand] = sharded(factor)
        if contains(node.meta.get("whole", ()), factor):
            refuse(node, f"needs all {factor.size} indices that {origin} shards")
        if all(dim_of(dims, factor) is not None for dims in result_dims(node)):
            return Decision(sharded(factor), needs)
        if not rule.summed:
            refuse(node, f"loses the factor of size {factor.size} that {origin} shards")
        return Decision(P, needs)

    def _origin(self, factor: Factor) -> str:
        return "sequence parallelism" if factor is self.sequence else self.marks.named_by.get(factor, "the policy")

    def _follows_sequence(self, node: fx.Node) -> bool:
        """Whether a value that enters a block is the residual stream, which sequence parallelism shards."""
        if self.sequence is None or not node.meta["value"].requires_grad:
            return False
        dims = dims_of(node)
        return len(dims) > 1 and is_whole_dim(dims[1], self.sequence)

    def _enters(self, node: fx.Node) -> bool:
        """Whether a product begins a parallel region on an axis on which its weight is whole: a shared KV head."""
        rule = self.roles.get(node.meta["call"].path)
        is_column = op_name(node.target) in ("linear", "matmul", "add") and rule is not None and rule.role == "column"
        return is_column or self._is_inside(node)

    def _is_inside(self, node: fx.Node) -> bool:
        rule = self.roles.get(node.meta["call"].path)
        return rule is not None and rule.role == INSIDE

    def _partial_gradient(self, node: fx.Node, axis: str) -> Decision:
        """Whole values whose gradients are partial; of repeated KV heads each rank makes its own copies."""
        needs = {operand: R for operand in tensors(node) if operand.meta["value"].requires_grad}
        copies = next((factor for factor in self.marks.factors[axis] if makes_copies(node, factor)), None)
        return Decision(R, needs) if copies is None else Decision(sharded(copies), needs, copies=True)


def _is_free(node: fx.Node, have: dict[fx.Node, Layout]) -> bool:
    """Whether a value follows from parameters alone, so that all its gradient goes to them."""
    if "value" not in node.meta or not all(isinstance(size, int) for size in node.meta["value"].shape):
        return False
    free = [layout is FREE for layout in have.values()]
    return any(free) and all(layout is FREE or not o.meta["value"].requires_grad for o, layout in have.items())


def refuse(node: fx.Node, what: str, advice: str = "check the roles of the modules around it") -> None:
    """Raise the error that an operation does not fit the policy."""
    raise ShardcError(f"{describe(node)}: {what}", advice)
