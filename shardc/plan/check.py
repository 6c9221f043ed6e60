"""Prove a plan folder again from what lies in it, and load one whose model.py was edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardc.errors import ShardcError
from shardc.plan.refuted import Refuted

if TYPE_CHECKING:
    from torch import Tensor, fx

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
        raise Refuted(certificate, f"undo the edit of {folder}, or compile the plan again")


def check_folder(folder: str | Path, progress: Callable[[str], None] | None = None) -> Certificate:
    """The certificate of a plan in hand: its graphs and its parameter table, its stages, its schedule, its source.

    Raises ShardcError where the folder cannot be read; a wrong plan is reported in `findings`."""
    from shardc.capture.patches import collection_paused
    from shardc.plan.folder import read_folder

    plan = read_folder(folder)
    try:
        with collection_paused():
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
    progress("prove stages, schedule and source")
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


def _source(plan: PlanFolder, stages: Stages) -> Checked:
    """Source: model.py, traced again in training and in evaluation, computes what the graphs say on every rank."""
    from shardc.emit.compare import compare
    from shardc.emit.retrace import Memo
    from shardc.runtime.source import import_source

    mesh = plan.data["mesh"]
    try:
        source = import_source(plan.path / "model.py", "shardc_checked_plan")
        memo: Memo = {}
        for index, stage in enumerate(stages):
            window = plan.data["graphs"]["window"]
            compare(source.STAGES[index], stage, window=window, tp=mesh["tp"], sub_axes=mesh["sub_axes"], memo=memo)
            yield f"stage {index}"
        yield from _count(source, stages)
    except ShardcError as error:
        yield _finding("source", "model.py", error.problem)
    except Exception as error:  # of the file itself, which may do anything
        yield _finding("source", "model.py", f"cannot be run: {type(error).__name__}: {error}")


def _count(source: ModuleType, stages: Stages) -> Checked:
    """`count_targets` gives the graph's count, on labels of several shapes with some of them ignored."""
    import torch

    for graph in stages[-1].values():
        for rows, length in ((1, 2), (3, 7), (2, 16)):
            labels = torch.randint(0, 5, (rows, length), generator=torch.Generator().manual_seed(length))
            labels[labels == 0] = -100
            expected = evaluate(graph.outputs["count"], {"labels": labels})
            found = source.count_targets(labels)
            if int(found) != int(expected):
                what = f"count_targets gives {int(found)} targets where the loss has {int(expected)}"
                yield _finding("source", "model.py", what)
                return
            yield "count_targets"


def evaluate(wanted: fx.Node, inputs: dict[str, Tensor]) -> Tensor:
    """The value of a node that follows from the inputs alone, on the CPU; inputs are rows of one length."""
    from torch.fx.node import Node, map_aggregate

    from shardc.capture.symbols import DEVICE, Size

    rows, length = next(iter(inputs.values())).shape
    known: dict[fx.Node, Any] = {}

    def load(item: Any) -> Any:
        if item is DEVICE:
            return "cpu"
        if isinstance(item, Size):
            return item.at(rows, length)
        return value(item) if isinstance(item, Node) else item

    def value(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return inputs[node.target]
        if node not in known:
            args, kwargs = map_aggregate((node.args, dict(node.kwargs)), load)
            known[node] = node.target(*args, **kwargs)
        return known[node]

    return value(wanted)


OBLIGATIONS: dict[str, Callable[[PlanFolder, Stages], Checked]] = {
    "stages": _boundaries,
    "ties": _ties,
    "schedule": _schedule,
    "source": _source,
}
