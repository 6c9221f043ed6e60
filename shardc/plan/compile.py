"""The passes of a compile, in order: a model's name in, a plan out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardc.capture import CapturedModel, ModelGraph, Variant, capture, window_of
from shardc.emit import emit
from shardc.errors import ShardcError
from shardc.models import ModelSource, resolve
from shardc.pipeline import block_paths, check_cuts, choose_cuts, cut, measure_costs
from shardc.pipeline.balance import SEQUENCE, Costs
from shardc.pipeline.schedule import Schedule
from shardc.pipeline.schedule_check import check_schedule
from shardc.pipeline.schedules import build_schedule
from shardc.plan.graph_json import graphs_to_json
from shardc.plan.refuted import Refuted
from shardc.policy import (
    AUTO,
    Policy,
    Rule,
    find_blocks,
    load_policy,
    match,
    paths_without_adapters,
    policy_for,
    roles_with_adapters,
)
from shardc.policy.types import LEAVES
from shardc.sharding.shard import ShardedModel, localise_model, shard

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    tp: int = 1
    pp: int = 1
    sp: bool = False
    schedule: str = "1f1b"
    microbatches: int = 1
    dtype: str = "bfloat16"


@dataclass(slots=True)
class CompiledPlan:
    """A proved plan, not yet written; `shardc.plan.folder.write_plan` writes it.

    costs_twice: of rows of twice the tokens, which shows what grows with the length of a row.
    graphs: the sharded, uncut graphs as JSON, for `shardc check`. first_blocks: where stages 1, 2, ... begin.
    seconds: of each pass, in order.
    """

    source: ModelSource
    settings: Settings
    policy: Policy
    sharded: ShardedModel
    captured: CapturedModel
    costs: Costs
    costs_twice: Costs
    graphs: dict[str, Any]
    first_blocks: list[str]
    stages: list[dict[Variant, ModelGraph]]
    schedule: Schedule
    text: str
    seconds: dict[str, float] = field(default_factory=dict)


class _Passes:
    """Runs the passes by name and keeps their times."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.progress:
            self.progress(name)
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result


def compile_plan(
    model: str | Callable[..., Any] | ModelSource,
    *,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    policy: str | Policy | None = None,
    dtype: str = "bfloat16",
    overrides: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> CompiledPlan:
    """Compile a model for tp * pp ranks (and any number of replicas of them).

    model: what `shardc compile --model` takes, a function that returns an nn.Module, or what `resolve` gives.
    sp: shard the residual stream over the sequence. microbatches: of a batch, default twice pp. policy: a file,
    default the bundled one. overrides: config fields. progress: called with the name of each pass as it begins.
    Raises ShardcError for a user's mistake, Refuted if the proof fails.
    """
    settings = _settings(tp, pp, sp, schedule, microbatches, dtype)
    run = _Passes(progress)
    actions = run("schedule", build_schedule, schedule, pp, settings.microbatches)  # first: it needs no model
    run("schedule", check_schedule, actions)
    source = model if isinstance(model, ModelSource) else run("resolve", resolve, model, overrides, settings.dtype)
    chosen = run("policy", choose_policy, source, policy, tp)
    captured = run("capture", _capture, source)
    roles, blocks = run("match", match_policy, chosen, captured.plain)
    costs, costs_twice = (
        run("balance", measure_costs, captured.plain, blocks, sequence) for sequence in (SEQUENCE, 2 * SEQUENCE)
    )
    cuts = run("balance", _choose_cuts, chosen, costs, pp)
    sharded = run("shard and prove", shard, captured, roles, tp=tp, sequence_parallel=sp)
    if sharded.certificate.findings:
        raise Refuted(sharded.certificate, "nothing was written; change the policy")
    graphs = run("keep graphs", graphs_to_json, sharded.variants) | {"window": captured.window}
    run("localise", localise_model, sharded)
    first_blocks = [[*costs.blocks][i] for i in cuts]
    stages = run("cut", cut_variants, sharded.variants, first_blocks)
    text = run("emit", emit, stages, window=captured.window, title=_title(source, settings))
    return CompiledPlan(
        source,
        settings,
        chosen,
        sharded,
        captured,
        costs,
        costs_twice,
        graphs,
        first_blocks,
        stages,
        actions,
        text,
        run.seconds,
    )


def _title(source: ModelSource, settings: Settings) -> str:
    sequence = ", sequence parallel" if settings.sp else ""
    return f"{source.name} for tp {settings.tp}, pp {settings.pp}{sequence}"


def _settings(tp: int, pp: int, sp: bool, schedule: str, microbatches: int | None, dtype: str) -> Settings:
    for option, size in (("--tp", tp), ("--pp", pp), ("--microbatches", microbatches)):
        if size is not None and (type(size) is not int or size < 1):
            raise ShardcError(f"{option} {size}: not a positive number", f"for example {option} 2")
    if sp and tp == 1:
        raise ShardcError("--sp shards the sequence over the tp ranks, and --tp is 1", "use --tp 2 or more with --sp")
    name = DTYPES.get(dtype, dtype)
    if name not in DTYPES.values():
        valid = ", ".join([*DTYPES, *DTYPES.values()])
        raise ShardcError(f"--dtype {dtype}: unknown; valid: {valid}", "use --dtype bf16")
    default = 1 if pp == 1 else 2 * pp
    return Settings(tp, pp, sp, schedule, microbatches or default, name)


def choose_policy(source: ModelSource, policy: str | Policy | None, tp: int) -> Policy:
    """The user's policy, else the one of the model's type; without tensor parallelism a model needs none."""
    if isinstance(policy, Policy):
        return policy
    if policy is not None:
        return load_policy(policy)
    try:
        return policy_for(source.config)
    except ShardcError:
        if tp > 1:
            raise
        return Policy(models=(), rules=(), blocks=None, cuts=AUTO, file="(none)")


def match_policy(policy: Policy, model: ModelGraph) -> tuple[dict[str, Rule], list[str]]:
    """The rule of each module that the policy names, and the blocks between which stages may be cut.

    The policy names modules as they are called without adapters."""
    names = {
        path: next((base.__name__ for base in kind.__mro__ if base.__name__ in LEAVES), kind.__name__)
        for path, kind in model.module_classes.items()
        if path
    }
    paths = paths_without_adapters(names)
    without = {path: names[here] for path, here in paths.items()}
    wanted = {paths[path] for path in find_blocks(policy, without)}
    blocks = [path for path in block_paths(model) if path in wanted or policy.blocks is None]
    return roles_with_adapters(match(policy, without, blocks), names), blocks


def _capture(source: ModelSource) -> CapturedModel:
    return capture(source.make, window=window_of(source.config))


def _choose_cuts(policy: Policy, costs: Costs, pp: int) -> list[int]:
    """The policy's own cuts, else the best; with one stage there is nothing to choose."""
    if pp == 1:
        return []
    if policy.cuts == AUTO:
        return choose_cuts(costs, pp)
    return check_cuts(policy.cuts, len(costs.blocks), pp, policy.place)


def cut_variants(variants: dict[Variant, ModelGraph], first_blocks: list[str]) -> list[dict[Variant, ModelGraph]]:
    """The stages of every variant. Raises ShardcError where the variants would send different values."""
    stages: list[dict[Variant, ModelGraph]] = [{} for _ in range(len(first_blocks) + 1)]
    for variant, model in variants.items():
        for stage, graph in zip(stages, cut(model, first_blocks), strict=True):
            stage[variant] = graph
    for index, stage in enumerate(stages[:-1]):
        sent = {v: {name: node.meta["value"] for name, node in g.outputs.items()} for v, g in stage.items()}
        first = next(iter(sent.values()))
        for variant, values in sent.items():
            if values != first:
                raise ShardcError(
                    f"stage {index} sends {first}, but {values} for a batch that is {variant.name}",
                    "cut elsewhere: pipeline: {cuts: [...]} in the policy",
                )
    return stages
