"""Put conversions into a graph: one for all users of a value that need it alike, where the author would write it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod

from torch import fx, nn

from shardc.capture.graph import Call, ModelGraph
from shardc.capture.symbols import Axis
from shardc.sharding.decide import refuse
from shardc.sharding.factors import dim_of, is_whole_dim
from shardc.sharding.layout import FUNCTION_OF, Layout, Layouts
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import dims_of, set_dims


@dataclass(slots=True)
class _Request:
    """Users that need `value` in other layouts than it has."""

    value: fx.Node
    wanted: Layouts
    users: list[fx.Node] = field(default_factory=list)


class Conversions:
    """Collects what users need, then inserts it."""

    def __init__(self, model: ModelGraph, mesh: Mesh):
        self.model, self.graph, self.mesh = model, model.graph, mesh
        self.requests: dict[tuple, _Request] = {}

    def request(self, value: fx.Node, wanted: Layouts, user: fx.Node) -> None:
        """`user` needs `value` in these layouts, on the axes where they differ from what it has."""
        key = (value, tuple(sorted(wanted.items(), key=lambda item: item[0])), self._block(user))
        self.requests.setdefault(key, _Request(value, wanted)).users.append(user)

    def _block(self, node: fx.Node) -> str | None:
        """The representative block in which a node runs: a conversion for it stays inside."""
        return next((call.path for call in node.meta["call"].chain() if call.path in self.model.blocks), None)

    def place(self) -> None:
        """Insert the conversions, each in the lowest author's call that holds all its users."""
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        for request in self.requests.values():
            users = sorted((user for user in request.users if user in position), key=position.__getitem__)
            if users:
                self._place(request, users)

    def _place(self, request: _Request, users: list[fx.Node]) -> None:
        home = _common_call(users)
        first = _first_node_in(self.graph, home, users[0])
        value = request.value
        for target in dict.fromkeys(request.wanted.values()):
            axes = tuple(axis for axis in self.mesh.axes if request.wanted.get(axis) == target)
            for group in self._groups(value, axes):
                dim = self._dim(value, group, target)
                value = self.insert(value, group, target, dim, home, lambda: self.graph.inserting_before(first))
        for user in users:
            user.replace_input_with(request.value, value)
            for call in user.meta["call"].chain():
                if request.value in call.argument_names and home in call.chain():
                    call.argument_names[value] = call.argument_names[request.value]

    def _groups(self, value: fx.Node, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Axes that one collective covers: those on which the value has the same layout."""
        if axes == self.mesh.axes and len({value.meta["layouts"][axis] for axis in axes}) == 1:
            return [axes]
        return [(axis,) for axis in axes]

    def _dim(self, value: fx.Node, axes: tuple[str, ...], target: Layout) -> int | None:
        """The dim that a conversion joins or cuts, None where it does neither."""
        have = value.meta["layouts"][axes[0]]
        factor = have.factor or target.factor
        if factor is None:
            return None
        dim = dim_of(dims_of(value), factor)
        if dim is None or not is_whole_dim(dims_of(value)[dim], factor):
            why = f"the factor of size {factor.size} is part of a dim"
            refuse(value, f"cannot be converted from {have} to {target}: {why}")
        return dim

    def insert(
        self,
        value: fx.Node,
        axes: tuple[str, ...],
        target: Layout,
        dim: int | None,
        home: Call,
        where: Callable[[], AbstractContextManager],
    ) -> fx.Node:
        """The node that converts `value` on `axes` to `target`, as a line of the call `home`."""
        before = value.meta["layouts"][axes[0]].letter
        over = self.mesh.name(axes)
        function = FUNCTION_OF.get((before, target.letter))
        if function is None:
            refuse(value, f"is {before} on {over} but needed as {target.letter}: there is no such conversion")
        kwargs: dict[str, object] = {}
        if dim is not None:
            kwargs["dim"], size = dim, value.meta["value"].shape[dim]
            if before == "S" and isinstance(size, int) and size % prod(self.mesh.sizes[axis] for axis in axes):
                kwargs["size"] = size
        with where():
            node = self.graph.call_function(function, (value, Axis(over)), kwargs)
        after = {**value.meta["layouts"], **dict.fromkeys(axes, target)}
        node.meta.update(call=home, source=None, value=value.meta["value"], layouts=after)
        set_dims(node, dims_of(value))
        return node


def is_library(module_class: type) -> bool:
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
    return common.parent if is_library(common.module_class) and common.parent else common


def _first_node_in(graph: fx.Graph, home: Call, user: fx.Node) -> fx.Node:
    """The node before which a line of `home` stands, if it is to come before `user`'s item of that call."""
    chain = user.meta["call"].chain()
    below = chain[chain.index(home) + 1 :]
    if not below:
        return user
    return next(node for node in graph.nodes if node.op != "output" and below[0] in node.meta["call"].chain())
