"""Full tensors from their shards, and a Hugging Face folder from full tensors, one parameter at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from shardc.runtime.mesh import Mesh
from shardc.runtime.replace_folder import replacing
from shardc.runtime.schedule import Schedule
from shardc.runtime.shard_map import unshard_tensor
from shardc.runtime.spec import ParameterSpec, PlanSpec
from shardc.runtime.weights import INDEX_FILE, SINGLE_FILE

CONFIG_FILE = "config.json"


def gather(
    fetch: Callable[[str], Tensor | None], spec: PlanSpec, mesh: Mesh, schedule: Schedule
) -> Iterator[tuple[str, Tensor]]:
    """Yields (canonical name, full tensor on the CPU) on rank 0, in order of name; nothing elsewhere, but all must
    iterate.

    fetch: gives this rank's shard by canonical name, all of the plan's dtype; None, where a rank has no value, leaves
    it out. It is called on all dp ranks, and may send among them.
    Rank 0 holds one parameter at a time."""
    for name in sorted(spec.parameters):
        parameter = spec.parameters[name]
        local = fetch(name)
        if mesh.dp.coord == 0:
            shards = _collect(local, parameter, spec, mesh, schedule)
            if shards:
                yield name, unshard_tensor(shards, parameter.shard, mesh.tp, parameter.shape)


def _collect(
    local: Tensor | None, parameter: ParameterSpec, spec: PlanSpec, mesh: Mesh, schedule: Schedule
) -> list[Tensor]:
    """On rank 0 the shards of a parameter in order of tp coord, [] if they have no value; other holders send theirs."""
    pp = schedule.coord_of_stage[parameter.stages[0]]
    shards = []
    for tp in range(mesh.tp.size if parameter.shard is not None else 1):
        source = mesh.rank_at(dp=0, pp=pp, tp=tp)
        if source == 0:
            found = local
        elif mesh.rank == 0:
            found = _receive(parameter, source, spec, mesh, tp)
        else:
            if mesh.rank == source:
                _send(local, mesh)
            continue
        if mesh.rank == 0 and found is not None:
            shards.append(found.detach().cpu())
    return shards


def _send(local: Tensor | None, mesh: Mesh) -> None:
    dist.send(torch.tensor(local is not None, dtype=torch.int32, device=mesh.device), 0)
    if local is not None:
        dist.send(local.detach().contiguous(), 0)


def _receive(parameter: ParameterSpec, source: int, spec: PlanSpec, mesh: Mesh, tp: int) -> Tensor | None:
    present = torch.zeros((), dtype=torch.int32, device=mesh.device)
    dist.recv(present, source)
    if not present:
        return None
    shard = parameter.shard
    shape = parameter.shape if shard is None else shard.local_shape(parameter.shape, mesh.tp.at(tp))
    received = torch.empty(shape, dtype=spec.dtype, device=mesh.device)
    dist.recv(received, source)
    return received


def save_pretrained(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    spec: PlanSpec,
    mesh: Mesh,
    plan_folder: Path,
    max_shard_bytes: int,
) -> None:
    """Write config.json and safetensors files of at most max_shard_bytes, with an index if there are several.

    tensors: from gather, on every rank. A tied weight is written once, under its canonical name. The files are written
    into a folder beside `folder`, which takes its place at the end: a killed save leaves the old one whole. Other
    files in `folder` (a tokenizer) are kept. All ranks return when the folder is in place.
    """
    if mesh.rank == 0:
        with replacing(folder) as partial:
            _write_tensors(partial, tensors, spec, max_shard_bytes)
            shutil.copyfile(plan_folder / CONFIG_FILE, partial / CONFIG_FILE)
            _keep_other_files(folder, partial)
    else:
        for _ in tensors:
            raise AssertionError("only rank 0 receives tensors")
    if dist.is_initialized():
        dist.barrier()


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], spec: PlanSpec, max_shard_bytes: int) -> None:
    file_of = _files(spec, max_shard_bytes)
    pending: dict[str, Tensor] = {}
    names = list(file_of)
    for name, tensor in tensors:
        pending[name] = tensor.contiguous()
        following = names.index(name) + 1
        if following == len(names) or file_of[names[following]] != file_of[name]:
            save_file(pending, folder / file_of[name], metadata={"format": "pt"})
            pending = {}
    if len(set(file_of.values())) > 1:
        total = sum(_bytes(spec.parameters[name], spec) for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _files(spec: PlanSpec, max_shard_bytes: int) -> dict[str, str]:
    """File of each parameter, filled in order of name."""
    number, filled, number_of = 1, 0, {}
    for name in sorted(spec.parameters):
        size = _bytes(spec.parameters[name], spec)
        if filled and filled + size > max_shard_bytes:
            number, filled = number + 1, 0
        number_of[name] = number
        filled += size
    if number == 1:
        return dict.fromkeys(number_of, SINGLE_FILE)
    return {name: f"model-{index:05d}-of-{number:05d}.safetensors" for name, index in number_of.items()}


def _bytes(parameter: ParameterSpec, spec: PlanSpec) -> int:
    return torch.Size(parameter.shape).numel() * spec.dtype.itemsize


def _keep_other_files(folder: Path, partial: Path) -> None:
    """Carry over what a save does not write; weights of an earlier save go."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        is_weights = path.name == INDEX_FILE or (path.name.startswith("model") and path.suffix == ".safetensors")
        if path.is_dir() or is_weights or (partial / path.name).exists():
            continue
        shutil.copy2(path, partial / path.name)
