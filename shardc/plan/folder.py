"""The plan folder: its files, written whole or not at all, and read back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from shardc.capture import ModelGraph, Variant
from shardc.errors import ShardcError
from shardc.pipeline.schedule import Schedule
from shardc.plan.compile import CompiledPlan
from shardc.plan.describe import certificate_data, config_text, plan_data
from shardc.plan.graph_json import graphs_from_json
from shardc.plan.json_text import to_text
from shardc.runtime.replace_folder import replacing

PLAN, MODEL, CONFIG, SCHEDULE = "plan.json", "model.py", "config.json", "schedule.json"
CONSTANTS, CERTIFICATE = "constants.safetensors", "certificate.json"


def plan_files(plan: CompiledPlan) -> dict[str, bytes]:
    """Name -> content of every file of a plan. The same plan gives the same bytes."""
    config = config_text(plan)
    data = plan_data(plan, config)
    constants = {
        name: x.contiguous() for graph in plan.captured.variants.values() for name, x in sorted(graph.constants.items())
    }
    files = {
        MODEL: plan.text.encode(),
        CONFIG: config.encode(),
        SCHEDULE: plan.schedule.to_json().encode(),
        CONSTANTS: save(constants),
        CERTIFICATE: to_text(certificate_data(plan.sharded.certificate, plan.sharded.propagated)).encode(),
    }
    data["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return files | {PLAN: to_text(data).encode()}


def write_plan(plan: CompiledPlan, folder: str | Path) -> Path:
    """Write the folder, in the place of an older plan if there is one: a killed write leaves that one whole.

    Raises ShardcError rather than replace something that is not a plan."""
    folder = Path(folder).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / PLAN).is_file()):
        raise ShardcError(f"{folder} exists and is no plan folder", "give another folder by -o")
    files = plan_files(plan)
    with replacing(folder, is_old=lambda name: True) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)
    return folder


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """A plan folder as read; `graphs` are the sharded, uncut graphs."""

    path: Path
    data: dict[str, Any]
    schedule: Schedule
    text: str

    def graphs(self) -> dict[Variant, ModelGraph]:
        """The graphs, made anew at each call: a proof writes into them."""
        constants: dict[str, torch.Tensor] = load_file(self.path / CONSTANTS)
        try:
            return graphs_from_json(self.data["graphs"], constants)
        except KeyError as error:
            raise ShardcError(f"{self.path / PLAN}: field {error} is missing", "compile the plan again") from None


def read_folder(folder: str | Path) -> PlanFolder:
    """Read a plan folder. Raises ShardcError where it is none; nothing is judged and no code of it runs."""
    path = Path(folder).absolute()
    try:
        data = json.loads((path / PLAN).read_text())
        schedule = Schedule.from_json((path / SCHEDULE).read_text())
        return PlanFolder(path, data, schedule, (path / MODEL).read_text())
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise ShardcError(f"{folder} is no plan folder: it has no {name}", "make it with `shardc compile`") from None
    except json.JSONDecodeError as error:
        raise ShardcError(f"{path / PLAN} is not JSON: {error}", "compile the plan again") from None
