"""Plans with one mistake each, made from a correct one: what the proof must refute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.nn.functional as F
from torch import fx

from shardc.capture.graph import ModelGraph, op_name
from shardc.capture.symbols import Axis
from shardc.runtime.layers import vocab_cross_entropy, vocab_embedding
from shardc.sharding.layout import CONVERSIONS
from shardc.sharding.prove import ShardedParameter
from tests.sharding.clone import clone_graph

Table = dict[str, ShardedParameter]
Mutant = tuple[str, ModelGraph, Table]


def all_mutants(model: ModelGraph, parameters: Table, axes: tuple[str, ...]) -> Iterator[Mutant]:
    """Each is a copy: what was changed, the graph and the parameter table."""
    for index, node in enumerate(model.graph.nodes):
        for name, change in _node_changes(node, axes):
            mutant = clone_graph(model)
            change(list(mutant.graph.nodes)[index], mutant)
            yield f"{node.name}: {name}", mutant, parameters
    for name, parameter in parameters.items():
        for what, changed in _table_changes(parameter, axes):
            yield f"{name}: {what}", model, {**parameters, name: changed}


Change = Callable[[fx.Node, ModelGraph], None]


def _node_changes(node: fx.Node, axes: tuple[str, ...]) -> Iterator[tuple[str, Change]]:
    if node.target in CONVERSIONS:
        yield "deleted", _delete
        yield "doubled", _double
        rank = len(node.meta["value"].shape)
        for kind in CONVERSIONS:
            for kwargs in _dims(kind, rank):
                if (kind, kwargs) != (node.target, {"dim": node.kwargs["dim"]} if "dim" in node.kwargs else {}):
                    yield f"{op_name(kind)} {kwargs or ''} instead", _become(kind, kwargs)
        for axis in ("tp", *axes):
            if axis != node.args[1].name and len(axes) > 1:
                yield f"over {axis} instead", _over(axis)
    if node.target is vocab_embedding:
        yield "plain embedding", _plain(F.embedding)
    if node.target is vocab_cross_entropy:
        yield "plain cross entropy", _plain(F.cross_entropy)
    if "rng_axis" in node.meta:
        yield "draws what all ranks draw", _share_randomness
    elif node.op == "call_function" and op_name(node.target) == "dropout":
        yield "draws for itself", _own_randomness


def _dims(kind: Callable, rank: int) -> list[dict]:
    needs_dim = "S" in (CONVERSIONS[kind].before, CONVERSIONS[kind].after)
    return [{"dim": dim} for dim in range(rank)] if needs_dim else [{}]


def _table_changes(parameter: ShardedParameter, axes: tuple[str, ...]) -> Iterator[tuple[str, ShardedParameter]]:
    reduce = parameter.grad_reduce
    for axis in reduce:
        yield f"not summed over {axis}", replace(parameter, grad_reduce=tuple(a for a in reduce if a != axis))
        yield f"summed twice over {axis}", replace(parameter, grad_reduce=(*reduce, axis))
    for axis in dict.fromkeys(("tp", *axes)):
        if axis not in reduce:
            yield f"summed over {axis} too", replace(parameter, grad_reduce=(*reduce, axis))
    if parameter.shard is not None:
        yield "whole on each rank", replace(parameter, shard=None)
    else:
        for dim, size in enumerate(parameter.shape):
            shard = {"dim": dim, "segments": [{"sizes": [size], "splits": [[0, "tp"]]}]}
            yield f"sharded along dim {dim}", replace(parameter, shard=shard)


def _delete(node: fx.Node, model: ModelGraph) -> None:
    _replace_uses(model, node, node.args[0])
    model.graph.erase_node(node)


def _double(node: fx.Node, model: ModelGraph) -> None:
    with model.graph.inserting_after(node):
        again = model.graph.call_function(node.target, node.args, dict(node.kwargs))
    again.meta = dict(node.meta)
    _replace_uses(model, node, again)
    again.replace_input_with(again.args[0], node)


def _become(kind: Callable, kwargs: dict) -> Change:
    def change(node: fx.Node, model: ModelGraph) -> None:
        node.target, node.kwargs = kind, dict(kwargs)

    return change


def _over(axis: str) -> Change:
    def change(node: fx.Node, model: ModelGraph) -> None:
        node.args = (node.args[0], Axis(axis))

    return change


def _plain(function: Callable) -> Change:
    def change(node: fx.Node, model: ModelGraph) -> None:
        node.target, node.args = function, node.args[:2]

    return change


def _share_randomness(node: fx.Node, model: ModelGraph) -> None:
    del node.meta["rng_axis"]


def _own_randomness(node: fx.Node, model: ModelGraph) -> None:
    node.meta["rng_axis"] = Axis("tp")


def _replace_uses(model: ModelGraph, node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    model.outputs = {name: new if value is node else value for name, value in model.outputs.items()}
