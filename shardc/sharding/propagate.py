"""Give every value its layouts, and put a conversion on each edge whose ends would disagree.

Before: a captured graph with factors, and marks. After: the same graph with conversion nodes, `meta["layouts"]` (axis
-> Layout) on every value, sharded embeddings and losses replaced by their parallel versions, and for each parameter the
axes over which its gradient is partial. Only the conversions that belong to a role are inserted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from shardc.capture.graph import Call, ModelGraph, block_input, block_output, op_name, repeat_block
from shardc.capture.symbols import Axis
from shardc.errors import ShardcError
from shardc.policy import Rule
from shardc.runtime.layers import vocab_cross_entropy, vocab_embedding
from shardc.sharding.analyse import describe
from shardc.sharding.factors import Factor, contains, dim_of, is_whole_dim, leaves, splits, times
from shardc.sharding.layout import FUNCTION_OF, I, Layout, P, R, same_layouts, sharded
from shardc.sharding.mark import Marks
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import argument, dims_of, draws, result_dims, rule_of, set_dims, tensors

# A value computed from parameters alone: I or R, whichever its users need, so that no activation is reduced for it.
FREE = Layout("free")

Layouts = dict[str, Layout]


@dataclass(slots=True)
class Propagated:
    """partial: parameter -> axes over which its gradient is a partial sum, to be reduced once after backward."""

    partial: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    """Users that need `value` in other layouts than it has."""

    value: fx.Node
    wanted: Layouts
    users: list[fx.Node] = field(default_factory=list)


class _Propagator:
    def __init__(self, model: ModelGraph, marks: Marks, roles: dict[str, Rule], sequence_parallel: bool):
        self.model = model
        self.graph = model.graph
        self.marks = marks
        self.mesh: Mesh = marks.mesh
        self.roles = roles
        self.sequence: Factor | None = None
        if sequence_parallel:
            self.sequence = leaves(dims_of(model.inputs["input_ids"])[1])[0]
        self.requests: dict[tuple, _Request] = {}
        self.demands: dict[fx.Node, dict[str, dict[str, list[fx.Node]]]] = {}  # free value -> axis -> letter -> users
        self.inputs: dict[str, list[fx.Node]] = {}
        self.outputs: dict[str, list[fx.Node]] = {}

    # -- forward pass -------------------------------------------------------------------------------------------------
    def run(self) -> Propagated:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                node.meta["layouts"] = dict.fromkeys(self.mesh.axes, I)
            elif node.op == "get_attr":
                node.meta["layouts"] = self._parameter(node)
            elif node.target is repeat_block:
                self._repeat(node)
            elif node.op == "call_function":
                self._operation(node)
        result = self._settle_free_values()
        self._place_requests()
        return result

    def _parameter(self, node: fx.Node) -> Layouts:
        layouts = {}
        parameter = self.model.parameters[node.target]
        for axis in self.mesh.axes:
            factor = self.marks.layout_factor(dims_of(node), axis)
            if factor is not None and parameter.is_buffer:
                raise ShardcError(
                    f"{node.target}: a buffer would be sharded over {axis}", "mark the module that uses it `replicate`"
                )
            layouts[axis] = sharded(factor) if factor is not None else FREE if parameter.requires_grad else I
        return layouts

    def _repeat(self, node: fx.Node) -> None:
        repeat, *actuals = node.args
        for formal, actual in zip(self.inputs[repeat.representative], actuals, strict=True):
            have, other = actual.meta["layouts"], formal.meta["layouts"]
            if not same_layouts(have, other, actual.meta["value"].requires_grad):
                raise ShardcError(
                    f"{repeat.instance}: its input is {have}, that of {repeat.representative} is {other}",
                    "give the modules around the two blocks equal roles",
                )
        results = [o.meta["layouts"] for o in self.outputs[repeat.representative]]
        node.meta["layouts"] = results[0] if "value" in node.meta else results

    def _operation(self, node: fx.Node) -> None:
        if op_name(node.target) == "getitem" and "value" not in node.args[0].meta:
            results = node.args[0].meta["layouts"]
            node.meta["layouts"] = results[node.args[1]] if isinstance(results, list) else results
            return
        wanted: dict[fx.Node, Layouts] = {operand: {} for operand in tensors(node)}
        result: Layouts = {}
        for axis in self.mesh.axes:
            needs, result[axis] = self._decide(node, axis)
            for operand, layout in needs.items():
                wanted[operand][axis] = layout
        for operand, layouts in wanted.items():
            self._require(operand, layouts, node)
        node.meta["layouts"] = result
        self._mark_random(node)
        if op_name(node.target) == "cross_entropy":
            self._replace_loss(node)
        if "P" in {layout.letter for layout in result.values()}:
            self._reduce(node)
        if node.target is block_input:
            self.inputs.setdefault(node.meta["call"].path, []).append(node)
        elif node.target is block_output:
            self.outputs.setdefault(node.meta["call"].path, []).append(node)

    # -- the decision for one operation and axis ----------------------------------------------------------------------
    def _decide(self, node: fx.Node, axis: str) -> tuple[dict[fx.Node, Layout], Layout]:
        """What each operand must be, and what the result is then."""
        operands = tensors(node)
        have = {o: o.meta["layouts"][axis] for o in operands}
        name = op_name(node.target)
        if (
            name == "embedding"
            and have[node.args[1]].letter == "S"
            and dim_of(dims_of(node.args[1]), have[node.args[1]].factor) == 0
        ):
            return {node.args[1]: have[node.args[1]]}, P
        if (
            name == "cross_entropy"
            and have[node.args[0]].letter == "S"
            and dim_of(dims_of(node.args[0]), have[node.args[0]].factor) == 1
        ):
            return {node.args[0]: have[node.args[0]]}, I
        factor = self._factor(node, axis, have)
        if factor is not None:
            return self._decide_sharded(node, axis, factor, have)
        if node.target is block_input and self._follows_sequence(node):
            return {node.args[0]: sharded(self.sequence)}, sharded(self.sequence)
        if self._enters(node, name):
            return dict.fromkeys(operands, R), R
        if "value" in node.meta and self._is_free(node, have):
            return {}, FREE
        copies = self._copies(node, axis)
        if any(have[o] == R and o.meta["value"].requires_grad for o in operands):
            if copies is not None:
                node.meta["shards_copies"] = (*node.meta.get("shards_copies", ()), axis)
            return {o: R for o in operands if o.meta["value"].requires_grad}, sharded(
                copies
            ) if copies is not None else R
        return {o: I for o in operands if have[o] is FREE or have[o].letter == "S"}, I

    def _is_free(self, node: fx.Node, have: Layouts) -> bool:
        """Whether a value follows from parameters alone, so that all its gradient goes to them."""
        operands = tensors(node)
        follows_batch = not all(isinstance(size, int) for size in node.meta["value"].shape)
        return (
            not follows_batch
            and any(have[o] is FREE for o in operands)
            and all(have[o] is FREE or not o.meta["value"].requires_grad for o in operands)
        )

    def _enters(self, node: fx.Node, name: str) -> bool:
        """Whether a product begins a parallel region on an axis on which its weight is whole: a shared KV head."""
        rule = self.roles.get(node.meta["call"].path)
        return name in ("linear", "matmul", "add") and rule is not None and rule.role == "column"

    def _factor(self, node: fx.Node, axis: str, have: Layouts) -> Factor | None:
        """The factor by which an operation works in shards; the sequence gives way to any other."""
        found = {layout.factor for layout in have.values() if layout.letter == "S"}
        others = found - {self.sequence}
        if len(others) > 1:
            self._refuse(
                node, "operands are sharded along different factors: " + ", ".join(f"{o.name} {have[o]}" for o in have)
            )
        if others:
            return others.pop()
        if not found:
            return None
        return None if self._must_gather(node) else self.sequence

    def _must_gather(self, node: fx.Node) -> bool:
        """Whether an operation takes the sequence whole: a product with a role, scores of all pairs, a view of rows."""
        named = op_name(node.target) in ("linear", "matmul") and node.meta["call"].path in self.roles
        paired = any(times(dims, self.sequence) > 1 for dims in (*map(dims_of, tensors(node)), *result_dims(node)))
        merged = any(
            splits(factors, self.sequence) and not is_whole_dim(factors, self.sequence)
            for dims in result_dims(node)
            for factors in dims
        )
        return named or paired or merged or contains(node.meta.get("whole", ()), self.sequence)

    def _decide_sharded(
        self, node: fx.Node, axis: str, factor: Factor, have: Layouts
    ) -> tuple[dict[fx.Node, Layout], Layout]:
        name = op_name(node.target)
        if rule_of(node) is None:
            self._refuse(
                node,
                f"no rule for {name}, and an operand is sharded over {axis}",
                "write one (CONTRIBUTING.md, An op rule), or mark the module `replicate`",
            )
        needs: dict[fx.Node, Layout] = {}
        for operand in have:
            if dim_of(dims_of(operand), factor) is not None:
                if have[operand].letter == "I" and factor is not self.sequence and operand.meta["value"].requires_grad:
                    self._refuse(
                        node,
                        f"{operand.name} is whole, but {self._origin(factor)} shards it",
                        "mark the module that makes it `column`, or this one `replicate`",
                    )
                needs[operand] = sharded(factor)
            else:
                needs[operand] = R
        kept = all(dim_of(dims, factor) is not None for dims in result_dims(node))
        if contains(node.meta.get("whole", ()), factor):
            self._refuse(node, f"needs all {factor.size} indices that {self._origin(factor)} shards")
        if kept:
            return needs, sharded(factor)
        if not rule_of(node).summed:
            self._refuse(node, f"loses the factor of size {factor.size} that {self._origin(factor)} shards")
        return needs, P

    def _origin(self, factor: Factor) -> str:
        return "sequence parallelism" if factor is self.sequence else self.marks.named_by.get(factor, "the policy")

    def _copies(self, node: fx.Node, axis: str) -> Factor | None:
        """A marked factor that an operation makes by copying (repeated KV heads): each rank makes its own copies."""
        if op_name(node.target) not in ("expand", "repeat_interleave", "repeat"):
            return None
        for factor in self.marks.factors[axis]:
            if dim_of(dims_of(node), factor) is not None and all(
                dim_of(dims_of(o), factor) is None for o in tensors(node)
            ):
                return factor
        return None

    def _follows_sequence(self, node: fx.Node) -> bool:
        if self.sequence is None or not node.meta["value"].requires_grad:
            return False
        dims = dims_of(node)
        return len(dims) > 1 and is_whole_dim(dims[1], self.sequence)

    def _mark_random(self, node: fx.Node) -> None:
        rule = rule_of(node)
        if rule is not None and rule.random and draws(node):
            axes = tuple(a for a in self.mesh.axes if node.meta["layouts"][a].letter == "S")
            if axes:
                node.meta["rng_axis"] = Axis(self.mesh.name(axes))

    def _refuse(self, node: fx.Node, what: str, advice: str = "check the roles of the modules around it") -> None:
        raise ShardcError(f"{describe(node)}: {what}", advice)

    # -- what operands must become ------------------------------------------------------------------------------------
    def _require(self, operand: fx.Node, wanted: Layouts, user: fx.Node) -> None:
        have = operand.meta["layouts"]
        change: Layouts = {}
        for axis, layout in wanted.items():
            if have[axis] is FREE:
                letters = self.demands.setdefault(operand, {}).setdefault(axis, {})
                letters.setdefault("R" if layout == R else "I", []).append(user)
                if layout.letter == "S":
                    change[axis] = layout
            elif have[axis] != layout and not (
                layout.letter in "IR" and not operand.meta["value"].requires_grad and have[axis].letter in "IR"
            ):
                change[axis] = layout
        if change:
            key = (operand, tuple(sorted(change.items(), key=lambda item: item[0])), self._block(user))
            self.requests.setdefault(key, _Request(operand, change)).users.append(user)

    def _block(self, node: fx.Node) -> str | None:
        """The representative block in which a node runs: a conversion for it stays inside."""
        for call in node.meta["call"].chain():
            if call.path in self.model.blocks:
                return call.path
        return None

    # -- partial sums -------------------------------------------------------------------------------------------------
    def _reduce(self, node: fx.Node) -> None:
        """Reduce a partial sum where it is made: to I, or to a shard of the sequence. A bias is added after it."""
        axes = tuple(a for a in self.mesh.axes if node.meta["layouts"][a].letter == "P")
        bias = self._take_bias(node)
        if op_name(node.target) == "embedding":
            self._replace_embedding(node, axes)
        dim = self._sequence_dim(node) if axes == self.mesh.axes else None
        target = I if dim is None else sharded(self.sequence)
        call = node.meta["call"]
        goes_on = bias is not None or any(user.meta.get("call") is call for user in node.users)
        home = call if goes_on or not _is_library(call.module_class) else call.parent
        users = list(node.users)
        after = {**node.meta["layouts"], **dict.fromkeys(axes, target)}
        reduced = self._convert(node, axes, target, dim, home, lambda: self.graph.inserting_after(node), after)
        last = reduced
        if bias is not None:
            with self.graph.inserting_after(reduced):
                last = self.graph.call_function(torch.add, (reduced, bias))
            last.meta.update(call=call, source=node.meta["source"], value=node.meta["value"], layouts=after)
            set_dims(last, dims_of(node))
            self._require(bias, {a: R if target.letter == "S" else I for a in self.mesh.axes}, last)
        for user in users:
            user.replace_input_with(node, last)
        self.model.outputs.update({name: last for name, value in self.model.outputs.items() if value is node})

    def _sequence_dim(self, node: fx.Node) -> int | None:
        if self.sequence is None:
            return None
        return next((d for d, factors in enumerate(dims_of(node)) if is_whole_dim(factors, self.sequence)), None)

    def _take_bias(self, node: fx.Node) -> fx.Node | None:
        """Remove the bias of a linear that gives partial sums, so that it is not added once a rank."""
        if op_name(node.target) != "linear" or argument(node, 2, "bias") is None:
            return None
        bias = node.args[2]
        node.args = (*node.args[:2], None)
        for letters in self.demands.get(bias, {}).values():
            for users in letters.values():
                users[:] = [u for u in users if u is not node]
        return bias

    def _replace_embedding(self, node: fx.Node, axes: tuple[str, ...]) -> None:
        padding = argument(node, 2, "padding_idx")
        size = node.args[1].meta["value"].shape[0]
        node.target = vocab_embedding
        node.args = (node.args[0], node.args[1], Axis(self.mesh.name(axes)), size)
        node.kwargs = {"padding_idx": padding} if padding is not None else {}

    def _replace_loss(self, node: fx.Node) -> None:
        """Logits of a sharded vocabulary are never gathered: the loss reduces over the axis itself."""
        logits, target = node.args[:2]
        axes = tuple(
            a
            for a in self.mesh.axes
            if logits.meta["layouts"][a].letter == "S"
            and dim_of(dims_of(logits), logits.meta["layouts"][a].factor) == 1
        )
        if axes:
            node.target = vocab_cross_entropy
            node.args = (logits, target, Axis(self.mesh.name(axes)), logits.meta["value"].shape[1])

    def _convert(
        self,
        value: fx.Node,
        axes: tuple[str, ...],
        target: Layout,
        dim: int | None,
        home: Call,
        where: Callable,
        after: Layouts,
    ) -> fx.Node:
        before = value.meta["layouts"][axes[0]].letter
        function = FUNCTION_OF.get((before, target.letter))
        if function is None:
            self._refuse(
                value,
                f"is {before} on {self.mesh.name(axes)} but needed as {target.letter}: there is no such conversion",
            )
        kwargs: dict[str, object] = {} if dim is None else {"dim": dim}
        size = None if dim is None else value.meta["value"].shape[dim]
        if before == "S" and isinstance(size, int) and size % self._size(axes):
            kwargs["size"] = size
        with where():
            node = self.graph.call_function(function, (value, Axis(self.mesh.name(axes))), kwargs)
        node.meta.update(call=home, source=None, value=value.meta["value"], layouts=after)
        set_dims(node, dims_of(value))
        return node

    def _size(self, axes: tuple[str, ...]) -> int:
        size = 1
        for axis in axes:
            size *= self.mesh.sizes[axis]
        return size

    # -- after the pass -----------------------------------------------------------------------------------------------
    def _settle_free_values(self) -> Propagated:
        """Give each parameter-only value the letter that all its users need; where they differ, convert it for some."""
        order = [
            n
            for n in self.graph.nodes
            if isinstance(n.meta.get("layouts"), dict) and FREE in n.meta["layouts"].values()
        ]
        result = Propagated()
        for axis in self.mesh.axes:
            free = {n for n in order if n.meta["layouts"][axis] is FREE}
            for node in reversed(order):
                if node not in free:
                    continue
                asked = {letter: users for letter, users in self.demands.get(node, {}).get(axis, {}).items() if users}
                letters = set(asked) | {user.meta["layouts"][axis].letter for user in node.users if user in free}
                node.meta["layouts"][axis] = R if letters == {"R"} else I
                if "R" in asked and letters != {"R"}:
                    for user in asked["R"]:
                        key = (node, ((axis, R),), self._block(user))
                        self.requests.setdefault(key, _Request(node, {axis: R})).users.append(user)
        for node in order:
            if node.op == "get_attr" and self.model.parameters[node.target].requires_grad:
                axes = [a for a in self.mesh.axes if node.meta["layouts"][a] == R]
                if axes:
                    result.partial[node.target] = axes
        self._complete_partial(result)
        return result

    def _complete_partial(self, result: Propagated) -> None:
        """A repeated block's parameters have the gradients of its representative's."""
        for node in self.graph.nodes:
            if node.target is repeat_block:
                repeat = node.args[0]
                for name in [n for n in result.partial if n.startswith(repeat.representative + ".")]:
                    result.partial[repeat.rename(name)] = list(result.partial[name])

    def _place_requests(self) -> None:
        """Insert the conversions, each in the lowest author's call that holds all its users."""
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        for request in self.requests.values():
            users = sorted((u for u in request.users if u in position), key=position.__getitem__)
            if not users:
                continue
            home = _common_call(users)
            first = _first_node_in(self.graph, home, users[0])
            value = request.value
            for target in dict.fromkeys(request.wanted.values()):
                axes = tuple(a for a in self.mesh.axes if request.wanted.get(a) == target)
                for group in self._groups(value, axes):
                    dim = self._conversion_dim(value, group, target)
                    after = {**value.meta["layouts"], **dict.fromkeys(group, target)}
                    value = self._convert(
                        value, group, target, dim, home, lambda first=first: self.graph.inserting_before(first), after
                    )
            for user in users:
                user.replace_input_with(request.value, value)
            if request.value in home.argument_names:
                home.argument_names[value] = home.argument_names[request.value]

    def _groups(self, value: fx.Node, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Axes that one collective covers: those on which the value has the same layout."""
        if axes == self.mesh.axes and len({value.meta["layouts"][a] for a in axes}) == 1:
            return [axes]
        return [(axis,) for axis in axes]

    def _conversion_dim(self, value: fx.Node, axes: tuple[str, ...], target: Layout) -> int | None:
        have = value.meta["layouts"][axes[0]]
        factor = have.factor or target.factor
        if factor is None:
            return None
        dim = dim_of(dims_of(value), factor)
        if dim is None or not is_whole_dim(dims_of(value)[dim], factor):
            self._refuse(
                value, f"cannot be converted from {have} to {target}: the factor of size {factor.size} is part of a dim"
            )
        return dim


def _is_library(module_class: type) -> bool:
    """torch's own layers and transformers' Conv1D are written by name, so nothing can be written inside them."""
    return (
        module_class.__module__.startswith("torch.nn.")
        or module_class.__name__ == "Conv1D"
        or not issubclass(module_class, nn.Module)
    )


def _common_call(users: list[fx.Node]) -> Call:
    chains = [user.meta["call"].chain() for user in users]
    common = chains[0][0]
    for level in zip(*chains, strict=False):
        if len({id(call) for call in level}) > 1:
            break
        common = level[0]
    return common.parent if _is_library(common.module_class) and common.parent else common


def _first_node_in(graph: fx.Graph, home: Call, user: fx.Node) -> fx.Node:
    """The node before which a line of `home` stands, if it is to come before `user`'s item of that call."""
    chain = user.meta["call"].chain()
    below = chain[chain.index(home) + 1 :]
    if not below:
        return user
    return next(node for node in graph.nodes if node.op != "output" and below[0] in node.meta["call"].chain())


def propagate(model: ModelGraph, marks: Marks, roles: dict[str, Rule], *, sequence_parallel: bool) -> Propagated:
    """See the module docstring. roles: module path -> its rule. Raises ShardcError naming module and source line."""
    return _Propagator(model, marks, roles, sequence_parallel).run()
