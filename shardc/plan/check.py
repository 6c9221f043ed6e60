"""Prove a plan folder again from what lies in it, and load one whose model.py was edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.capture import ModelGraph, Variant
    from shardc.plan.folder import PlanFolder
    from shardc.runtime.plan import Plan
    from shardc.sharding.prove import Certificate, Finding


def load_plan(folder: str | Path) -> Plan:
    """The plan in a folder, ready to `build`. A model.py that was edited is proved again, or refused with the line."""
    from shardc.runtime.plan import load_plan as load

    return load(folder, prove=_prove_edit)


def _prove_edit(folder: Path, data: dict[str, Any]) -> None:
    certificate = check_folder(folder)
    if certificate.findings:
        raise ShardcError(f"{folder}: refuted: {certificate.findings[0]}", "undo the edit, or compile the plan again")


def check_folder(folder: str | Path, progress: Callable[[str], None] | None = None) -> Certificate:
    """The certificate of a plan in hand: its graphs and its parameter table, its stages, its schedule, its source.

    Raises ShardcError where the folder cannot be read; a wrong plan is reported in `findings`."""
    from shardc.plan.folder import read_folder

    plan = read_folder(folder)
    try:
        return _check(plan, progress or (lambda name: None))
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardcError(
            f"{plan.path}/plan.json: a field is missing or has another form ({type(error).__name__}: {error})",
            "compile the plan again",
        ) from error


def _check(plan: PlanFolder, progress: Callable[[str], None]) -> Certificate:
    from shardc.plan.compile import cut_variants
    from shardc.sharding.prove import Certificate, ShardedParameter, prove
    from shardc.sharding.shard import ShardedModel, localise_model
    from shardc.sharding.typing import Mesh

    data = plan.data
    progress("prove the graphs")
    graphs = plan.graphs()
    mesh_sizes = data["mesh"]["sub_axes"]
    mesh = Mesh({f"tp.{name}": n for name, n in mesh_sizes.items()} if mesh_sizes else {"tp": data["mesh"]["tp"]})
    parameters = {
        name: ShardedParameter(
            name,
            tuple(entry["shape"]),
            entry["requires_grad"],
            tuple(entry["aliases"]),
            entry["shard"],
            tuple(entry["grad_reduce"]),
        )
        for name, entry in data["parameters"].items()
    }
    certificate = Certificate()
    for graph in graphs.values():
        certificate.merge(prove(graph, parameters, mesh))
    if certificate.findings:
        return certificate
    progress("prove the stages")
    localise_model(ShardedModel(graphs, parameters, mesh, data["mesh"]["sequence_parallel"]))
    stages = cut_variants(graphs, [stage["first_block"] for stage in data["stages"][1:]])
    for name, obligation in OBLIGATIONS.items():
        count = 0
        for checked in obligation(plan, stages):
            count += 1
            if not isinstance(checked, str):
                certificate.findings.append(checked)
        certificate.obligations[name] = count
    return certificate


# -- obligations of a folder -------------------------------------------------------------------------------------------
Stages = list[dict["Variant", "ModelGraph"]]
Checked = Iterator["str | Finding"]


def _finding(obligation: str, where: str, what: str) -> Finding:
    from shardc.sharding.prove import Finding

    return Finding(obligation, where, what)


def _boundaries(plan: PlanFolder, stages: Stages) -> Checked:
    """Stages: each receives exactly the values with gradients that it needs, under the names and shapes sent to it."""
    from shardc.plan.describe import batch_names, stage_entries

    entries = plan.data["stages"]
    first_blocks = [entry["first_block"] for entry in entries[1:]]
    needed = stage_entries(stages, first_blocks, plan.data["dtype"], [entry["class"] for entry in entries])
    for entry, need, stage in zip(entries, needed, stages, strict=True):
        where = f"stage {entry['index']}"
        for key in ("receives", "sends", "logits"):
            if entry[key] != need[key]:
                yield _finding("stages", where, f"{key} {_names(entry[key])}, but its graph says {_names(need[key])}")
            else:
                yield where
        missing = set(batch_names(stage, {sent["name"] for sent in need["receives"]})) - set(entry["batch"])
        if missing:
            yield _finding("stages", where, f"takes {entry['batch']} of the batch and needs {sorted(missing)}")
        else:
            yield where


def _names(entry: Any) -> str:
    """What crosses, as "hidden_states [B, S, 64] bfloat16"."""
    rows = entry if isinstance(entry, list) else [entry] if entry else []
    texts = [
        f"{row.get('name', 'logits')} [{', '.join(map(str, row['shape']))}] {row.get('dtype', '')}" for row in rows
    ]
    return ", ".join(texts) or "nothing"


def _ties(plan: PlanFolder, stages: Stages) -> Checked:
    """Ties: the gradient of a parameter that several stages read is summed over exactly these stages."""
    from shardc.plan.describe import holders

    held = holders(stages)
    summed = {tie["parameter"]: tie["stages"] for tie in plan.data["ties"]}
    if len(summed) != len(plan.data["ties"]):
        yield _finding("ties", "ties", "a parameter is listed twice, so its gradient would be summed twice")
    for name, entry in plan.data["parameters"].items():
        if entry["stages"] != held.get(name):
            yield _finding(
                "ties", name, f"is said to be on stages {entry['stages']}, and stages {held.get(name)} read it"
            )
        elif len(entry["stages"]) > 1 and entry["requires_grad"] and summed.get(name) != entry["stages"]:
            what = f"is read by stages {entry['stages']}, and its gradient is summed over {summed.get(name)}"
            yield _finding("ties", name, what)
        elif name in summed and summed[name] != entry["stages"]:
            yield _finding("ties", name, f"is read by stages {entry['stages']} and listed as a tie of {summed[name]}")
        else:
            yield name


def _schedule(plan: PlanFolder, stages: Stages) -> Checked:
    """Schedule: each micro-batch passes each stage once each way, sends meet their receives, none waits for ever."""
    from shardc.pipeline.schedule_check import check_schedule

    if plan.schedule.num_stages != len(stages):
        what = f"is for {plan.schedule.num_stages} stages, and the plan has {len(stages)}"
        yield _finding("schedule", "schedule.json", what)
        return
    try:
        check_schedule(plan.schedule)
        yield "schedule.json"
    except ShardcError as error:
        yield _finding("schedule", "schedule.json", error.problem)


OBLIGATIONS: dict[str, Callable[[PlanFolder, Stages], Checked]] = {
    "stages": _boundaries,
    "ties": _ties,
    "schedule": _schedule,
}
