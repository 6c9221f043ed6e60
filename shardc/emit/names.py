"""The name that a value should have: the author's, or that of what it was cast or reshaped from."""

from __future__ import annotations

import builtins
import keyword

from torch import fx, nn

from shardc.capture.graph import block_input, op_name
from shardc.emit.author import AuthorNames, names_in, tuple_targets
from shardc.emit.flow import Flow, is_projection
from shardc.emit.frames import ChildCall, Frame

_TAKEN = {"self", "torch", "F", "nn", "tp", "STAGES", "packed"}
_KEEPS_NAME = {
    "to", "float", "type_as", "view", "reshape", "contiguous", "transpose", "permute", "expand", "flatten", "unsqueeze",
    "squeeze", "dropout", "long", "copy_to", "all_reduce", "all_gather", "all_gather_invariant", "reduce_scatter",
    "shard",     "keep_on_first", "getitem", "add", "mul",
}  # fmt: skip


def is_usable(name: str | None) -> bool:
    return bool(name) and name.isidentifier() and not keyword.iskeyword(name) and name not in _TAKEN and name != "_"


def class_name(module_class: type) -> str:
    """The author's name of a class; where torch has a layer of that name, after its package's: LoraLinear."""
    name, packages = module_class.__name__, module_class.__module__.split(".")[:-1]
    if packages and packages[0] != "torch" and hasattr(nn, name):
        return f"{packages[-1].title().replace('_', '')}{name}"
    return name


def unused(name: str, taken: set[str] | dict[str, object]) -> str:
    """`name`, or `name_2`, `name_3`, ... where it is taken."""
    if name not in taken:
        return name
    count = 2
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"


class Namer:
    """Wished-for names of the values of one graph. Child results are named by the caller's source."""

    def __init__(self, flow: Flow):
        self.flow = flow
        self._hints: dict[fx.Node, str] = {}
        self.call_results: dict[fx.Node, str] = {}

    def hint(self, node: fx.Node) -> str:
        found = self._hints.get(node)
        if found is None:
            found = self._hints[node] = self._find(node)
        return found

    def _find(self, node: fx.Node) -> str:
        if node in self.call_results:
            return self.call_results[node]
        if node.op == "placeholder":
            return node.target
        if node.op == "get_attr":
            return node.target.rpartition(".")[2]
        if node.target is block_input:
            call = node.meta["call"]
            named = next((name for key, name in call.argument_names.items() if key is node), None)
            return named if is_usable(named) else self.hint(self.flow.args(node)[0])
        if is_usable(self.flow.later_names.get(node)):
            return self.flow.later_names[node]
        source = node.meta.get("source")
        if is_projection(node):
            targets = tuple_targets(source)
            index = self.flow.args(node)[1]
            if index < len(targets) and is_usable(targets[index]):
                return targets[index]
        if source is not None and is_usable(source.name):
            return source.name
        operands = self.flow.operands(node)
        name = op_name(node.target)
        if operands and name in _KEEPS_NAME:
            first = next((x for x in operands if x.op != "get_attr"), None)
            if first is not None:
                return self.hint(first)
        name = name.strip("_")
        return name if is_usable(name) and not hasattr(builtins, name) else "x"

    def name_call_results(self, frame: Frame) -> None:
        """Name what child calls return as the caller's source does: `hidden_states = self.mlp(hidden_states)`."""
        for item in frame.items:
            if isinstance(item, ChildCall):
                names = result_names(frame, item)
                if (
                    len(names) == 1 and len(item.outputs) > 1
                ):  # `position_embeddings = self.rotary_emb(...)`, taken apart later
                    continue
                for i, node in enumerate(item.outputs):
                    if node not in self.call_results and i < len(names) and is_usable(names[i]):
                        self.call_results[node] = names[i]


def caller_source(frame: Frame, item: ChildCall) -> tuple[AuthorNames, str]:
    """The source in which a child call is written, and the attribute that it calls there."""
    caller = item.frame.call.parent or frame.call
    return names_in(caller.module_class), item.path[len(caller.path) + 1 :] if caller.path else item.path


def result_names(frame: Frame, item: ChildCall) -> tuple[str, ...]:
    """What the author assigns the results of a child call to; empty where they are used in place."""
    author, relative = caller_source(frame, item)
    container, _, index = relative.rpartition(".")
    if index.isdigit():
        return author.loops.get(container, ("", ()))[1]
    return author.results.get(relative, ())


def loop_variable(module_class: type, container: str) -> str:
    """The author's loop variable over `self.<container>`, "layer" where there is none."""
    name = names_in(module_class).loops.get(container, ("layer", ()))[0]
    return name if is_usable(name) else "layer"


def name_formals(frame: Frame, namer: Namer) -> None:
    """Distinct names for what the module's forward takes."""
    names: list[str] = []
    for node in frame.formals:
        name = frame.argument_name(node)
        names.append(unused(name if is_usable(name) else namer.hint(node), set(names)))
    frame.formal_names = names
