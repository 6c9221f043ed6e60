"""Give every value its layouts, and put a conversion on each edge whose ends would disagree.

Before: a captured graph with factors, and marks. After: the same graph with conversion nodes, `meta["layouts"]` (axis
-> Layout) on every value, sharded embeddings and losses replaced by their parallel versions, and for each parameter the
axes over which its gradient is partial. Only the conversions that belong to a role are inserted.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.capture.graph import ModelGraph, block_input, block_output, op_name, repeat_block
from shardc.capture.symbols import Axis
from shardc.errors import ShardcError
from shardc.policy import Rule
from shardc.runtime.layers import vocab_cross_entropy, vocab_embedding
from shardc.sharding.decide import Decider
from shardc.sharding.factors import dim_of, is_whole_dim, leaves
from shardc.sharding.insert import Conversions, is_library
from shardc.sharding.layout import FREE, I, Layouts, R, same_layouts, sharded
from shardc.sharding.mark import Marks
from shardc.sharding.rules import argument, dims_of, draws, rule_of, set_dims, tensors

Partial = dict[str, list[str]]  # parameter -> axes over which its gradient is a partial sum


def propagate(model: ModelGraph, marks: Marks, roles: dict[str, Rule], *, sequence_parallel: bool) -> Partial:
    """See the module docstring; returns the parameters whose gradient is to be summed once after backward.

    roles: module path -> its rule. Raises ShardcError naming module and source line.
    """
    return _Propagator(model, marks, roles, sequence_parallel).run()


class _Propagator:
    def __init__(self, model: ModelGraph, marks: Marks, roles: dict[str, Rule], sequence_parallel: bool):
        self.model, self.graph = model, model.graph
        self.marks, self.mesh = marks, marks.mesh
        self.sequence = leaves(dims_of(model.inputs["input_ids"])[1])[0] if sequence_parallel else None
        self.decider = Decider(marks, roles, self.sequence)
        self.conversions = Conversions(model, marks.mesh)
        self.demands: dict[fx.Node, dict[str, dict[str, list[fx.Node]]]] = {}  # free value -> axis -> letter -> users
        self.inputs: dict[str, list[fx.Node]] = {}
        self.outputs: dict[str, list[fx.Node]] = {}

    def run(self) -> Partial:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                node.meta["layouts"] = dict.fromkeys(self.mesh.axes, I)
            elif node.op == "get_attr":
                node.meta["layouts"] = self._parameter(node)
            elif node.target is repeat_block:
                self._repeat(node)
            elif node.op == "call_function":
                self._operation(node)
        partial = self._settle_free_values()
        self.conversions.place()
        return partial

    # -- one node -----------------------------------------------------------------------------------------------------
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
        node.meta["layouts"] = self._decide(node)
        self._mark_random(node)
        if op_name(node.target) == "cross_entropy":
            self._replace_loss(node)
        if any(layout.letter == "P" for layout in node.meta["layouts"].values()):
            self._reduce(node)
        if node.target is block_input:
            self.inputs.setdefault(node.meta["call"].path, []).append(node)
        elif node.target is block_output:
            self.outputs.setdefault(node.meta["call"].path, []).append(node)

    def _decide(self, node: fx.Node) -> Layouts:
        """The layouts of the result; what the operands must become for it is noted."""
        wanted: dict[fx.Node, Layouts] = {operand: {} for operand in tensors(node)}
        result: Layouts = {}
        for axis in self.mesh.axes:
            decision = self.decider.decide(node, axis)
            result[axis] = decision.result
            for operand, layout in decision.needs.items():
                wanted[operand][axis] = layout
            if decision.copies:
                node.meta["shards_copies"] = (*node.meta.get("shards_copies", ()), axis)
        for operand, layouts in wanted.items():
            self._require(operand, layouts, node)
        return result

    def _require(self, operand: fx.Node, wanted: Layouts, user: fx.Node) -> None:
        have = operand.meta["layouts"]
        # What enters a parallel region is converted even where no gradient returns from it: behind frozen embeddings
        # the first block then reads like the others.
        enters = user.meta["call"].path in self.decider.roles and operand.op != "get_attr"
        has_gradient = operand.meta["value"].requires_grad or enters
        change: Layouts = {}
        for axis, layout in wanted.items():
            if have[axis] is FREE:
                letters = self.demands.setdefault(operand, {}).setdefault(axis, {})
                letters.setdefault("R" if layout == R else "I", []).append(user)
                if layout.letter == "S":
                    change[axis] = layout
            elif not same_layouts({axis: have[axis]}, {axis: layout}, has_gradient):
                change[axis] = layout
        if change:
            self.conversions.request(operand, change, user)

    def _mark_random(self, node: fx.Node) -> None:
        rule = rule_of(node)
        if rule is not None and rule.random and draws(node):
            axes = tuple(axis for axis, layout in node.meta["layouts"].items() if layout.letter == "S")
            if axes:
                node.meta["rng_axis"] = Axis(self.mesh.name(axes))

    # -- partial sums -------------------------------------------------------------------------------------------------
    def _reduce(self, node: fx.Node) -> None:
        """Reduce a partial sum where it is made: to I, or to a shard of the sequence. A bias is added after it."""
        axes = tuple(axis for axis, layout in node.meta["layouts"].items() if layout.letter == "P")
        bias = self._take_bias(node)
        if op_name(node.target) == "embedding":
            self._replace_embedding(node, axes)
        dim = self._sequence_dim(node) if axes == self.mesh.axes else None
        target = I if dim is None else sharded(self.sequence)
        call, users = node.meta["call"], list(node.users)
        goes_on = bias is not None or any(user.meta.get("call") is call for user in users)
        home = call if goes_on or not is_library(call.module_class) else call.parent
        last = self.conversions.insert(node, axes, target, dim, home, lambda: self.graph.inserting_after(node))
        if bias is not None:
            last = self._add_bias(node, last, bias)
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
                users[:] = [user for user in users if user is not node]
        return bias

    def _add_bias(self, node: fx.Node, reduced: fx.Node, bias: fx.Node) -> fx.Node:
        layouts = reduced.meta["layouts"]
        with self.graph.inserting_after(reduced):
            total = self.graph.call_function(torch.add, (reduced, bias))
        total.meta.update(
            call=node.meta["call"], source=node.meta["source"], value=node.meta["value"], layouts=dict(layouts)
        )
        set_dims(total, dims_of(node))
        self._require(bias, {axis: R if layout.letter == "S" else I for axis, layout in layouts.items()}, total)
        return total

    def _replace_embedding(self, node: fx.Node, axes: tuple[str, ...]) -> None:
        padding = argument(node, 2, "padding_idx")
        size = node.args[1].meta["value"].shape[0]
        node.target = vocab_embedding
        node.args = (node.args[0], node.args[1], Axis(self.mesh.name(axes)), size)
        node.kwargs = {"padding_idx": padding} if padding is not None else {}

    def _replace_loss(self, node: fx.Node) -> None:
        """Logits of a sharded vocabulary are never gathered: the loss reduces over the axis itself."""
        logits, target = node.args[:2]
        layouts, dims = logits.meta["layouts"], dims_of(logits)
        axes = tuple(a for a, layout in layouts.items() if layout.letter == "S" and dim_of(dims, layout.factor) == 1)
        if axes:
            node.target = vocab_cross_entropy
            node.args = (logits, target, Axis(self.mesh.name(axes)), logits.meta["value"].shape[1])

    # -- parameters ---------------------------------------------------------------------------------------------------
    def _settle_free_values(self) -> Partial:
        """Give each parameter-only value the letter that all its users need; where they differ, convert it for some."""
        layouts_of = {node: node.meta["layouts"] for node in self.graph.nodes if "layouts" in node.meta}
        free = [n for n, layouts in layouts_of.items() if isinstance(layouts, dict) and FREE in layouts.values()]
        for axis in self.mesh.axes:
            self._settle_axis([node for node in free if node.meta["layouts"][axis] is FREE], axis)
        partial: Partial = {}
        for node in free:
            axes = [axis for axis, layout in node.meta["layouts"].items() if layout == R]
            if node.op == "get_attr" and axes:
                partial[node.target] = axes
        self._add_repeats(partial)
        return partial

    def _settle_axis(self, free: list[fx.Node], axis: str) -> None:
        for node in reversed(free):
            asked = {letter: users for letter, users in self.demands.get(node, {}).get(axis, {}).items() if users}
            passed_on = {user.meta["layouts"][axis].letter for user in node.users if user in free}
            all_partial = {*asked, *passed_on} == {"R"}
            node.meta["layouts"][axis] = R if all_partial else I
            if not all_partial:
                for user in asked.get("R", ()):
                    self.conversions.request(node, {axis: R}, user)

    def _add_repeats(self, partial: Partial) -> None:
        """A repeated block's parameters have the gradients of its representative's."""
        for representative, instances in self.model.blocks.items():
            for name in [name for name in partial if name.startswith(representative + ".")]:
                for instance in instances[1:]:
                    partial[instance + name[len(representative) :]] = list(partial[name])
