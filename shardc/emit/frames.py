"""One graph as a tree of module calls: what each call computes, takes and gives, found from the uses of values."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import fx

from shardc.capture.graph import Call, Repeat, block_input, repeat_block
from shardc.emit.author import names_in
from shardc.emit.flow import Flow, is_random, value_of


@dataclass(eq=False, slots=True)
class Op:
    """One operation: a single node, with the getitems of its parts where it returns several tensors."""

    node: fx.Node
    outputs: list[fx.Node]
    operands: list[fx.Node]
    random: bool = False


@dataclass(eq=False, slots=True)
class ChildCall:
    """A call of a child module. actuals: what the caller passes, in the order of the child's formals."""

    path: str
    frame: Frame
    outputs: list[fx.Node] = field(default_factory=list)
    actuals: list[fx.Node] = field(default_factory=list)
    repeat: Repeat | None = None
    node: fx.Node | None = None  # the repeat's
    flag: tuple[str, str] | None = (
        None  # an argument of the emitted forward that tells the module's calls apart, its value
    )

    @property
    def operands(self) -> list[fx.Node]:
        return self.actuals

    @property
    def random(self) -> bool:
        return self.frame.random


Item = Op | ChildCall


@dataclass(eq=False, slots=True)
class Frame:
    """What one call of a module does. formals: values from outside, in the author's order; results: what leaves."""

    flow: Flow
    path: str
    call: Call
    items: list[Item] = field(default_factory=list)
    formals: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    random: bool = False
    parent: Frame | None = None
    added_names: dict[fx.Node, str] = field(default_factory=dict)  # of formals that only show a size, dtype or device
    is_library: bool = False
    rolls_single: bool = False  # a single layer is written as a loop too: stages of any number of layers read alike
    formal_names: list[str] = field(default_factory=list)

    def parameter(self, node: fx.Node) -> str | None:
        """Name, relative to this module, of a parameter; None for other values and for parameters of other modules."""
        if node.op != "get_attr":
            return None
        parameter = self.flow.model.parameters[node.target]
        if not self.path:
            return parameter.name
        for name in (parameter.name, *parameter.aliases):
            if name.startswith(self.path + "."):
                return name[len(self.path) + 1 :]
        return None

    def argument_name(self, node: fx.Node) -> str | None:
        """The author's name of a formal."""
        for key, name in self.call.argument_names.items():
            if self.flow.of(key) is node:
                return name
        return self.added_names.get(node)


class _Builder:
    def __init__(self, flow: Flow, inlined: frozenset[str]):
        self.flow = flow
        self.inlined = inlined
        self.by_call: dict[Call, Frame] = {}
        self.by_path: dict[str, Frame] = {}
        self.op_of: dict[fx.Node, Op] = {}

    def frame(self, call: Call) -> Frame:
        """The frame of a call, opened in its caller's frame when first met; inlined calls belong to their caller."""
        while call.parent is not None and call.path in self.inlined:
            call = call.parent
        found = self.by_call.get(call)
        if found is None:
            found = self.by_call[call] = Frame(self.flow, call.path, call)
            self.by_path.setdefault(call.path, found)
            if call.parent is not None:
                found.parent = self.frame(call.parent)
                found.parent.items.append(ChildCall(call.path, found))
        return found

    def build(self) -> Frame:
        root = None
        for node in self.flow.nodes:
            if root is None:
                root = self.frame(node.meta["call"].chain()[0])
            if node.op != "call_function" or node.target is block_input:
                if node.target is block_input:
                    self.frame(node.meta["call"])
                continue
            if node.target is operator.getitem:
                self._projection(node)
            elif node.target is repeat_block:
                self._repeat(node)
            else:
                frame = self.frame(node.meta["call"])
                op = Op(node, [node] if value_of(node) else [], self.flow.operands(node), is_random(node))
                self.op_of[node] = op
                frame.items.append(op)
        assert root is not None
        return root

    def _projection(self, node: fx.Node) -> None:
        made_by = self.flow.args(node)[0]
        if made_by.target is not repeat_block:
            self.op_of[made_by].outputs.append(node)

    def _repeat(self, node: fx.Node) -> None:
        repeat = node.args[0]
        call = node.meta["call"]
        parent = call.parent if call.path == repeat.instance else call
        frame = self.by_path[repeat.representative]
        self.frame(parent).items.append(
            ChildCall(repeat.instance, frame, [node], list(self.flow.args(node)[1:]), repeat, node)
        )


def build_frames(flow: Flow, inlined: frozenset[str] = frozenset()) -> Frame:
    """The root frame of a graph; calls of the modules in `inlined` become part of their caller's frame."""
    builder = _Builder(flow, inlined)
    root = builder.build()
    _derive_interfaces(root, builder)
    return root


def _derive_interfaces(root: Frame, builder: _Builder) -> None:
    flow = builder.flow
    repeats = _repeat_outputs(flow)
    _find_formals(root, flow)
    root.results = list(flow.outputs.values())
    _find_results(root, set(root.results), flow, repeats)


def _repeat_outputs(flow: Flow) -> dict[fx.Node, list[fx.Node | None]]:
    """Repeat node -> for each output of its block, the node that stands for it in this repeat (None: unused)."""
    found: dict[fx.Node, list[fx.Node | None]] = {}
    for node in flow.nodes:
        if node.target is repeat_block:
            outputs = flow.block_outputs[node.args[0].representative]
            found[node] = [node] if len(outputs) == 1 else [None] * len(outputs)
        elif node.target is operator.getitem and node.args[0] in found:
            found[node.args[0]][node.args[1]] = node
    return found


def _find_formals(frame: Frame, flow: Flow) -> None:
    """Values that the frame or a call in it reads and that are made outside; sets the actuals of its calls as well."""
    made: set[fx.Node] = set()
    used: dict[fx.Node, None] = {}
    for item in frame.items:
        if isinstance(item, ChildCall):
            if item.repeat is None:
                _find_formals(item.frame, flow)
            item.actuals = [actual_of(item, formal, flow) for formal in item.frame.formals]
            frame.random |= item.frame.random
            made.update(_made_in(item.frame) if item.repeat is None else item.outputs)
        else:
            frame.random |= item.random
            made.update(item.outputs)
        used.update(dict.fromkeys(item.operands))
    # What a nested frame makes counts as made here: whether it is passed on is a matter of results.
    outside = [
        node for node in used if node not in made and frame.parameter(node) is None and not _is_repeat_part(node, made)
    ]
    frame.formals = order_formals(frame, outside)


def _is_repeat_part(node: fx.Node, made: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in made


def _made_in(frame: Frame) -> set[fx.Node]:
    made: set[fx.Node] = set()
    for item in frame.items:
        made.update(_made_in(item.frame) if isinstance(item, ChildCall) and item.repeat is None else item.outputs)
    return made


def order_formals(frame: Frame, values: list[fx.Node]) -> list[fx.Node]:
    """In the order of the author's signature; values that it does not name (parts of a tuple) come last, by use."""
    signature = {name: i for i, name in enumerate(names_in(frame.call.module_class).arguments)}

    def rank(node: fx.Node) -> int:
        return signature.get(frame.argument_name(node), len(signature))

    return sorted(values, key=rank)


def actual_of(item: ChildCall, formal: fx.Node, flow: Flow) -> fx.Node:
    """What the caller passes for a formal of the called frame."""
    if formal.target is not block_input or formal.meta["call"] is not item.frame.call:
        return formal
    if item.repeat is None:
        return flow.args(formal)[0]
    index = flow.block_inputs[item.repeat.representative].index(formal)
    return flow.args(item.node)[1 + index]


def _find_results(
    frame: Frame, wanted_after: set[fx.Node], flow: Flow, repeats: dict[fx.Node, list[fx.Node | None]]
) -> None:
    """Sets the results of each frame below `frame`: what is made in it and read after it, or returned."""
    reads_after: list[set[fx.Node]] = []
    wanted = set(wanted_after)
    for item in reversed(frame.items):
        reads_after.append(set(wanted))
        wanted.update(item.operands)
    parts: dict[str, set[int]] = {}
    blocks: list[tuple[ChildCall, set[fx.Node]]] = []
    for item, after in zip(frame.items, reversed(reads_after), strict=True):
        if not isinstance(item, ChildCall):
            continue
        if item.repeat is not None or item.path in flow.block_outputs:
            blocks.append((item, after))
            outputs = repeats[item.node] if item.repeat else flow.block_outputs[item.path]
            keep = {i for i, node in enumerate(outputs) if node in after}
            parts.setdefault(item.frame.path, set()).update(keep)
        else:
            item.frame.results = [node for node in _ordered_made(item.frame) if node in after]
            item.outputs = list(item.frame.results)
            _find_results(item.frame, set(item.frame.results), flow, repeats)
    for item, _ in blocks:
        keep = sorted(parts[item.frame.path])
        made = flow.block_outputs[item.frame.path]
        if item.repeat is None:
            item.frame.results = [made[i] for i in keep]
            item.outputs = list(item.frame.results)
            _find_results(item.frame, set(item.frame.results), flow, repeats)
        else:
            outputs = repeats[item.node]
            item.outputs = [outputs[i] if outputs[i] is not None else item.node for i in keep]


def _ordered_made(frame: Frame) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    for item in frame.items:
        if isinstance(item, ChildCall) and item.repeat is None:
            found.update(dict.fromkeys(_ordered_made(item.frame)))
        else:
            found.update(dict.fromkeys(item.outputs))
    return list(found)
