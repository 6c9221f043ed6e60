"""Graphs as numbers: two values get the same number exactly if the same operations compute them from the same inputs.

Both sides are looked at for one concrete batch, so that `x.shape[0]` and a captured `B` are the same 2. What does not
change a value is ignored: the order of independent operations, no-ops, blocks held once, keyword against positional.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.capture.fit import Probe
from shardc.capture.graph import ModelGraph, Repeat, Value, block_input, block_output, op_name, repeat_block
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, TRAINING, Axis, ShardSize, Size, WhileTraining
from shardc.emit.expressions import drop_defaults
from shardc.emit.flow import identity_of, is_projection, is_random, target_name
from shardc.runtime.mesh import MeshAxis

_SAME_OP = {"view": "reshape", "float": "to", "long": "to", "bool": "to", "type_as": "to"}
_SHAPED = {"reshape", "expand"}
_NO_GRADIENT = {"detach", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like"}


class Numbers:
    """The numbering that both sides share."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, key: Any) -> int:
        return self._known.setdefault(key, len(self._known))


@dataclass(slots=True)
class Canonical:
    """One graph in numbers. random: (number, on a sharded stream) of each random operation, in order."""

    numbers: dict[fx.Node, int] = field(default_factory=dict)
    all: set[int] = field(default_factory=set)
    outputs: dict[str, int] = field(default_factory=dict)
    random: list[tuple[int, bool, fx.Node]] = field(default_factory=list)


class Canonicaliser:
    """Numbers the nodes of one graph. value_of: concrete shape and dtype. name_of: a parameter's canonical name.

    like_of: equal for nodes that differ in nothing but in which nodes their operands are."""

    def __init__(
        self,
        numbers: Numbers,
        value_of: Callable[[fx.Node], Value | None],
        name_of: Callable[[str], str],
        literal_of: Callable[[Any], Any],
        like_of: Callable[[fx.Node], Any] = lambda node: node,
    ):
        self.numbers = numbers
        self.value_of = value_of
        self.name_of = name_of
        self.literal_of = literal_of
        self.like_of = like_of
        self.recipes: dict[Any, _Recipe] = {}
        self.result = Canonical()

    def run(self, nodes: Iterator[fx.Node] | list[fx.Node], outputs: dict[str, fx.Node]) -> Canonical:
        bodies: dict[str, list[fx.Node]] = {}
        found: dict[fx.Node, tuple[int, bool]] = {}
        nodes = list(nodes)
        representatives = {node.args[0].representative for node in nodes if node.target is repeat_block}
        for node in nodes:
            for call in node.meta["call"].chain() if "call" in node.meta else ():
                if call.path in representatives:
                    bodies.setdefault(call.path, []).append(node)
            if node.target is repeat_block:
                found[node] = self._repeat(node, bodies[node.args[0].representative], found)
            else:
                self._number(node, found, None)
        self.result.numbers = {node: number for node, (number, _) in found.items() if isinstance(number, int)}
        self.result.outputs = {name: found[node][0] for name, node in outputs.items()}
        return self.result

    def _repeat(self, node: fx.Node, body: list[fx.Node], outer: dict) -> Any:
        repeat: Repeat = node.args[0]
        inside = dict(outer)
        actuals = iter(node.args[1:])
        outputs = []
        for inner in body:
            if inner.target is block_input:
                inside[inner] = outer[next(actuals)]
            else:
                self._number(inner, inside, repeat)
                if inner.target is block_output:
                    outputs.append(inside[inner])
        return outputs[0] if len(outputs) == 1 else (outputs, False)

    def _number(self, node: fx.Node, found: dict, repeat: Repeat | None) -> None:
        if node.op == "output":
            return
        if node.op == "placeholder":
            value = self.value_of(node)
            found[node] = (self.numbers.of(("input", node.target)), bool(value and value.requires_grad))
        elif node.op == "get_attr":
            found[node] = self._parameter(node, repeat)
        else:
            found[node] = self._operation(node, found, repeat)
        if isinstance(found[node][0], int):
            self.result.all.add(found[node][0])

    def _parameter(self, node: fx.Node, repeat: Repeat | None) -> tuple[int, bool]:
        name = repeat.rename(node.target) if repeat else node.target
        value = self.value_of(node)
        return self.numbers.of(("parameter", self.name_of(name))), bool(value and value.requires_grad)

    def _operation(self, node: fx.Node, found: dict, repeat: Repeat | None) -> Any:
        if node.target in (block_input, block_output):
            return found[node.args[0]]
        if is_projection(node) and isinstance(found[node.args[0]][0], list):
            return found[node.args[0]][0][node.args[1]]
        like = self.like_of(node)
        recipe = self.recipes.get(like)
        if recipe is None:
            recipe = self.recipes[like] = self._recipe(node)
        operands = _operands(node)
        same = self._identity(node) if recipe.in_context else recipe.same
        if same is not None:
            return found[operands[same]]
        read = [self._parameter(x, repeat) if x.op == "get_attr" else found[x] for x in operands]
        value = self.value_of(node)
        actual = recipe.differentiable and any(needs_grad for _, needs_grad in read)
        if value is not None and not isinstance(self, _FromGraph):
            actual = value.requires_grad
        result = self.numbers.of((recipe.number, tuple([read[i][0] for i in recipe.order]), actual))
        if recipe.draws:
            self.result.random.append((result, "rng_axis" in node.meta, node))
        return result, actual

    def _recipe(self, node: fx.Node) -> _Recipe:
        args, kwargs = self.literal_of(node.args), self.literal_of(node.kwargs)
        name, value, places = op_name(node.target), self.value_of(node), itertools.count()
        floating = value is None or value.dtype.is_floating_point

        def mark(operand: fx.Node) -> Any:
            return _Operand(next(places))

        key = self._key(node, name, fx.node.map_arg(args, mark), fx.node.map_arg(kwargs, mark))
        order: list[int] = []
        return _Recipe(
            number=self.numbers.of(_in_order(key, order)),
            order=tuple(order),
            same=self._identity(node),
            in_context=name in _IN_CONTEXT,
            differentiable=floating and name not in _NO_GRADIENT,
            draws=is_random(node) and _draws(name, args, kwargs),
        )

    def _identity(self, node: fx.Node) -> int | None:
        """Which of its operands a node returns unchanged."""
        same = identity_of(node, self.literal_of(node.args), self.literal_of(node.kwargs), self.value_of)
        return None if same is None else _operands(node).index(same)

    def _key(self, node: fx.Node, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
        name = _SAME_OP.get(name, name)
        value = self.value_of(node)
        if name in _SHAPED and value is not None:
            return (name, args[0], tuple(value.shape))
        if name == "to" and value is not None and not kwargs.keys() - {"dtype", "device", "non_blocking"}:
            return (name, args[0], value.dtype)
        if name == "__get__":
            return (target_name(node), *_plain(args))
        if getattr(node.target, "__module__", "").startswith("shardc.runtime"):
            given = inspect.signature(node.target).bind(*args, **kwargs)
            given.apply_defaults()
            return (name, _plain(tuple(given.arguments.items())))
        if name == "getitem":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return (name, args[0], _plain(tuple(map(_full_slice, index))))
        kwargs = {
            key: x for key, x in drop_defaults(node, name, args, kwargs).items() if not isinstance(x, torch.device)
        }
        args = tuple(x for x in args if not isinstance(x, torch.device))
        names = _argument_names(name, len(args), tuple(kwargs)) if kwargs else ()
        if names:  # keywords of torch's own functions in the order of its schema
            while len(args) < len(names) and names[len(args)] in kwargs:
                args = (*args, kwargs.pop(names[len(args)]))
        while args and args[-1] is None:
            args = args[:-1]
        return (name, _plain(args), _plain(tuple(sorted(kwargs.items()))))


@functools.cache
def _argument_names(name: str, given: int, keywords: tuple[str, ...]) -> tuple[str, ...]:
    """Positional arguments of the first aten overload that takes these keywords after `given` arguments."""
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        names = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
        if set(keywords) <= set(names[given:]):
            return names
    return ()


@dataclass(frozen=True, slots=True)
class _Operand:
    """Stands for an operand in what is said of an operation: the first that is read there is 0."""

    place: int


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What is said of an operation but for its operands. number: of its key. order: in which the key reads them.

    same: the operand that it returns unchanged. in_context: that depends on other nodes too, so ask for each."""

    number: int
    order: tuple[int, ...]
    same: int | None
    in_context: bool
    differentiable: bool
    draws: bool


_IN_CONTEXT = {"expand", "bitwise_and"}


def _operands(node: fx.Node) -> list[fx.Node]:
    """Operands as the arguments list them, each as often as it stands there."""
    found = node.meta.get("operands")
    if found is None:
        found = node.meta["operands"] = []
        fx.node.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


def _in_order(key: Any, order: list[int]) -> Any:
    """The key with its operands counted as it reads them; `order` gets their places among the node's own."""
    if isinstance(key, _Operand):
        order.append(key.place)
        return _Operand(len(order) - 1)
    return tuple([_in_order(x, order) for x in key]) if isinstance(key, tuple) else key


def _full_slice(index: Any) -> Any:
    return slice(None, index.stop, index.step) if isinstance(index, slice) and index.start == 0 else index


def _plain(item: Any) -> Any:
    """Hashable, with 1 and 1.0 and True apart."""
    if isinstance(item, (tuple, list)):
        return tuple(map(_plain, item))
    if isinstance(item, slice):
        return ("slice", _plain(item.start), _plain(item.stop), _plain(item.step))
    if isinstance(item, MeshAxis):
        return ("axis", item.name)
    if isinstance(item, Axis):
        return ("axis", item.name)
    if isinstance(item, _Operand):
        return item
    if isinstance(item, dict):
        return ("dict", tuple((key, _plain(x)) for key, x in item.items()))
    return (type(item).__name__, repr(item))


def _draws(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether this run really draws: dropout does so in training only."""
    if name == "scaled_dot_product_attention":
        return kwargs.get("dropout_p", 0.0) > 0.0
    if name == "dropout":
        return bool(kwargs.get("training", args[2] if len(args) > 2 else True))
    return True


class _FromGraph(Canonicaliser):
    """Numbers a ModelGraph for one probe: its symbols become the probe's numbers."""


def from_graph(graph: ModelGraph, probe: Probe, axis: MeshAxis, numbers: Numbers) -> Canonical:
    def literal(item: Any) -> Any:
        return fx.node.map_aggregate(item, lambda x: concrete(x, probe, axis))

    values: dict[fx.Node, Value | None] = {}

    def value_of(node: fx.Node) -> Value | None:
        if node not in values:
            value = node.meta.get("value")
            values[node] = value and Value(
                literal(tuple(value.shape)), concrete(value.dtype, probe, axis), value.requires_grad
            )
        return values[node]

    outputs = {name: node for name, node in graph.outputs.items() if name != "count"}
    return _FromGraph(numbers, value_of, canonical_name(graph), literal).run(graph.graph.nodes, outputs)


def canonical_name(graph: ModelGraph) -> Callable[[str], str]:
    names = {alias: p.name for p in graph.parameters.values() for alias in (p.name, *p.aliases)}
    return lambda name: names.get(name, name)


def concrete(item: Any, probe: Probe, axis: MeshAxis) -> Any:
    """A symbol's value in one run, on the rank that `axis` says."""
    if isinstance(item, Size):
        return item.at(probe.batch, probe.seq)
    if isinstance(item, ShardSize):
        size = item.size if isinstance(item.size, int) else item.size.at(probe.batch, probe.seq)
        return axis.named(item.axis).shard_size(size)
    if item is MODEL_DTYPE:
        return probe.dtype
    if item is DTYPE_MIN:
        return torch.finfo(probe.dtype).min
    if item is DEVICE:
        return torch.device("meta")
    if item is TRAINING:
        return probe.training
    if isinstance(item, WhileTraining):
        return item.value if probe.training else 0.0
    return item
