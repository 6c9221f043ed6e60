"""Equal blocks: found in a full trace, so that later runs hold each of them once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from shardc.capture.graph import block_input, block_output, repeat_block
from shardc.capture.model_index import ModelIndex
from shardc.capture.rows import BlockCall, Row, Trace


def find_equal_blocks(index: ModelIndex, trace: Trace) -> dict[str, str]:
    """Path of each block that ran -> path of the first block that computes the same.

    Equal means: same operations, literals, data flow and parameter shapes in the trace, and modules with equal plain
    attributes (so that what the trace did not show, such as a window that was not reached, is equal too).
    """
    distinct: list[tuple[BlockCall, tuple]] = []
    same: dict[str, str] = {}
    for block in trace.blocks:
        attributes = _attributes(index.modules[block.path])
        for other, others in distinct:
            if attributes == others and _equal_structure(trace.rows, other, block):
                same.setdefault(block.path, other.path)
                break
        else:
            distinct.append((block, attributes))
            same.setdefault(block.path, block.path)
    return same


def _equal_structure(rows: list[Row], one: BlockCall, other: BlockCall) -> bool:
    """Whether two blocks' rows agree in all but where they stand."""
    if one.skeleton != other.skeleton or one.last - one.first != other.last - other.first:
        return False
    twin: dict[Row, Row] = {}
    for a, b in zip(rows[one.first : one.last], rows[other.first : other.last], strict=True):
        if a.op != b.op or a.call.path.removeprefix(one.path) != b.call.path.removeprefix(other.path):
            return False
        if a.op == "get_attr":
            if (
                a.target.removeprefix(one.path + ".") != b.target.removeprefix(other.path + ".")
                or a.concrete != b.concrete
            ):
                return False
        elif a.signature is not b.signature or (
            a.target is not block_input
            and any(twin.get(x, x) is not y for x, y in zip(a.operands, b.operands, strict=True))
        ):
            return False
        twin[a] = b
    return True


def _attributes(module: nn.Module) -> tuple:
    """Plain attributes of a module tree; `layer_idx` only says where the block stands."""
    return tuple(
        (path, type(child), tuple((k, v) for k, v in vars(child).items() if k != "layer_idx" and _is_plain(v)))
        for path, child in module.named_modules()
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, bool, type(None), torch.dtype))


def live_rows(trace: Trace) -> list[Row]:
    """The rows that the outputs need, in order; a block that is repeated keeps all that enters and leaves it."""
    live: set[Row] = set(trace.outputs.values())
    for row in reversed(trace.rows):
        if row in live or row.op == "placeholder" or row.target is block_input or row.target is block_output:
            live.add(row)
            live.update(row.operands)
    return [row for row in trace.rows if row in live]


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
