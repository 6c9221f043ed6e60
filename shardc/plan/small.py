"""A plan folder made small, to be run on a laptop: the same stages, schedule and source, with other sizes."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardc.errors import ShardcError
from shardc.models import ModelSource, reduced_config, resolve, source_from_config
from shardc.models.overrides import pattern_length, per_layer_lists
from shardc.plan.check import check_folder
from shardc.plan.compile import CompiledPlan, compile_plan
from shardc.plan.describe import plan_data
from shardc.plan.folder import CONFIG, CONSTANTS, MODEL, PlanFolder
from shardc.plan.json_text import to_text
from shardc.plan.refuted import Refuted
from shardc.plan.resize import Resized, resize
from shardc.policy import AUTO, Policy, Rule

_WINDOW = 10  # tokens of a sliding window: long enough to be captured on both sides of it, shorter than verify's rows
_VOCABULARY = 101  # of the reduced config
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """says: what its source is, in words. edited: lines of the folder's model.py that no compile wrote.

    prove: of an edited source, to be called with the folder that the plan was written to; raises ShardcError."""

    plan: CompiledPlan
    says: str
    edited: list[int]
    prove: Callable[[Path], None] | None


def small_plan(folder: PlanFolder, note: Progress) -> SmallPlan:
    """The plan of a folder at small sizes, in float32; it runs the folder's model.py and schedule.json.

    The model is compiled again, at its own sizes and at the small ones. What plan.json says must be what this gives;
    the file says the same at the small sizes (`resize`), hand edits included.
    Raises ShardcError where the folder is another model's, or an edit has no counterpart at the small sizes.
    """
    large = _compile_again(folder, note)
    fresh = json.loads(to_text(plan_data(large, "")))
    _require_same(folder, large, fresh)
    small = compile_small(large, is_function(large.source.name), note)
    resized = resize(folder.text, large.text, small.text)
    prove = None
    if resized.edited:
        graphs_agree = fresh["graphs"] == folder.data["graphs"]

        def prove(written: Path) -> None:
            _prove(written, resized, graphs_agree)

    plan = replace(small, text=resized.text, schedule=folder.schedule)
    return SmallPlan(plan, _says(folder, resized, small.source is not large.source), resized.edited, prove)


def is_function(name: str) -> bool:
    """Whether a model is what a user's function returns, called without arguments."""
    return ".py:" in name


# -- the model, compiled again -----------------------------------------------------------------------------------------
def _compile_again(folder: PlanFolder, note: Progress) -> CompiledPlan:
    """The folder's model at its own sizes, with its policy, settings and cuts."""
    data = folder.data
    name = data["model"]["name"]
    source = resolve(name) if is_function(name) else replace(resolve(str(folder.path / CONFIG)), name=name)
    options = {
        "tp": data["mesh"]["tp"],
        "pp": data["mesh"]["pp"],
        "sp": data["mesh"]["sequence_parallel"],
        "microbatches": folder.schedule.num_microbatches,
        "dtype": data["dtype"],
        "progress": lambda step: note(f"{step}, again"),
    }
    policy = _policy(data["policy"])
    plan = compile_plan(source, policy=policy, **options)
    first_blocks = [stage["first_block"] for stage in data["stages"][1:]]
    if plan.first_blocks == first_blocks:
        return plan
    blocks = [*plan.costs.blocks]
    unknown = [path for path in first_blocks if path not in blocks]
    if unknown:
        raise ShardcError(f"{folder.path}/plan.json: the model has no block {unknown[0]}", "compile the plan again")
    return compile_plan(source, policy=replace(policy, cuts=tuple(map(blocks.index, first_blocks))), **options)


def _policy(data: dict[str, Any]) -> Policy:
    """The policy that plan.json holds, but for its cuts."""
    rules = tuple(Rule(row["pattern"], row["role"], row["optional"], data["file"], 0) for row in data["rules"])
    return Policy(tuple(data["models"]), rules, data["pipeline"]["blocks"], AUTO, data["file"])


_COMPARED = (
    "mesh",
    "pad_sequence",
    "shortest_sequence",
    "masked_rows_see_padding",
    "guards",
    "parameters",
    "buffers",
    "ties",
    "stages",
)
_FREE = {"init", "class"}  # of a parameter, of a stage: no rank computes with them


def _require_same(folder: PlanFolder, plan: CompiledPlan, fresh: dict[str, Any]) -> None:
    """What plan.json and the constants say is what the model gives: the small plan has it from the model."""
    for key in _COMPARED:
        found = _difference(folder.data[key], fresh[key], key)
        if found:
            where, one, other = found
            raise ShardcError(
                f"{folder.path}/plan.json: {where} is {_short(one)}, and {_short(other)} for the model as it is now",
                f"compile the plan again; {plan.source.name} was called without arguments"
                if is_function(plan.source.name)
                else "compile the plan again",
            )
    constants = load_file(folder.path / CONSTANTS)
    expected = {name: x for graph in plan.captured.variants.values() for name, x in graph.constants.items()}
    for name in sorted({*constants, *expected}):
        if name not in constants or name not in expected or not torch.equal(constants[name], expected[name]):
            raise ShardcError(
                f"{folder.path / CONSTANTS}: {name} is not that of the model as it is now", "compile the plan again"
            )


def _difference(one: Any, other: Any, where: str) -> tuple[str, Any, Any] | None:
    """The first place at which two JSON values differ, and what they have there."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if key not in _FREE]
        found = (_difference(one.get(key), other.get(key), f"{where}.{key}") for key in keys)
        return next(filter(None, found), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next(filter(None, found), None)
    return None if one == other else (where, one, other)


def _short(item: Any) -> str:
    text = "missing" if item is None else json.dumps(item)
    return text if len(text) <= 60 else f"{text[:56]} ..."


# -- the small model ---------------------------------------------------------------------------------------------------
def compile_small(large: CompiledPlan, from_function: bool, note: Progress) -> CompiledPlan:
    """The plan of the same model at small sizes, in float32, with as many stages.

    A plain nn.Module keeps its sizes. So does what a function made of a transformers model: it is made small by its
    config where that alone gives the same file."""
    config, cuts = large.source.config, [[*large.costs.blocks].index(path) for path in large.first_blocks]
    if config is not None and (not from_function or _follows_config(large.source)):
        less, fewer = small_config(config, large.settings.tp, cuts, len(large.costs.blocks))
        small = _compile(large, source_from_config(less, large.source.name), fewer, note)
        if not from_function or not resize(large.text, large.text, small.text).restated:
            return small
    return _compile(large, large.source, cuts, note)


def _compile(large: CompiledPlan, source: ModelSource, cuts: list[int], note: Progress) -> CompiledPlan:
    settings = large.settings
    return compile_plan(
        source,
        tp=settings.tp,
        pp=settings.pp,
        sp=settings.sp,
        schedule=settings.schedule,
        microbatches=settings.microbatches,
        policy=replace(large.policy, cuts=tuple(cuts) if cuts else AUTO),
        dtype="float32",
        progress=lambda step: note(f"{step}, small"),
    )


def _follows_config(source: ModelSource) -> bool:
    """Whether a function's model has the modules and parameters of its config's."""
    with torch.device("meta"):
        models = source.make(), source_from_config(source.config, source.name).make()
    kinds = [[(path, type(module)) for path, module in model.named_modules()] for model in models]
    shapes = [[(name, p.shape, p.requires_grad) for name, p in model.named_parameters()] for model in models]
    return kinds[0] == kinds[1] and shapes[0] == shapes[1]


def small_config(config: Any, tp: int, cuts: list[int], num_blocks: int) -> tuple[Any, list[int]]:
    """`reduced_config` and its cuts, such that the plan's file has the form that it has for `config`.

    Each stage keeps its place in the pattern of layers, and enough layers that the pattern shows: two, or two patterns.
    The vocabulary is even over tp where it is in `config`, and a window is long enough to have a side below it.
    """
    if config.num_hidden_layers != num_blocks:  # blocks of another kind too: their cuts say nothing of a small model
        return reduced_config(config, len(cuts) + 1, tp), []
    period = _period(config)
    bounds = [0, *cuts, num_blocks]
    kept = [_fewer(end - start, period) for start, end in itertools.pairwise(bounds)]
    small = copy.deepcopy(reduced_config(config, sum(kept) - 1, tp))
    if config.vocab_size % tp == 0:
        small.vocab_size = -(-_VOCABULARY // tp) * tp
    if getattr(small, "sliding_window", None) is not None:
        small.sliding_window = min(_WINDOW, config.sliding_window)
    return small, [sum(kept[:stage]) for stage in range(1, len(kept))]


def _fewer(layers: int, period: int) -> int:
    """The least number of layers from two patterns on, and from two layers, that ends where `layers` ends."""
    least = max(2, 2 * period)
    return layers if layers < least else least + (layers - least) % period


def _period(config: Any) -> int:
    """Layers after which their kinds repeat."""
    fields = config.to_dict()
    lists = per_layer_lists(fields, config.num_hidden_layers)
    return pattern_length(list(zip(*(fields[key] for key in lists), strict=True))) if lists else 1


# -- the source --------------------------------------------------------------------------------------------------------
def _says(folder: PlanFolder, resized: Resized, by_config: bool) -> str:
    says = f"{folder.path / MODEL}{' with the sizes of the config below' if by_config else ' at its own sizes'}"
    if resized.edited:
        data = folder.data
        as_written = hashlib.sha256(folder.text.encode()).hexdigest() == data["sha256"][MODEL]
        versions = ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items()))
        by = f"as it was written by {versions}, other than now" if as_written else "edited by hand"
        says += f", {by} in {_lines(resized.edited)}, which was proved again"
    if resized.restated:
        says += f"; {_lines(resized.restated)} in another form at these"
    return says


def _lines(numbers: list[int]) -> str:
    """ "line 3", "lines 3, 7-9"; of many, the first."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    more = f" and {len(texts) - 6} more places" if len(texts) > 6 else ""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(texts[:6])}{more}"


def _prove(written: Path, resized: Resized, graphs_agree: bool) -> None:
    """Prove an edited file at the small sizes: against the graphs of the model, whatever plan.json says.

    graphs_agree: whether plan.json has the graphs of the model, so that the edit is proved at its own sizes."""
    certificate = check_folder(written)
    if not certificate.findings:
        return
    certificate.findings[:] = [
        replace(finding, what=_own_lines(finding.what, resized)) for finding in certificate.findings
    ]
    if not graphs_agree:
        raise Refuted(certificate, "model.py and plan.json agree with each other and not with the model: compile again")
    raise ShardcError(
        f"the edit of model.py is proved at its own sizes and has no counterpart at the small ones: "
        f"{certificate.findings[0].what}",
        "undo it to run the plan small, or write sizes as those of a tensor, x.shape[-1]",
    )


def _own_lines(text: str, resized: Resized) -> str:
    """Lines of the small file, in a message, as those of the file in the folder."""
    return re.sub(r"model\.py:(\d+)", lambda found: f"model.py:{resized.line_of[int(found[1]) - 1]}", text)
