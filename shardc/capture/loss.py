"""Make the loss a sum over targets divided by a count that the runtime supplies.

A mean over one micro-batch cannot be added up: micro-batches and data-parallel ranks hold different numbers of targets.
`mean over targets = sum over targets / number of targets` can, if the number is that of the whole batch.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.capture.graph import ModelGraph, Value, op_name
from shardc.errors import ShardcError

_CROSS_ENTROPY_ARGUMENTS = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def normalise_loss(model: ModelGraph) -> None:
    """In place: `loss = cross_entropy(..., reduction="sum") / num_targets`, with an input `num_targets` (0-d, float32).

    Adds the output "count": how many targets of this batch are not ignored (0-d, int64), computed from labels alone.
    Raises ShardcError where the loss is not one mean cross entropy.
    """
    node = model.outputs.get("loss")
    if node is None:
        return
    if node.op != "call_function" or op_name(node.target) != "cross_entropy":
        raise ShardcError(
            f"the loss is computed by {node.name} ({node.meta.get('source')}), not by a mean cross entropy",
            "return torch.nn.functional.cross_entropy(logits, targets) as the loss",
        )
    given = dict(zip(_CROSS_ENTROPY_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    if given.get("weight") is not None or given.get("reduction", "mean") != "mean":
        raise ShardcError(
            f"the loss ({node.meta.get('source')}) has class weights or reduction={given.get('reduction')!r}",
            "use a plain mean: cross_entropy(logits, targets, ignore_index=..., label_smoothing=...)",
        )
    ignore_index = given.get("ignore_index", -100)
    kwargs: dict[str, object] = {"ignore_index": ignore_index}
    if given.get("label_smoothing"):
        kwargs["label_smoothing"] = given["label_smoothing"]
    node.args, node.kwargs = (given["input"], given["target"]), {**kwargs, "reduction": "sum"}

    graph, call = model.graph, node.meta["call"]
    root = call.chain()[0]
    with graph.inserting_before(next(iter(graph.nodes))):
        num_targets = graph.placeholder("num_targets")
    num_targets.meta.update(call=root, source=None, value=Value((), torch.float32, False))
    model.inputs["num_targets"] = num_targets

    def after(previous: fx.Node, target: object, args: tuple, value: Value) -> fx.Node:
        with graph.inserting_after(previous):
            new = graph.call_function(target, args)
        new.meta.update(call=call, source=node.meta["source"], value=value)
        return new

    loss_value = node.meta["value"]
    valid = after(
        given["target"],
        torch.Tensor.ne,
        (given["target"], ignore_index),
        Value(given["target"].meta["value"].shape, torch.bool, False),
    )
    count = after(valid, torch.Tensor.sum, (valid,), Value((), torch.int64, False))
    loss = after(node, torch.Tensor.div, (node, num_targets), Value((), torch.float32, loss_value.requires_grad))
    model.outputs |= {"loss": loss, "count": count}
    output = graph.output_node()
    output.args = (tuple(model.outputs.values()),)
