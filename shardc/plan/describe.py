"""plan.json: what a compiled plan says to the runtime, as plain data (architecture.md, section 2)."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from shardc.capture import ModelGraph, Parameter, Value, Variant
from shardc.capture.graph import op_name
from shardc.capture.symbols import MODEL_DTYPE, Dim, DType
from shardc.errors import ShardcError
from shardc.pipeline.balance import SEQUENCE
from shardc.pipeline.schedule_check import peak_alive, simulate
from shardc.plan.compile import CompiledPlan
from shardc.policy import policy_to_dict
from shardc.sharding.prove import OBLIGATIONS, Certificate, ShardedParameter

FORMAT = 1
_BATCH_ORDER = ("input_ids", "attention_mask", "position_ids", "labels")
_SIZES = ("B", "S", "S/tp")


def plan_data(plan: CompiledPlan, config_text: str) -> dict[str, Any]:
    """The content of plan.json but for `sha256`."""
    settings, stages = plan.settings, plan.stages
    held = holders(stages)
    parameters, buffers = _parameters(plan, held), _buffers(plan, held)
    return {
        "format": FORMAT,
        "model": {
            "name": plan.source.name,
            "class": plan.source.class_name,
            "config_sha256": hashlib.sha256(config_text.encode()).hexdigest(),
        },
        "mesh": {
            "tp": settings.tp,
            "pp": settings.pp,
            "sub_axes": plan.sharded.sub_axes,
            "sequence_parallel": settings.sp,
        },
        "pad_sequence": settings.sp,
        "masked_rows_see_padding": masked_rows_see_padding(plan),
        "shortest_sequence": plan.captured.shortest_sequence,
        "dtype": settings.dtype,
        "policy": policy_to_dict(plan.policy),
        "parameters": parameters,
        "buffers": buffers,
        "ties": ties(parameters),
        "stages": stage_entries(stages, plan.first_blocks, settings.dtype, stage_classes(plan.text)),
        "guards": guards(plan.captured.variants),
        "graphs": plan.graphs,
        "estimates": _estimates(plan, parameters),
        "versions": {name: importlib.metadata.version(name) for name in ("shardc", "torch", "transformers")},
    }


def masked_rows_see_padding(plan: CompiledPlan) -> bool:
    """Whether positions that the runtime adds to a sequence change the rows of attention that see no token at all.

    A softmax over scores that a mask made equally low is uniform over all keys, the added ones too. Kernels give zeros
    for such rows, however long the sequence is."""
    masked = [graph for variant, graph in plan.captured.variants.items() if variant.masked]
    calls = (node for graph in masked for node in graph.graph.nodes if node.op == "call_function")
    return plan.settings.sp and any(op_name(node.target) == "softmax" for node in calls)


def config_text(plan: CompiledPlan) -> str:
    """config.json as `save_pretrained` writes it; of a plain nn.Module, its class alone."""
    config = plan.source.config
    fields = {} if config is None else json.loads(config.to_json_string())
    return json.dumps(fields | {"architectures": [plan.source.class_name]}, indent=2, sort_keys=True) + "\n"


# -- parameters ------------------------------------------------------------------------------------------------------
def holders(stages: list[dict[Variant, ModelGraph]]) -> dict[str, list[int]]:
    """Parameter or buffer -> the stages that hold it, in some variant."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in dict.fromkeys(name for graph in stage.values() for name in graph.parameters):
            found.setdefault(name, []).append(index)
    return found


def _parameters(plan: CompiledPlan, held: dict[str, list[int]]) -> dict[str, Any]:
    known = plan.captured.plain.parameters
    return {name: _parameter(p, known[name], held.get(name, [])) for name, p in plan.sharded.parameters.items()}


def _parameter(parameter: ShardedParameter, captured: Parameter, stages: list[int]) -> dict[str, Any]:
    if not stages:
        raise ShardcError(
            f"{parameter.name}: neither the loss nor the logits are computed from this parameter",
            "remove it from the model: no stage would hold it, and a saved checkpoint would lack it",
        )
    kind, first, second = captured.init or (None, 0.0, 0.0)
    init = {"normal": {"kind": kind, "mean": first, "std": second}, "constant": {"kind": kind, "value": first}}
    return {
        "shape": list(parameter.shape),
        "stages": stages,
        "aliases": list(parameter.aliases),
        "requires_grad": parameter.requires_grad,
        "shard": parameter.shard,
        "grad_reduce": list(parameter.grad_reduce),
        "init": init.get(kind),
    }


def _buffers(plan: CompiledPlan, held: dict[str, list[int]]) -> dict[str, Any]:
    known = plan.captured.plain.parameters
    return {
        name: {
            "shape": list(known[name].shape),
            "dtype": dtype_name(known[name].dtype, plan.settings.dtype),
            "stages": stages,
        }
        for name, stages in held.items()
        if known[name].is_buffer
    }


def ties(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The trained parameters that several stages hold: their gradients are summed over these stages."""
    return [
        {"parameter": name, "stages": entry["stages"]}
        for name, entry in parameters.items()
        if len(entry["stages"]) > 1 and entry["requires_grad"]
    ]


# -- stages ----------------------------------------------------------------------------------------------------------
def stage_entries(
    stages: list[dict[Variant, ModelGraph]], first_blocks: list[str], dtype: str, classes: list[str]
) -> list[dict[str, Any]]:
    """What each stage takes, receives and sends."""
    entries: list[dict[str, Any]] = []
    for index, (stage, class_name) in enumerate(zip(stages, classes, strict=True)):
        graph = next(iter(stage.values()))
        is_last = index + 1 == len(stages)
        receives = entries[-1]["sends"] if entries else []
        sends = [] if is_last else [_sent(name, node.meta["value"], dtype) for name, node in graph.outputs.items()]
        entries.append(
            {
                "index": index,
                "class": class_name,
                "first_block": None if index == 0 else first_blocks[index - 1],
                "num_blocks": sum(map(len, graph.blocks.values())),
                "batch": batch_names(stage, {sent["name"] for sent in receives}),
                "receives": receives,
                "sends": sends,
                "logits": _logits(graph, dtype) if is_last else None,
            }
        )
    return entries


def batch_names(stage: dict[Variant, ModelGraph], received: set[str]) -> list[str]:
    """The batch tensors that some variant of a stage takes."""
    names = {name for graph in stage.values() for name in graph.inputs} - received - {"num_targets"}
    return sorted(names, key=lambda name: (_BATCH_ORDER.index(name) if name in _BATCH_ORDER else 9, name))


def _sent(name: str, value: Value, dtype: str) -> dict[str, Any]:
    shape = [_size(dim) for dim in value.shape]
    unknown = [size for size in shape if isinstance(size, str) and size not in _SIZES]
    if unknown:
        raise ShardcError(
            f"{name}, which crosses stages, has a dim of size {unknown[0]}; valid: a number, {', '.join(_SIZES)}",
            "cut elsewhere: pipeline: {cuts: [...]} in the policy",
        )
    return {"name": name, "shape": shape, "dtype": dtype_name(value.dtype, dtype)}


def _logits(graph: ModelGraph, dtype: str) -> dict[str, Any] | None:
    node = graph.outputs.get("logits")
    if node is None:
        return None
    value: Value = node.meta["value"]
    whole = node.meta.get("global_shape", value.shape)
    split = [dim for dim, (ours, all_ranks) in enumerate(zip(value.shape, whole, strict=True)) if ours != all_ranks]
    axis = {"dim": split[0], "axis": "tp"} if split else None
    return {"shape": [_size(dim) for dim in whole], "shard": axis, "dtype": dtype_name(value.dtype, dtype)}


def _size(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def dtype_name(dtype: DType, model_dtype: str) -> str:
    """ "float32"; of a tensor in the model's own dtype, that of the plan."""
    return model_dtype if dtype is MODEL_DTYPE else str(dtype).removeprefix("torch.")


def guards(variants: dict[Variant, ModelGraph]) -> list[dict[str, str]]:
    """Questions that the runtime answers once a batch: is the mask of ones, do positions restart inside a row."""
    found = []
    if any(variant.masked for variant in variants):
        found.append({"input": "attention_mask", "drop_when": "all"})
    if any(variant.packed for variant in variants):
        found.append({"input": "position_ids", "packed_when": "restarts"})
    return found


def stage_classes(text: str) -> list[str]:
    """Names of the classes in `STAGES = (...)` of an emitted module: `A`, or `partial(A, ...)`."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(t) for t in statement.targets] == ["STAGES"]:
            return [ast.unparse(e.args[0] if isinstance(e, ast.Call) else e) for e in statement.value.elts]
    raise ShardcError("model.py defines no STAGES", "compile the plan again")


# -- estimates and certificate -----------------------------------------------------------------------------------------
def _estimates(plan: CompiledPlan, parameters: dict[str, Any]) -> dict[str, Any]:
    """What a rank of each stage holds and does; FLOPs forward and backward of a token in a row of `sequence` tokens.

    attention_flops_per_token: the part of them that is proportional to the length of the row.
    microbatches_alive: how many have passed forward and not yet backward, at most."""
    itemsize = getattr(torch, plan.settings.dtype).itemsize
    cuts = [[*plan.costs.blocks].index(path) for path in plan.first_blocks]
    flops, flops_twice = plan.costs.of_stages(cuts), plan.costs_twice.of_stages(cuts)
    stages = []
    alive = peak_alive(plan.schedule)
    for stage, of_all_ranks, twice, microbatches in zip(plan.stages, flops, flops_twice, alive, strict=True):
        local = {name: p for graph in stage.values() for name, p in graph.parameters.items()}
        count = sum(prod(map(_part, p.shape)) for p in local.values() if not p.is_buffer)
        stages.append(
            {
                "parameters": count,
                "parameter_bytes": count * itemsize,
                "flops_per_token": of_all_ranks // plan.settings.tp,
                "attention_flops_per_token": (twice - of_all_ranks) // plan.settings.tp,
                "microbatches_alive": microbatches,
            }
        )
    seconds = [float(max(1, f)) for f in flops]
    step = simulate(plan.schedule, [s / 3 for s in seconds], [2 * s / 3 for s in seconds])
    return {
        "parameters": sum(prod(entry["shape"]) for entry in parameters.values()),
        "sequence": SEQUENCE,
        "stages": stages,
        "bubble": round(step.bubble_fraction, 4),
    }


def _part(dim: Dim) -> int:
    """Elements of a local dim; of an uneven one, an upper bound."""
    return dim if isinstance(dim, int) else dim.size


def certificate_data(certificate: Certificate, propagated: list[str]) -> dict[str, Any]:
    """certificate.json: each obligation with what it states and how many facts of the plan it was checked on."""
    return {
        "proved": certificate.proved,
        "obligations": [
            {"name": name, "facts": count, "states": _states(OBLIGATIONS.get(name))}
            for name, count in certificate.obligations.items()
        ],
        "opaque": certificate.opaque,
        "sharded_by_propagation": propagated,
    }


def _states(obligation: Callable[..., Iterator] | None) -> str:
    """The first paragraph of an obligation's docstring."""
    text = (obligation.__doc__ if obligation else None) or "Layouts: every operation takes what its type rule allows."
    return " ".join(text.split("\n\n")[0].split())
