"""Run a captured graph on real tensors, node by node: the reference for tests of graphs, without emission."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture import ModelGraph, Repeat, block_input, block_output, repeat_block
from shardc.capture.symbols import DEVICE, DTYPE_MIN, MODEL_DTYPE, TRAINING, Size, WhileTraining


def run_stage(
    stage: ModelGraph, tensors: Mapping[str, Tensor], parameter: Callable[[str], Tensor], *, training: bool = False
) -> dict[str, Tensor]:
    """The outputs by name. tensors: the inputs by name. parameter: name -> tensor."""
    known: dict[fx.Node, Any] = {}
    rows, length = _batch_sizes(stage, tensors)
    dtype = torch.get_default_dtype()

    def leaf(item: Any) -> Any:
        if isinstance(item, Size):
            return item.at(rows, length)
        if isinstance(item, WhileTraining):
            return item.value if training else 0.0
        if isinstance(item, torch.device):
            return torch.device("cpu")
        named = {DEVICE: torch.device("cpu"), MODEL_DTYPE: dtype, DTYPE_MIN: torch.finfo(dtype).min, TRAINING: training}
        return named.get(item, item) if item.__hash__ else item

    def run(node: fx.Node, values: dict, names: Callable[[str], str]) -> Any:
        if node.op == "get_attr":
            return parameter(names(node.target))

        def load(item: Any) -> Any:
            if isinstance(item, fx.Node):
                if item.op == "get_attr":
                    return parameter(names(item.target))
                return values[item] if item in values else known[item]
            return leaf(item)

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), load)
        if node.target is repeat_block:
            return run_repeat(*args)
        return node.target(*args, **kwargs)

    def run_repeat(repeat: Repeat, *actuals: Tensor) -> Any:
        body = [n for n in stage.graph.nodes if n.op == "call_function" and n.target is not repeat_block]
        body = [n for n in body if any(c.path == repeat.representative for c in n.meta["call"].chain())]
        values: dict[fx.Node, Any] = {}
        arguments = iter(actuals)
        for node in body:
            values[node] = next(arguments) if node.target is block_input else run(node, values, repeat.rename)
        outputs = [values[n] for n in body if n.target is block_output]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    for node in stage.graph.nodes:
        if node.op == "placeholder":
            known[node] = tensors[node.target]
        elif node.op == "call_function":
            known[node] = run(node, known, lambda name: name)
    return {name: known[node] for name, node in stage.outputs.items()}


def _batch_sizes(stage: ModelGraph, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    sizes = {
        dim: size
        for name, node in stage.inputs.items()
        for dim, size in zip(node.meta["value"].shape, tensors[name].shape, strict=True)
        if isinstance(dim, Size)
    }
    return sizes[Size(1, 1, 0)], sizes[Size(1, 0, 1)]
