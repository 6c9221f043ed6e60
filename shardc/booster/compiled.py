"""The plan of a live model under a plugin: compiled by rank 0 once, kept on disk, the same on every rank."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardc.booster.agreement import on_rank_0, take_values_of_rank_0
from shardc.booster.module_weights import ModuleWeights
from shardc.booster.plan_cache import PlanCache
from shardc.booster.plan_key import key_of, replaced_functions
from shardc.booster.plugin import Recipe
from shardc.errors import ShardcError
from shardc.lazy import origin_of
from shardc.models.live import source_from_module
from shardc.models.source import hf_config, without_peft
from shardc.plan import load_plan
from shardc.runtime.plan import Plan
from shardc.runtime.weights import SeedWeights, Weights

if TYPE_CHECKING:
    from shardc.plan.compile import CompiledPlan
    from shardc.policy import Policy

# Plans are compiled in the dtypes of training; what is built from one may have another (float64 in tests).
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def plan_for(model: nn.Module, recipe: Recipe, dtype: torch.dtype, *, microbatches: int | None) -> Plan:
    """The plan that trains `model` as `recipe` says. Every rank calls it; rank 0 compiles, where no cache has it.

    microbatches: parts of a batch, None is the compiler's number. With recipe.plan nothing is compiled: that plan is
    compared with the model. Raises ShardcError, the same on every rank, for a model that cannot be compiled, a plan of
    another model, and sizes that do not divide the job.
    """
    _check_sizes(recipe)
    if recipe.plan is not None:
        on_rank_0(lambda: _check_plan(recipe.plan, model))
        return recipe.plan
    cache = PlanCache()
    name = _DTYPES.get(dtype, "float32")
    key, files = on_rank_0(lambda: _files(model, recipe, name, microbatches, cache))
    return load_plan(cache.folder(key, files))


def weights_of(model: nn.Module) -> Weights:
    """The values of the model's parameters, read when a plan is built. Every rank calls it.

    Where ranks have other values than rank 0, they take its own, as in DistributedDataParallel. Those of a model of
    lazy_init come from its folder, or from rank 0's seed. What is built has tensors of its own: the live model keeps
    its memory until the script drops it (`del model`, or the name bound to what boost returns)."""
    take_values_of_rank_0(model)
    origin = origin_of(without_peft(model))
    if isinstance(origin, SeedWeights):
        origin = SeedWeights(on_rank_0(lambda: origin.seed))
    return ModuleWeights(model, origin)


# -- compiling ---------------------------------------------------------------------------------------------------------
def _files(
    model: nn.Module, recipe: Recipe, dtype: str, microbatches: int | None, cache: PlanCache
) -> tuple[str | None, dict[str, bytes]]:
    """The plan's files, from the cache or compiled, and their key in the cache."""
    settings = {
        "tp": recipe.tp,
        "pp": recipe.pp,
        "sp": recipe.sequence_parallel,
        "schedule": recipe.schedule,
        "microbatches": microbatches,
        "dtype": dtype,
    }
    _check_functions(model)
    key = key_of(model, {**settings, "layers": recipe.layers_per_stage}, _text(recipe.policy))
    files = cache.read(key)
    if files is None:
        files = _compile(model, recipe, settings)
        cache.write(key, files)
    return key, files


def _text(policy: str | Path | None) -> str | None:
    try:
        return None if policy is None else Path(policy).read_text()
    except OSError as error:
        raise ShardcError(
            f"policy {policy}: {error.strerror}", "give the path of a file; `shardc policy show llama` prints one"
        ) from error


def _check_functions(model: nn.Module) -> None:
    """Raises ShardcError where a transformers model has functions that building it from its config leaves out."""
    name = next(replaced_functions(model), None) if hf_config(model) is not None else None
    if name is not None:
        raise ShardcError(
            f"boost: {name} was set on this one model, and is not compiled",
            "change it in its class before the model is made, or give boost a criterion in place of a loss function",
        )


def _compile(model: nn.Module, recipe: Recipe, settings: dict[str, Any]) -> dict[str, bytes]:
    from shardc.plan.compile import compile_plan
    from shardc.plan.folder import plan_files

    source = source_from_module(model)
    sizes = f"tp {recipe.tp}, pp {recipe.pp}"
    print(f"shardc: compiling {source.name} for {sizes} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    compiled = compile_plan(source, policy=_policy(source, recipe), **settings)
    _check_layers(compiled, recipe)
    files = plan_files(compiled)
    print(f"shardc: proved in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return files


def _policy(source: Any, recipe: Recipe) -> Policy | None:
    """The policy that the recipe names, with its layers of each stage as cuts; None is the model's own."""
    from shardc.plan.compile import choose_policy

    if recipe.policy is None and recipe.layers_per_stage is None:
        return None
    policy = choose_policy(source, None if recipe.policy is None else str(recipe.policy), recipe.tp)
    if recipe.layers_per_stage is None:
        return policy
    return replace(policy, cuts=tuple(itertools.accumulate(recipe.layers_per_stage[:-1])))


def _check_layers(compiled: CompiledPlan, recipe: Recipe) -> None:
    layers, blocks = recipe.layers_per_stage, len(compiled.costs.blocks)
    if layers is not None and sum(layers) != blocks:
        raise ShardcError(
            f"num_layers_per_stage={list(layers)}: {sum(layers)} layers, {compiled.source.name} has {blocks}",
            "give each stage its number of layers, or leave it out: stages are then balanced by cost",
        )


# -- sizes, and a plan that the user brings ----------------------------------------------------------------------------
def _check_sizes(recipe: Recipe) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % (recipe.tp * recipe.pp):
        raise ShardcError(
            f"boost: tp_size={recipe.tp} * pp_size={recipe.pp} does not divide the {world} process(es) of this job",
            f"start a multiple of {recipe.tp * recipe.pp} processes (shardc run --nproc_per_node "
            f"{recipe.tp * recipe.pp}), after shardc.launch_from_torch()",
        )


def _check_plan(plan: Plan, model: nn.Module) -> None:
    """Raises ShardcError where the plan is of a model with another config or other parameters."""
    config = hf_config(model)
    problems = [] if config is None else _other_fields(plan, config)
    problems = problems or list(_other_parameters(plan, model))
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ShardcError(
            f"boost: {'; '.join(problems[:4])}{more}",
            f"compile a plan of this model, or load the model of {plan.folder}",
        )


def _other_fields(plan: Plan, config: Any) -> list[str]:
    wanted = json.loads((plan.folder / "config.json").read_text())
    given = json.loads(config.to_json_string(use_diff=False))
    return [
        f"{name} is {given[name]!r}, the plan has {wanted[name]!r}"
        for name in sorted(wanted.keys() & given.keys())
        if name not in _NOT_OF_THE_MODEL and wanted[name] != given[name]
    ]


def _other_parameters(plan: Plan, model: nn.Module) -> Iterator[str]:
    live = dict(model.named_parameters(remove_duplicate=False))
    known = plan.spec.by_any_name()
    first: dict[int, str] = {}
    for name, spec in sorted(plan.spec.parameters.items()):
        found = {known_as: live[known_as] for known_as in (name, *spec.aliases) if known_as in live}
        if not found:
            yield f"{name} is missing in the model"
            continue
        value, *others = found.values()
        if tuple(value.shape) != spec.shape:
            yield f"{name} is {list(value.shape)}, the plan has {list(spec.shape)}"
        if any(other is not value for other in others):
            yield f"{' and '.join(found)} are one parameter in the plan, not in the model"
        same = first.setdefault(id(value), name)
        if same != name:
            yield f"{same} and {name} are one parameter in the model, not in the plan"
        if value.requires_grad and not spec.requires_grad:
            yield f"{name} is trained, the plan has it frozen"
    yield from (f"{name} is not in the plan" for name in live if name not in known)


# What a config says of how it was loaded, saved, or used for generation.
_NOT_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}
