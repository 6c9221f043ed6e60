"""Graphs as JSON, one line a node, and back: what `shardc check` proves again and the loader compares."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import resolve_name

from shardc.capture import Call, ModelGraph, Parameter, Repeat, Source, Value, Variant
from shardc.errors import ShardcError
from shardc.plan.json_text import Line
from shardc.plan.literals import decode, encode

_MODULES = ("torch", "_operator", "shardc.runtime", "shardc.capture.graph")  # where a node's target may live
_EXTRA = ("rng_axis", "shards_copies")  # node.meta of sharded graphs that the proof and emission read


def graphs_to_json(variants: Mapping[Variant, ModelGraph]) -> dict[str, Any]:
    """The graphs of one model as plain data; constants by name only, their values are a file of their own."""
    files: dict[str, int] = {}
    graphs = {variant.name: _graph_to_json(graph, files) for variant, graph in sorted(variants.items())}
    graph = next(iter(variants.values()))
    return {
        "files": list(files),
        "module_classes": {path: _class_name(kind) for path, kind in _without_repeats(graph).items()},
        "parameters": [_parameter_to_json(parameter) for parameter in graph.parameters.values()],
        "variants": graphs,
    }


def graphs_from_json(data: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> dict[Variant, ModelGraph]:
    """The graphs that `graphs_to_json` wrote. Classes other than torch's are stand-ins of the same name.

    Raises ShardcError where the data is something else."""
    try:
        parameters = [_parameter_from_json(row) for row in data["parameters"]]
        return {
            _variant(name): _graph_from_json(row, data, {p.name: p for p in parameters}, constants)
            for name, row in data["variants"].items()
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ShardcError(
            f"plan.json: its graphs cannot be read ({type(error).__name__}: {error})", "compile the plan again"
        ) from error


def _variant(name: str) -> Variant:
    return Variant() if name == "plain" else Variant(**dict.fromkeys(name.split("+"), True))


# -- one graph -----------------------------------------------------------------------------------------------------
def _graph_to_json(model: ModelGraph, files: dict[str, int]) -> dict[str, Any]:
    calls: dict[Call, int] = {}
    alive = {node: node.name for node in model.graph.nodes}
    nodes = [_node_to_json(node, calls, files) for node in alive if node.op != "output"]
    return {
        "blocks": model.blocks,
        "calls": [_call_to_json(call, calls, alive) for call in calls],
        "constants": list(model.constants),
        "inputs": {name: node.name for name, node in model.inputs.items()},
        "nodes": nodes,
        "outputs": [[name, node.name] for name, node in model.outputs.items()],
    }


def _graph_from_json(
    row: Mapping[str, Any],
    data: Mapping[str, Any],
    parameters: dict[str, Parameter],
    constants: Mapping[str, torch.Tensor],
) -> ModelGraph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    calls: list[Call] = []
    for call in row["calls"]:
        parent = None if call["parent"] is None else calls[call["parent"]]
        calls.append(Call(call["path"], _class(call["class"]), parent))
    for node in row["nodes"]:
        nodes[node["name"]] = _node_from_json(graph, node, nodes, calls, data["files"])
    for call, entry in zip(calls, row["calls"], strict=True):
        call.argument_names.update({nodes[node]: name for node, name in entry["arguments"].items()})
    outputs = {name: nodes[node] for name, node in row["outputs"]}
    graph.output(tuple(outputs.values()))
    inputs = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    classes = {path: _class(name) for path, name in data["module_classes"].items()}
    return ModelGraph(
        graph,
        inputs,
        outputs,
        parameters,
        {name: constants[name] for name in row["constants"]},
        row["blocks"],
        classes | _of_repeats(classes, row["blocks"]),
    )


# -- nodes ---------------------------------------------------------------------------------------------------------
def _node_to_json(node: fx.Node, calls: dict[Call, int], files: dict[str, int]) -> Line:
    line = Line(name=node.name)
    if node.op == "call_function":
        line["target"] = _name(node.target)
    else:
        line |= {"op": node.op, "target": node.target}
    if node.args:
        line["args"] = encode(tuple(node.args))
    if node.kwargs:
        line["kwargs"] = {key: encode(value) for key, value in node.kwargs.items()}
    if value := node.meta.get("value"):
        line["value"] = [encode(tuple(value.shape)), encode(value.dtype), value.requires_grad]
    for call in node.meta["call"].chain():
        calls.setdefault(call, len(calls))
    line["call"] = calls[node.meta["call"]]
    if source := node.meta.get("source"):
        file = files.setdefault(_portable(source.file), len(files))
        line["source"] = [file, source.line, source.end_line, source.name]
    for key in _EXTRA:
        if key in node.meta:
            line[key] = encode(node.meta[key])
    return line


def _node_from_json(
    graph: fx.Graph, line: Mapping[str, Any], nodes: dict[str, fx.Node], calls: list[Call], files: list[str]
) -> fx.Node:
    op = line.get("op", "call_function")
    target = _target(line["target"]) if op == "call_function" else line["target"]
    args = decode(line.get("args", []), nodes)
    kwargs = {key: decode(value, nodes) for key, value in line.get("kwargs", {}).items()}
    node = graph.create_node(op, target, args, kwargs, name=line["name"])
    if node.name != line["name"]:
        raise ValueError(f"two nodes are named {line['name']}")
    if "value" in line:
        shape, dtype, requires_grad = line["value"]
        node.meta["value"] = Value(decode(shape, nodes), decode(dtype, nodes), requires_grad)
    node.meta["call"] = calls[line["call"]]
    node.meta["source"] = Source(files[line["source"][0]], *line["source"][1:]) if "source" in line else None
    for key in _EXTRA:
        if key in line:
            node.meta[key] = decode(line[key], nodes)
    return node


def _call_to_json(call: Call, calls: Mapping[Call, int], alive: Mapping[fx.Node, str]) -> Line:
    parent = None if call.parent is None else calls[call.parent]
    arguments = {alive[node]: name for node, name in call.argument_names.items() if node in alive}
    return Line({"path": call.path, "class": _class_name(call.module_class), "parent": parent, "arguments": arguments})


def _portable(file: str) -> str:
    """A source file as every machine names it: below site-packages, or its last two names."""
    if not file.startswith("/"):
        return file
    below = file.rpartition("/site-packages/")[2]
    return below if below != file else "/".join(file.split("/")[-2:])


# -- names of functions and classes ----------------------------------------------------------------------------------
@functools.cache
def _name(target: Callable) -> str:
    name = resolve_name(target) or f"{target.__module__}.{target.__qualname__}"
    assert _target(name) == target, name
    return name


@functools.cache
def _target(name: str) -> Callable:
    """The function of that name. Raises ShardcError where it is none that a graph may call."""
    module = next((m for m in _MODULES if name.startswith(m + ".")), None)
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0]) if module in ("torch", "_operator") else None
    rest = parts[1:]
    if found is None and module is not None:
        found, rest = importlib.import_module(".".join(parts[:-1])), parts[-1:]
    for part in rest:
        found = getattr(found, part, None)
    if not callable(found):
        raise ShardcError(f"plan.json: a graph calls {name!r}, which is no operation", "compile the plan again")
    return found


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _class(name: str) -> type:
    """torch's own class; for any other a stand-in of that name, so that reading a plan runs no model code."""
    module, _, qualname = name.rpartition(".")
    if module.startswith("torch.nn."):
        return getattr(importlib.import_module(module), qualname)
    return type(qualname, (nn.Module,), {"__module__": module, "__qualname__": qualname})


# -- modules and parameters ------------------------------------------------------------------------------------------
def _without_repeats(model: ModelGraph) -> dict[str, type]:
    """The module classes that do not follow from those of an equal block."""
    later = {path for instances in model.blocks.values() for path in instances[1:]}
    return {path: kind for path, kind in model.module_classes.items() if not _is_inside(path, later)}


def _is_inside(path: str, blocks: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:n]) in blocks for n in range(1, len(parts) + 1))


def _of_repeats(classes: Mapping[str, type], blocks: Mapping[str, list[str]]) -> dict[str, type]:
    found = {}
    for first, instances in blocks.items():
        inside = {path: kind for path, kind in classes.items() if path == first or path.startswith(first + ".")}
        for instance in instances[1:]:
            found[instance] = classes[first]
            found |= {Repeat(first, instance).rename(path): kind for path, kind in inside.items() if path != first}
    return found


def _parameter_to_json(parameter: Parameter) -> Line:
    return Line(
        name=parameter.name,
        shape=encode(parameter.shape),
        dtype=encode(parameter.dtype),
        requires_grad=parameter.requires_grad,
        aliases=list(parameter.aliases),
        is_buffer=parameter.is_buffer,
        init=list(parameter.init) if parameter.init else None,
    )


def _parameter_from_json(row: Mapping[str, Any]) -> Parameter:
    init = tuple(row["init"]) if row["init"] else None
    shape, dtype = decode(row["shape"], {}), decode(row["dtype"], {})
    aliases = tuple(row["aliases"])
    return Parameter(row["name"], shape, dtype, row["requires_grad"], aliases, row["is_buffer"], init)
