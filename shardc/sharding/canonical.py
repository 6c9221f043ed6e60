"""Undo what hides a dim: layers that view (B, S, D) as (B*S, D), compute row by row, and view back."""

from __future__ import annotations

import torch
from torch import fx

from shardc.capture.graph import ModelGraph, Value, op_name
from shardc.capture.symbols import B, S, Size

_VIEWS = ("view", "reshape")
_ROWS = Size(1, 1, 1)  # B*S
# Operations that treat each row alike, so that it does not matter whether rows are counted once or as B times S.
_ROW_BY_ROW = (
    "linear", "addmm", "layer_norm", "dropout", "add", "mul", "sub", "div", "relu", "gelu", "silu", "tanh", "pow", "to",
    "float", "contiguous",
)  # fmt: skip


def keep_batch_and_sequence(model: ModelGraph) -> None:
    """Remove pairs of views between (B, S, ...) and (B*S, ...), and write `addmm(b, x, w)` as `x @ w + b`, in place.

    Only where the graph will be sharded: one process keeps the author's operations and their rounding.
    """
    removed: set[fx.Node] = set()
    for node in list(model.operations()):
        if node not in removed and op_name(node.target) in _VIEWS and _merges(node):
            region = _region(node)
            if region is not None:
                _unmerge(model, node, *region)
                removed.update((node, *region[1]))
    for node in list(model.operations()):
        if op_name(node.target) == "addmm" and len(node.meta["value"].shape) > 2:
            _split_addmm(model, node)


def _merges(node: fx.Node) -> bool:
    before, after = node.args[0].meta["value"].shape, node.meta["value"].shape
    return before[:2] == (B, S) and after[:1] == (_ROWS,) and before[2:] == after[1:]


def _restores(node: fx.Node, source: fx.Node) -> bool:
    before, after = source.meta["value"].shape, node.meta["value"].shape
    return op_name(node.target) in _VIEWS and after[:2] == (B, S) and after[2:] == before[1:]


def _region(start: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Row-by-row operations after a merging view, and the views that end them; None where something else uses rows."""
    region: list[fx.Node] = []
    ends: list[fx.Node] = []
    todo = [start]
    while todo:
        source = todo.pop()
        for user in source.users:
            if user in region or user in ends:
                continue
            if user.op == "call_function" and _restores(user, source):
                ends.append(user)
            elif (
                user.op == "call_function"
                and op_name(user.target) in _ROW_BY_ROW
                and user.meta["value"].shape[:1] == (_ROWS,)
            ):
                region.append(user)
                todo.append(user)
            else:
                return None
    inside = {start, *region}
    rows = (o for node in region for o in node.all_input_nodes if o.meta["value"].shape[:1] == (_ROWS,))
    return (region, ends) if ends and all(o in inside for o in rows) else None


def _unmerge(model: ModelGraph, start: fx.Node, region: list[fx.Node], ends: list[fx.Node]) -> None:
    for node in region:
        value = node.meta["value"]
        node.meta["value"] = Value((B, S, *value.shape[1:]), value.dtype, value.requires_grad)
    for view in (start, *ends):
        view.replace_all_uses_with(view.args[0])
        model.outputs.update({name: view.args[0] for name, output in model.outputs.items() if output is view})
        model.graph.erase_node(view)


def _split_addmm(model: ModelGraph, node: fx.Node) -> None:
    bias, x, weight = node.args
    with model.graph.inserting_before(node):
        product = model.graph.call_function(torch.matmul, (x, weight))
        total = model.graph.call_function(torch.add, (product, bias))
    for new in (product, total):
        new.meta.update({key: node.meta[key] for key in ("call", "source", "value")})
    node.replace_all_uses_with(total)
    model.graph.erase_node(node)
