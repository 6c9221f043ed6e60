"""The plan of a live model under a plugin: compiled by rank 0 once, kept on disk, the same on every rank."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardc.booster.agreement import on_rank_0, take_values_of_rank_0
from shardc.booster.module_weights import ModuleWeights
from shardc.booster.plan_cache import PlanCache
from shardc.booster.plan_check import check_plan
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
        on_rank_0(lambda: check_plan(recipe.plan, model))
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


def _check_sizes(recipe: Recipe) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % (recipe.tp * recipe.pp):
        raise ShardcError(
            f"boost: tp_size={recipe.tp} * pp_size={recipe.pp} does not divide the {world} process(es) of this job",
            f"start a multiple of {recipe.tp * recipe.pp} processes (shardc run --nproc_per_node "
            f"{recipe.tp * recipe.pp}), after shardc.launch_from_torch()",
        )


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
