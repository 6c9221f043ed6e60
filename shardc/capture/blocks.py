"""Hold equal blocks once: find them in a full trace, fold the later ones into `repeat_block` nodes."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from shardc.capture.graph import Repeat, block_input, block_output, op_name, repeat_block
from shardc.capture.trace import BlockCall, Trace


def find_equal_blocks(model: nn.Module, trace: Trace) -> dict[str, str]:
    """Path of each block that ran -> path of the first block that computes the same.

    Equal means: same operations, literals, data flow and parameter shapes in the trace, and modules with equal plain
    attributes (so that what the trace did not show, such as a window that was not reached, is equal too).
    """
    modules = dict(model.named_modules())
    nodes = [node for node in trace.graph.nodes]
    first_with: dict[Any, str] = {}
    same = {}
    for block in trace.blocks:
        key = (_structure(block, nodes[block.first : block.last]), _attributes(modules[block.path]))
        same[block.path] = first_with.setdefault(key, block.path)
    return same


def _structure(block: BlockCall, nodes: list[fx.Node]) -> tuple:
    """A hashable description of a block's nodes that does not depend on where the block stands."""
    number = {node: i for i, node in enumerate(nodes)}
    prefix = block.path + "."

    def plain(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return ("node", number[item]) if item in number else ("outside", item.name)
        if isinstance(item, (tuple, list)):
            return tuple(map(plain, item))
        if isinstance(item, dict):
            return tuple((key, plain(value)) for key, value in item.items())
        if isinstance(item, slice):
            return ("slice", plain(item.start), plain(item.stop), plain(item.step))
        return (type(item).__name__, repr(item))

    rows = []
    for node in nodes:
        path = node.meta["call"].path.removeprefix(block.path)
        if node.op == "get_attr":
            rows.append(("parameter", node.target.removeprefix(prefix), node.meta["concrete"]))
        elif node.target is block_input:
            rows.append(("input", node.meta["concrete"]))
        else:
            rows.append((path, op_name(node.target), plain(node.args), plain(node.kwargs)))
    return tuple(rows)


def _attributes(module: nn.Module) -> tuple:
    """Plain attributes of a module tree; `layer_idx` only says where the block stands."""
    plain = (int, float, str, bool, type(None))
    return tuple(
        (path, type(child), tuple((k, v) for k, v in vars(child).items() if isinstance(v, plain) and k != "layer_idx"))
        for path, child in module.named_modules()
    )


def fold_equal_blocks(trace: Trace, same: dict[str, str]) -> None:
    """Replace each block that equals an earlier one by a `repeat_block` node, in place."""
    nodes = [node for node in trace.graph.nodes]
    by_path = {block.path: block for block in trace.blocks}
    kept = []
    replaced: dict[fx.Node, fx.Node] = {}
    for block in trace.blocks:
        representative = by_path[same[block.path]]
        if representative is block:
            kept.append(block)
            continue
        own = nodes[block.first : block.last]
        with trace.graph.inserting_before(own[0]):
            node = trace.graph.call_function(repeat_block, (Repeat(representative.path, block.path), *block.actuals))
            node.meta["call"] = own[0].meta["call"]
            outs = [node] if len(block.outputs) == 1 else [trace.graph.call_function(operator.getitem, (node, i)) for i in range(len(block.outputs))]
        for new, old in zip(outs, block.outputs, strict=True):
            new.meta["call"] = node.meta["call"]
            new.meta["concrete"] = old.meta["concrete"]
            old.replace_all_uses_with(new)
            replaced[old] = new
        for old in reversed(own):
            if not old.users:
                trace.graph.erase_node(old)
    for call in {call for node in trace.graph.nodes if "call" in node.meta for call in node.meta["call"].chain()}:
        for old in call.argument_names.keys() & replaced.keys():
            call.argument_names[replaced[old]] = call.argument_names.pop(old)
    trace.blocks = kept


def remove_dead_nodes(graph: fx.Graph) -> None:
    """Erase what no output needs, and the block inputs (with the repeats' arguments) that nothing reads."""
    repeated = {node.args[0].representative for node in graph.nodes if node.target is repeat_block}
    while True:
        for node in reversed(graph.nodes):
            keep = node.op in ("placeholder", "output") or node.target is block_input
            keep |= node.target is block_output and node.meta["call"].path in repeated
            if not keep and not node.users:
                graph.erase_node(node)
        inputs: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.target is block_input:
                inputs.setdefault(node.meta["call"].path, []).append(node)
        dead = {path: [i for i, node in enumerate(formals) if not node.users] for path, formals in inputs.items()}
        if not any(dead.values()):
            return
        for node in graph.nodes:
            if node.target is repeat_block:
                repeat, *actuals = node.args
                drop = dead.get(repeat.representative, ())
                node.args = (repeat, *(a for i, a in enumerate(actuals) if i not in drop))
        for path, formals in inputs.items():
            for i in dead[path]:
                graph.erase_node(formals[i])
