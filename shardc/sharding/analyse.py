"""Work out the factors of every value of a graph from shapes alone."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.capture.graph import ModelGraph, block_input, block_output, op_name, repeat_block
from shardc.errors import ShardcError
from shardc.sharding.factors import Dims, new_dims, require_whole, unify
from shardc.sharding.layout import CONVERSIONS
from shardc.sharding.rules import dims_of, rule_of, set_dims, tensors


def analyse_factors(model: ModelGraph) -> dict[str, Dims]:
    """Write `meta["dims"]` on every node; returns the dims of each parameter, repeated blocks' included.

    Before: a captured graph, with or without conversions (which keep the global shape). After: dims of equal meaning
    share factors. An operation without a rule relates nothing and needs all its operands whole.
    """
    parameters: dict[str, Dims] = {}
    inputs: dict[str, list[fx.Node]] = {}
    outputs: dict[str, list[fx.Node]] = {}
    for node in model.graph.nodes:
        node.meta.pop("whole", None)
        if node.op == "placeholder":
            set_dims(node, new_dims(node.meta["value"].shape))
            if node.name != "labels" and len(node.meta["value"].shape) >= 2:
                _share_batch(model, node)
        elif node.op == "get_attr":
            set_dims(node, new_dims(node.meta["value"].shape))
            parameters[node.target] = dims_of(node)
        elif node.op == "call_function":
            if node.target is repeat_block:
                _repeat(node, inputs, outputs, parameters, model)
            elif node.target in CONVERSIONS:
                set_dims(node, dims_of(node.args[0]))
            else:
                _apply_rule(node)
            if node.target is block_input:
                inputs.setdefault(node.meta["call"].path, []).append(node)
            elif node.target is block_output:
                outputs.setdefault(node.meta["call"].path, []).append(node)
    return parameters


def _share_batch(model: ModelGraph, node: fx.Node) -> None:
    """All tensors of the batch count the same rows and the same positions."""
    first = next(iter(model.inputs.values()))
    ids = model.inputs.get("input_ids", first)
    if ids is node or "dims" not in ids.meta:
        return
    for mine, other, a, b in zip(
        dims_of(node), dims_of(ids), node.meta["value"].shape, ids.meta["value"].shape, strict=False
    ):
        if a == b and mine and other:
            unify(other, mine, node)


def _apply_rule(node: fx.Node) -> None:
    rule = rule_of(node)
    if rule is not None:
        rule.relate(node)
        return
    for operand in tensors(node):
        for factors in dims_of(operand):
            require_whole(factors, node)
    if "value" in node.meta:
        set_dims(node, new_dims(node.meta["value"].shape))
    else:
        node.meta["dims"] = _unknown_results(node)


def _unknown_results(node: fx.Node) -> list[Dims]:
    count = 1 + max((user.args[1] for user in node.users), default=0)
    shapes = {user.args[1]: user.meta["value"].shape for user in node.users}
    return [new_dims(shapes.get(i, ())) for i in range(count)]


def _repeat(node: fx.Node, inputs: dict, outputs: dict, parameters: dict[str, Dims], model: ModelGraph) -> None:
    repeat, *actuals = node.args
    for formal, actual in zip(inputs[repeat.representative], actuals, strict=True):
        if formal.meta["value"].shape != actual.meta["value"].shape:
            raise ShardcError(
                f"{repeat.instance}: an input has another shape than in {repeat.representative}",
                "this is a defect of the capture",
            )
        for mine, other in zip(dims_of(formal), dims_of(actual), strict=True):
            if mine and other:
                unify(mine, other, node)
    results = [dims_of(o) for o in outputs[repeat.representative]]
    node.meta["dims"] = results[0] if "value" in node.meta else results
    prefix = repeat.representative + "."
    for name in [n for n in parameters if n.startswith(prefix)]:
        parameters[repeat.rename(name)] = parameters[name]


def of_instances(model: ModelGraph, meta: str) -> dict[str, Any]:
    """What `meta` says of each parameter, a repeated block's parameters like its representative's."""
    found = {node.target: node.meta[meta] for node in model.graph.nodes if node.op == "get_attr"}
    for representative, instances in model.blocks.items():
        for name in [n for n in found if n.startswith(representative + ".")]:
            found |= {instance + name[len(representative) :]: found[name] for instance in instances[1:]}
    return found


def describe(node: fx.Node) -> str:
    """A node for an error: module, operation, source line."""
    call, source = node.meta.get("call"), node.meta.get("source")
    where = f" ({source})" if source else ""
    name = op_name(node.target) if node.op == "call_function" else node.name
    return f"{(call.path if call else '') or 'the model'}: {name}{where}"
