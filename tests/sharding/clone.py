"""Copies captured graphs, which sharding changes in place, so that one capture serves many tests."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from shardc.capture.capture import CapturedModel
from shardc.capture.graph import Call, ModelGraph


def clone_captured(captured: CapturedModel) -> CapturedModel:
    variants = {variant: clone_graph(model) for variant, model in captured.variants.items()}
    return CapturedModel(variants, captured.window, captured.shortest_sequence)


def clone_graph(model: ModelGraph) -> ModelGraph:
    """The same graph with nodes and calls of its own."""
    graph, twin = fx.Graph(), {}
    output = graph.graph_copy(model.graph, twin)
    graph.output(output)
    calls: dict[Call, Call] = {}
    for old, new in twin.items():
        new.meta = dict(old.meta)
        if "call" in old.meta:
            new.meta["call"] = _clone_call(old.meta["call"], twin, calls)
    return ModelGraph(
        graph,
        {name: twin[node] for name, node in model.inputs.items()},
        {name: twin[node] for name, node in model.outputs.items()},
        dict(model.parameters),
        dict(model.constants),
        {path: list(instances) for path, instances in model.blocks.items()},
        model.module_classes,
    )


def _clone_call(call: Call, twin: dict[fx.Node, fx.Node], calls: dict[Call, Call]) -> Call:
    if call not in calls:
        parent = _clone_call(call.parent, twin, calls) if call.parent else None
        names = {twin[node]: name for node, name in call.argument_names.items() if node in twin}
        calls[call] = replace(call, parent=parent, argument_names=names)
    return calls[call]
