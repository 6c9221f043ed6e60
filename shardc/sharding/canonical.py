"""Rewrite what hides a dim: transformers' Conv1D merges batch and sequence around `addmm`."""

from __future__ import annotations

import torch
from torch import fx

from shardc.capture.graph import ModelGraph, op_name
from shardc.capture.graph import Value as GraphValue
from shardc.capture.symbols import MODEL_DTYPE


def split_conv1d(model: ModelGraph) -> None:
    """`addmm(b, x.view(-1, n), w).view(...)` becomes `x @ w + b`, in place, so that B and S stay dims of their own.

    Only where the graph will be sharded: one process keeps the author's operations and their rounding.
    """
    graph = model.graph
    for node in list(model.operations()):
        if op_name(node.target) != "addmm" or len(node.users) != 1:
            continue
        bias, flat, weight = node.args
        back = next(iter(node.users))
        if op_name(flat.target) not in ("view", "reshape") or op_name(back.target) not in ("view", "reshape") or len(flat.users) != 1:
            continue
        value = back.meta["value"]
        with graph.inserting_before(node):
            product = graph.call_function(torch.matmul, (flat.args[0], weight))
            total = graph.call_function(torch.add, (product, bias))
        for new in (product, total):
            new.meta.update(call=node.meta["call"], source=node.meta["source"], value=GraphValue(value.shape, MODEL_DTYPE, True))
        back.replace_all_uses_with(total)
        for name, output in model.outputs.items():
            if output is back:
                model.outputs[name] = total
        for old in (back, node, flat):
            graph.erase_node(old)
