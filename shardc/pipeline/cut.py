"""Cut a model into pipeline stages: one self-contained graph a stage, joined by the values that carry gradients."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import networkx as nx
from torch import fx

from shardc.capture.blocks import remove_dead_nodes
from shardc.capture.graph import Call, ModelGraph, Repeat, Value, block_input, repeat_block
from shardc.capture.symbols import B, Dim, S, ShardSize, Size
from shardc.errors import ShardcError
from shardc.pipeline.units import Unit, body_outputs, outline


def cut(model: ModelGraph, first_blocks: list[str]) -> list[ModelGraph]:
    """The stages of a model; `first_blocks[k]` is the path of the block that begins stage k + 1.

    Before: any ModelGraph, sharded or not. After: what stage k sends, its `outputs`, stage k + 1 has among its
    `inputs`, by name and in order: exactly the values that require grad and are not parameters. All else is rebuilt
    from the batch in each stage that needs it. A value that a later stage needs passes through the stages between.
    Raises ShardcError for a path that is not a block, or out of order.
    """
    units = outline(model)
    stage_of = _assign_stages(units, _check_paths(model, units, first_blocks))
    boundary = _Boundary(units, stage_of)
    num_stages = len(first_blocks) + 1
    kept: list[list[Unit]] = [[] for _ in range(num_stages)]
    received: list[list[fx.Node]] = [[] for _ in range(num_stages)]
    wanted: Iterable[fx.Node] = model.outputs.values()
    for stage in reversed(range(num_stages)):
        kept[stage], received[stage] = boundary.needs(stage, wanted)
        wanted = received[stage]

    bodies = {u.block.instance: u.nodes for u in units if u.block and u.nodes[0].target is not repeat_block}
    names = _name_received(units, stage_of, bodies, received, model.inputs)
    stages = []
    for stage in range(num_stages):
        builder = _StageBuilder(model, bodies)
        for value in received[stage]:
            builder.receive(value, names[stage][value])
        for unit in kept[stage]:
            builder.add(unit)
        is_last = stage + 1 == num_stages
        outputs = model.outputs if is_last else {names[stage + 1][value]: value for value in received[stage + 1]}
        stages.append(builder.finish(outputs))
    return stages


def block_paths(model: ModelGraph) -> list[str]:
    """Paths of all blocks in the order in which they run: where a stage can begin."""
    return _paths(outline(model))


def _paths(units: list[Unit]) -> list[str]:
    return [unit.block.instance for unit in units if unit.block]


def _check_paths(model: ModelGraph, units: list[Unit], first_blocks: list[str]) -> list[str]:
    blocks = _paths(units)
    valid = f"blocks: {blocks[0]} to {blocks[-1]}" if blocks else "the model has no blocks"
    advice = "a stage begins at a whole block; give the path of one, in model order"
    for path in first_blocks:
        if path not in blocks:
            block = next((b for b in blocks if path.startswith(b + ".")), None)
            where = f"is inside the block {block}" if block else "is not a block of this model"
            raise ShardcError(f"cut at {path!r} {where}; {valid}", advice)
    for before, after in pairwise(first_blocks):
        if blocks.index(before) >= blocks.index(after):
            raise ShardcError(f"cuts {before!r}, {after!r} do not follow the order of the model; {valid}", advice)
    return first_blocks


def _assign_stages(units: list[Unit], first_blocks: list[str]) -> dict[Unit, int]:
    """Stage of each unit: a stage ends where the next one's first block begins."""
    starts = {path: stage for stage, path in enumerate(first_blocks, start=1)}
    stage = 0
    stage_of = {}
    for unit in units:
        if unit.block:
            stage = starts.get(unit.block.instance, stage)
        stage_of[unit] = stage
    return stage_of


class _Boundary:
    """Decides for each value that a later stage needs whether it is sent there or computed there again."""

    def __init__(self, units: list[Unit], stage_of: dict[Unit, int]):
        self.units = units
        self.stage_of = stage_of
        self.maker = {node: unit for unit in units for node in unit.nodes}
        self.order = {node: i for i, node in enumerate(self.maker)}
        self.costly: set[Unit] = set()  # computing it again would run a block again
        for unit in units:
            if unit.block or any(self.maker[x] in self.costly and not _requires_grad(x) for x in unit.inputs):
                self.costly.add(unit)

    def crosses(self, value: fx.Node, stage: int) -> bool:
        """Whether `stage` receives the value: an earlier stage makes it, and it carries a gradient.

        The output of frozen blocks carries none, but is sent as well: the batch alone does not give it."""
        maker = self.maker[value]
        if self.stage_of[maker] >= stage or value.op == "placeholder":
            return False
        return _requires_grad(value) or maker in self.costly

    def needs(self, stage: int, wanted: Iterable[fx.Node]) -> tuple[list[Unit], list[fx.Node]]:
        """What `stage` computes (in order) and receives, so as to have the values `wanted`."""
        graph = nx.DiGraph()
        received = {value for value in wanted if self.crosses(value, stage)}
        roots = {self.maker[value] for value in wanted} - {self.maker[value] for value in received}
        graph.add_nodes_from(roots)
        for unit in self.units:
            graph.add_edges_from((self.maker[x], unit) for x in unit.inputs if not self.crosses(x, stage))
        needed = roots.union(*(nx.ancestors(graph, root) for root in roots))
        received |= {x for unit in needed for x in unit.inputs if self.crosses(x, stage)}
        return [unit for unit in self.units if unit in needed], sorted(received, key=self.order.__getitem__)


def _requires_grad(node: fx.Node) -> bool:
    value: Value | None = node.meta.get("value")
    return value is not None and value.requires_grad


def _name_received(
    units: list[Unit],
    stage_of: dict[Unit, int],
    bodies: dict[str, tuple[fx.Node, ...]],
    received: list[list[fx.Node]],
    batch: Iterable[str],
) -> list[dict[fx.Node, str]]:
    """A name for each value that each stage receives: the author's name for it as an argument of its next block."""
    uses = [(stage_of[unit], *use) for unit in units if unit.block for use in _argument_names(unit, bodies)]
    names: list[dict[fx.Node, str]] = []
    for stage, values in enumerate(received):
        here: dict[fx.Node, str] = {}
        for value in values:
            source = value.meta.get("source")
            named = (name for at, actual, name in uses if actual is value and at >= stage)
            wish = next(named, None) or (source and source.name) or value.name
            here[value] = _unused(wish, {*batch, *here.values()})
        names.append(here)
    return names


def _argument_names(unit: Unit, bodies: dict[str, tuple[fx.Node, ...]]) -> list[tuple[fx.Node, str]]:
    """(value, name of the parameter of the block's forward that takes it), where it is passed by itself."""
    formals = [node for node in bodies[unit.block.representative] if node.target is block_input]
    node = unit.nodes[0]
    actuals = node.args[1:] if node.target is repeat_block else [formal.args[0] for formal in formals]
    names = [formal.meta["call"].argument_names.get(formal) for formal in formals]
    return [(actual, name) for actual, name in zip(actuals, names, strict=True) if name]


def _unused(name: str, taken: set[str]) -> str:
    return next(n for n in (name, *(f"{name}_{i}" for i in range(1, len(taken) + 1))) if n not in taken)


class _StageBuilder:
    """Copies units of the model into the graph of one stage."""

    def __init__(self, model: ModelGraph, bodies: dict[str, tuple[fx.Node, ...]]):
        self.model = model
        self.bodies = bodies
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.body_copies: dict[Repeat, dict[fx.Node, fx.Node]] = {}  # by the block that represents its kind here
        self.several: dict[fx.Node, list[fx.Node]] = {}  # repeat with several outputs -> those of its body's copy
        self.parameters: dict[str, fx.Node] = {}
        self.calls: dict[tuple[Call, Repeat | None], Call] = {}
        self.representatives: dict[str, Repeat] = {}  # path in the model -> the block that represents its kind here
        self.blocks: dict[str, list[str]] = {}

    def receive(self, value: fx.Node, name: str) -> None:
        """Adds an input that the previous stage sends."""
        node = self.graph.placeholder(name)
        root = value.meta["call"].chain()[0]
        node.meta.update(value=value.meta["value"], call=self._call(root, None), source=None)
        self.copies[value] = node

    def add(self, unit: Unit) -> None:
        """Adds a unit: a node, a block's body if it is the first of its kind here, else a repeat of that one."""
        node = unit.nodes[0]
        if unit.block is None:
            if node.target is operator.getitem and node.args[0] in self.several:
                self.copies[node] = self.several[node.args[0]][node.args[1]]
            else:
                self.copies[node] = self._copy(node, None)
            return
        kind, path = unit.block.representative, unit.block.instance
        if kind in self.representatives:
            here = self.representatives[kind].instance
            self.blocks[here].append(path)
            actuals = [self._operand(x, node.meta["call"], None) for x in node.args[1:]]
            self.copies[node] = self._make(node, (Repeat(here, path), *actuals), {}, None)
            return
        self.representatives[kind] = unit.block
        self.blocks[path] = [path]
        outputs = self._copy_body(unit)
        if node.target is repeat_block and len(outputs) == 1:
            self.copies[node] = outputs[0]
        elif node.target is repeat_block:
            self.several[node] = outputs
        else:
            self.copies |= self.body_copies[unit.block]

    def _copy_body(self, unit: Unit) -> list[fx.Node]:
        """Copies the body of the unit's kind under the unit's own names; returns its outputs."""
        block = unit.block
        body = self.bodies[block.representative]
        copies = self.body_copies[block] = {}
        actuals = iter(unit.nodes[0].args[1:]) if unit.nodes[0].target is repeat_block else None
        for node in body:
            if node.target is block_input:
                actual = node.args[0] if actuals is None else next(actuals)
                operand = self._operand(actual, node.meta["call"], None)
                copies[node] = self._make(node, (operand,), {}, block)
            else:
                copies[node] = self._copy(node, block)
        return [copies[node] for node in body_outputs(body, block.representative)]

    def _copy(self, node: fx.Node, block: Repeat | None) -> fx.Node:
        def load(operand: fx.Node) -> fx.Node:
            return self._operand(operand, node.meta["call"], block)

        return self._make(node, fx.node.map_arg(node.args, load), fx.node.map_arg(node.kwargs, load), block)

    def _make(self, node: fx.Node, args: tuple, kwargs: dict, block: Repeat | None) -> fx.Node:
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = {**node.meta, "call": self._call(node.meta["call"], block)}
        return new

    def _operand(self, node: fx.Node, user: Call, block: Repeat | None) -> fx.Node:
        """The copy of an operand; a parameter is read where it is first used, under the name that it has in `block`."""
        if node.op != "get_attr":
            inside = self.body_copies[block] if block else {}
            return inside[node] if node in inside else self.copies[node]
        name = block.rename(node.target) if block else node.target
        if name not in self.parameters:
            new = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
            new.meta = {**node.meta, "call": self._call(user, block)}
            self.parameters[name] = new
        return self.parameters[name]

    def _call(self, call: Call, block: Repeat | None) -> Call:
        """This stage's copy of a module call; inside a block, with the path that it has there."""
        if block and all(c.path != block.representative for c in call.chain()):
            block = None
        key = (call, block)
        if key not in self.calls:
            parent = call.parent and self._call(call.parent, block)
            self.calls[key] = Call(_renamed(call.path, block), call.module_class, parent)
        return self.calls[key]

    def finish(self, outputs: dict[str, fx.Node]) -> ModelGraph:
        """The stage's ModelGraph with these outputs; what none of them needs is dropped."""
        made = {name: self.copies[value] for name, value in outputs.items()}
        self.graph.output(tuple(made.values()))
        for (call, block), copy in self.calls.items():
            copy.argument_names |= {
                new: name for old, name in call.argument_names.items() if (new := self._find(old, block)) is not None
            }
        remove_dead_nodes(self.graph)
        for node in [node for node in self.graph.nodes if node.op == "placeholder" and not node.users]:
            self.graph.erase_node(node)
        self._add_size_sources()
        inputs = {node.target: node for node in self.graph.nodes if node.op == "placeholder"}
        alive = set(self.graph.nodes)
        for call in self.calls.values():
            for node in [node for node in call.argument_names if node not in alive]:
                del call.argument_names[node]
        used = parameter_names(self.graph, self.blocks)
        parameters = {name: p for name, p in self.model.parameters.items() if name in used}
        constants = {name: x for name, x in self.model.constants.items() if name in used}
        return ModelGraph(self.graph, inputs, made, parameters, constants, self.blocks, self.model.module_classes)

    def _find(self, node: fx.Node, block: Repeat | None) -> fx.Node | None:
        if node.op == "get_attr":
            return self.parameters.get(block.rename(node.target) if block else node.target)
        return self.body_copies.get(block, {}).get(node) or self.copies.get(node)

    def _add_size_sources(self) -> None:
        """Gives the stage a batch tensor for each of B and S that it mentions and that none of its inputs shows."""
        mentioned: set[Dim] = set()
        shown: set[Dim] = set()

        def note(item: Any) -> Any:
            if isinstance(item, (Size, ShardSize)):
                mentioned.add(item)
            if isinstance(item, Size) and isinstance(item.offset, Size):
                mentioned.add(item.offset)
            return item

        last_placeholder = None
        for node in self.graph.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), note)
            if node.op == "placeholder":
                shown.update(node.meta["value"].shape)
                last_placeholder = node
        sizes = [dim.size if isinstance(dim, ShardSize) else dim for dim in mentioned - shown]
        sizes = [size for size in sizes if isinstance(size, Size)]
        for symbol, is_needed in ((B, any(s.batch for s in sizes)), (S, any(s.seq for s in sizes))):
            if is_needed and symbol not in shown:
                source = next(x for x in self.model.inputs.values() if symbol in x.meta["value"].shape)
                with self.graph.inserting_after(last_placeholder):
                    last_placeholder = self._copy(source, None)
                shown.update(source.meta["value"].shape)


def _renamed(path: str, block: Repeat | None) -> str:
    if block is None:
        return path
    return block.instance if path == block.representative else block.rename(path)


def parameter_names(graph: fx.Graph, blocks: dict[str, list[str]]) -> set[str]:
    """Names of all parameters and buffers that a graph reads, those of repeated blocks included."""
    names = {node.target for node in graph.nodes if node.op == "get_attr"}
    repeats = [Repeat(path, instance) for path, instances in blocks.items() for instance in instances[1:]]
    return names | {repeat.rename(name) for repeat in repeats for name in _read_in(graph, repeat.representative)}


def _read_in(graph: fx.Graph, path: str) -> set[str]:
    return {
        operand.target
        for node in graph.nodes
        if node.op == "call_function" and any(call.path == path for call in node.meta["call"].chain())
        for operand in node.all_input_nodes
        if operand.op == "get_attr"
    }
