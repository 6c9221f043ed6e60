"""Give equal blocks with unequal roles a body each: only blocks that are sharded alike are held once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardc.capture.graph import Call, ModelGraph, Repeat, block_input, block_output, repeat_block
from shardc.policy import Rule


def unfold_unequal_roles(model: ModelGraph, roles: dict[str, Rule]) -> None:
    """Make each `repeat_block` whose roles differ from its representative's a representative of its own, in place.

    Later blocks with the same roles repeat it. After: all instances of a block have the roles of its representative.
    """
    for representative, instances in list(model.blocks.items()):
        groups: dict[tuple, list[str]] = {}
        for instance in instances:
            groups.setdefault(_roles_inside(instance, roles), []).append(instance)
        model.blocks[representative] = groups.pop(_roles_inside(representative, roles))
        for first, *others in groups.values():
            _Unfolding(model, representative, first).run()
            model.blocks[first] = [first, *others]
            _repeat_instead(model, first, set(others))


def _roles_inside(block: str, roles: dict[str, Rule]) -> tuple:
    """Role of each module in a block, by its path below the block."""
    prefix = block + "."
    return tuple(sorted((path[len(prefix) :], rule.role) for path, rule in roles.items() if path.startswith(prefix)))


def _repeat_instead(model: ModelGraph, first: str, instances: set[str]) -> None:
    for node in model.operations():
        if node.target is repeat_block and node.args[0].instance in instances:
            node.args = (Repeat(first, node.args[0].instance), *node.args[1:])


class _Unfolding:
    """Copies the representative's nodes, calls and parameter names in place of one repeat."""

    def __init__(self, model: ModelGraph, representative: str, instance: str):
        self.model = model
        self.repeat = Repeat(representative, instance)
        self.mark = next(
            node for node in model.operations() if node.target is repeat_block and node.args[0] == self.repeat
        )
        self.twins: dict[fx.Node, fx.Node] = {}
        self.calls: dict[Call, Call] = {}

    def run(self) -> None:
        actuals = iter(self.mark.args[1:])
        outputs = []
        for node in self._body():
            if node.op == "get_attr" and self.repeat.rename(node.target) == node.target:
                continue  # a parameter that all blocks share
            args = (next(actuals),) if node.target is block_input else self._copied(node.args)
            with self.model.graph.inserting_before(self.mark):
                twin = self.model.graph.create_node(
                    node.op, self._target(node), args, self._copied(node.kwargs), name=node.name
                )
            self.twins[node] = twin
            twin.meta = {**node.meta, "call": self._call(node.meta["call"])}
            if node.target is block_output:
                outputs.append(twin)
        self._name_arguments()
        self._replace(outputs)

    def _body(self) -> list[fx.Node]:
        return [
            node
            for node in self.model.graph.nodes
            if node.op in ("call_function", "get_attr")
            and node.target is not repeat_block
            and any(call.path == self.repeat.representative for call in node.meta["call"].chain())
        ]

    def _target(self, node: fx.Node) -> Any:
        if node.op != "get_attr":
            return node.target
        name = self.repeat.rename(node.target)
        if node.target in self.model.constants:
            self.model.constants.setdefault(name, self.model.constants[node.target])
        return name

    def _copied(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self.twins.get(node, node))

    def _call(self, call: Call) -> Call:
        """The instance's call of the same module."""
        if call.path == self.repeat.representative:
            self.calls[call] = self.mark.meta["call"]
        elif call not in self.calls:
            path = self.repeat.rename(call.path)
            parent = self._call(call.parent) if call.parent else None
            self.calls[call] = replace(call, path=path, parent=parent, argument_names={})
        return self.calls[call]

    def _name_arguments(self) -> None:
        for old, new in self.calls.items():
            names = {self.twins.get(node): name for node, name in old.argument_names.items()}
            new.argument_names |= {node: name for node, name in names.items() if node is not None}

    def _replace(self, outputs: list[fx.Node]) -> None:
        """Let what used the repeat use the copy."""
        if "value" in self.mark.meta:
            results = {self.mark: outputs[0]}
        else:
            results = {item: outputs[item.args[1]] for item in self.mark.users}
        for old, new in results.items():
            old.replace_all_uses_with(new)
            self.model.outputs.update({name: new for name, node in self.model.outputs.items() if node is old})
        for old in [node for node in results if node is not self.mark] + [self.mark]:
            self.model.graph.erase_node(old)
