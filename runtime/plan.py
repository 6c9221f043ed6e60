"""Load a plan folder and build this rank's module from it. Never imports transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardc.runtime.errors import ShardcError
from shardc.runtime.fsdp import FSDP, FullyShardedState, check_layout
from shardc.runtime.gradients import tie_groups
from shardc.runtime.materialize import CONSTANTS_FILE, materialize
from shardc.runtime.memory import PLACEMENTS, MemoryEngine, find_placement
from shardc.runtime.mesh import Mesh
from shardc.runtime.module import PlanModule
from shardc.runtime.pipeline import Pipeline, open_links
from shardc.runtime.schedule import Schedule
from shardc.runtime.source import import_source
from shardc.runtime.spec import PlanSpec, parse_plan, with_dtype
from shardc.runtime.state import SeparateTensors, StateOptions, TrainingState
from shardc.runtime.weights import FolderWeights, SeedWeights, Weights

SOURCE_FILE = "model.py"

Prove = Callable[[Path, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan folder that was read and checked: what `shardc compile` wrote."""

    folder: Path
    data: dict[str, Any]
    spec: PlanSpec
    schedule: Schedule
    source: ModuleType

    def build(
        self,
        weights: str | Path | Weights | None = None,
        *,
        seed: int | None = None,
        mesh: Mesh | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        placement: str | None = None,
        options: StateOptions | None = None,
    ) -> PlanModule:
        """This rank's module. Every rank of the job calls it.

        weights: a Hugging Face folder of safetensors, or another source of them; or seed: random values, the same model
        under every layout. mesh: None makes one of the plan's sizes, dp taking the remaining ranks. dtype, device: None
        are the plan's and the mesh's. placement: "ddp", "zero1", "zero2" or "zero3" keeps the training state in flat
        chunks (runtime.memory) as `options` says, "fsdp" lets torch's fully_shard keep it (runtime.fsdp), None leaves
        each parameter a tensor with its own .grad.
        Raises ShardcError, before any collective, where weights, sizes, placement or source do not fit the plan."""
        if (weights is None) == (seed is None):
            raise ShardcError("plan.build needs weights or seed, one of them", "pass weights=<folder>, or seed=0")
        place = None if placement in (None, FSDP) else find_placement(placement)
        if placement == FSDP:
            check_layout(self.spec)
        source = _weights(weights, seed)
        source.check(self.spec.parameters.values())  # on every rank for all stages, so that no rank fails alone
        spec = self.spec if dtype is None else with_dtype(self.spec, dtype)
        if mesh is None:
            mesh = Mesh.create(tp=spec.tp, pp=spec.pp, sub_axes=spec.sub_axes, device=device)
        _check_mesh(spec, mesh)
        device = mesh.device if device is None else torch.device(device)
        stages: dict[int, nn.Module] = {}
        for index, coord in sorted(self.schedule.coord_of_stage.items()):
            if coord == mesh.pp.coord:
                with torch.device("meta"):
                    stages[index] = self.source.STAGES[index](mesh.tp)
        groups = tie_groups(spec, self.schedule, mesh)
        made: dict[str, nn.Parameter] = {}
        state: TrainingState | None = None
        options = options or StateOptions()
        if placement == FSDP and mesh.dp.size == 1:
            place = PLACEMENTS["ddp"]  # one rank has nothing to split
        if place is not None:
            state = MemoryEngine(stages, spec, mesh, self.schedule, source, device, place, groups, options)
        elif placement == FSDP:
            state = FullyShardedState(stages[0], spec, mesh, self.schedule, source, device, options)
        if state is not None:
            made.update(state.parameters)
        for index, stage in stages.items():
            materialize(stage, index, spec, mesh.tp, source, self.folder / CONSTANTS_FILE, device, made)
        pipeline = Pipeline(stages, spec.stages, self.schedule, mesh, open_links(self.schedule, mesh))
        return PlanModule(
            spec=spec,
            pipeline=pipeline,
            parameters=made,
            count_targets=self.source.count_targets,
            state=state or SeparateTensors(made, spec, mesh, self.schedule, groups),
            folder=self.folder,
        )


def _weights(weights: str | Path | Weights | None, seed: int | None) -> Weights:
    if weights is None:
        return SeedWeights(seed)
    return FolderWeights(weights) if isinstance(weights, (str, Path)) else weights


def load_plan(folder: str | Path, *, prove: Prove | None = None) -> Plan:
    """Read a plan folder and import its model.py.

    prove: called as prove(folder, data of plan.json) where model.py was edited since it was proved; it raises
    ShardcError if the edit is wrong. Raises ShardcError if the folder is no plan, was changed, or was edited and prove
    is None.
    """
    folder = Path(folder).absolute()
    data = _read_json(folder, "plan.json")
    spec = parse_plan(data)
    _check_hashes(folder, data, prove)
    schedule = Schedule.parse(_read_json(folder, "schedule.json"))
    if len(schedule.ranks) != spec.pp:
        raise ShardcError(
            f"{folder}: schedule.json is for pp={len(schedule.ranks)}, plan.json for pp={spec.pp}", "compile it again"
        )
    return Plan(folder, data, spec, schedule, import_source(folder / SOURCE_FILE, _source_name(folder)))


def verify_edited_source(folder: Path, data: dict[str, Any], prove: Prove | None) -> None:
    """model.py is not what was proved: have it proved again, or raise ShardcError."""
    if prove is None:
        raise ShardcError(
            f"{folder / SOURCE_FILE} was edited after it was proved",
            f"run `shardc check {folder}` to prove the edit, or compile the plan again",
        )
    prove(folder, data)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ShardcError(f"{folder} is no plan folder: it has no {name}", "make it with `shardc compile`") from None
    except json.JSONDecodeError as error:
        raise ShardcError(f"{folder / name} is not JSON: {error}", "compile the plan again") from None


def _check_hashes(folder: Path, data: dict[str, Any], prove: Prove | None) -> None:
    for name, expected in sorted(data["sha256"].items()):
        path = folder / name
        if not path.is_file():
            raise ShardcError(f"{folder} is no plan folder: it has no {name}", "make it with `shardc compile`")
        if hashlib.sha256(path.read_bytes()).hexdigest() == expected:
            continue
        if name != SOURCE_FILE:
            raise ShardcError(f"{path} was changed after the plan was written", "compile the plan again")
        verify_edited_source(folder, data, prove)


def _source_name(folder: Path) -> str:
    """Name of the module in a folder's model.py: several plans live in one process."""
    return f"shardc_plan_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _check_mesh(spec: PlanSpec, mesh: Mesh) -> None:
    sub_axes = {axis.name.removeprefix("tp."): axis.size for axis in mesh.tp.sub_axes}
    if (mesh.tp.size, mesh.pp.size, sub_axes) != (spec.tp, spec.pp, dict(spec.sub_axes or {})):
        raise ShardcError(
            f"{spec.model}: the plan is for tp={spec.tp}, pp={spec.pp}, sub_axes={spec.sub_axes}; "
            f"the mesh has tp={mesh.tp.size}, pp={mesh.pp.size}, sub_axes={sub_axes or None}",
            "leave out mesh=, or compile the plan for these sizes",
        )
