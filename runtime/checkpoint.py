"""Full tensors from their shards, and a Hugging Face folder or one file from full tensors, a parameter at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file as save_safetensors
from torch import Tensor

from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import Mesh
from shardc.runtime.replace_folder import replacing, replacing_file
from shardc.runtime.schedule import Schedule
from shardc.runtime.shard_map import unshard_tensor
from shardc.runtime.spec import ParameterSpec, PlanSpec

CONFIG_FILE = "config.json"


# -- full tensors ------------------------------------------------------------------------------------------------------
def gather(
    fetch: Callable[[str], Tensor | None], spec: PlanSpec, mesh: Mesh, schedule: Schedule
) -> Iterator[tuple[str, Tensor]]:
    """Yields (canonical name, full tensor on the CPU) on rank 0, in order of name; nothing elsewhere, but all must
    iterate.

    fetch: gives this rank's shard by canonical name, all of the plan's dtype; None, where a rank has no value, leaves
    it out. It is called on all dp ranks, and may send among them.
    Rank 0 holds one parameter at a time."""
    for name in sorted(spec.parameters):
        whole = gather_one(fetch(name), spec.parameters[name], mesh, schedule, dtype=spec.dtype)
        if whole is not None:
            yield name, whole


def gather_one(
    local: Tensor | None, parameter: ParameterSpec, mesh: Mesh, schedule: Schedule, *, dtype: torch.dtype
) -> Tensor | None:
    """The full tensor of a parameter, or of one like it, on rank 0's CPU; None elsewhere, and where it has no value.

    local: this rank's shard, in `dtype`. Every rank calls it; dp ranks but the first do nothing."""
    if mesh.dp.coord != 0:
        return None
    shards = _collect(local, parameter, mesh, schedule, dtype)
    return unshard_tensor(shards, parameter.shard, mesh.tp, parameter.shape) if shards else None


def _collect(
    local: Tensor | None, parameter: ParameterSpec, mesh: Mesh, schedule: Schedule, dtype: torch.dtype
) -> list[Tensor]:
    """On rank 0 the shards of a parameter in order of tp coord, [] if they have no value; other holders send theirs."""
    pp = schedule.coord_of_stage[parameter.stages[0]]
    shards = []
    for tp in range(mesh.tp.size if parameter.shard is not None else 1):
        source = mesh.rank_at(dp=0, pp=pp, tp=tp)
        if source == 0:
            found = local
        elif mesh.rank == 0:
            found = _receive(parameter, source, mesh, tp, dtype)
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


def _receive(parameter: ParameterSpec, source: int, mesh: Mesh, tp: int, dtype: torch.dtype) -> Tensor | None:
    present = torch.zeros((), dtype=torch.int32, device=mesh.device)
    dist.recv(present, source)
    if not present:
        return None
    shard = parameter.shard
    shape = parameter.shape if shard is None else shard.local_shape(parameter.shape, mesh.tp.at(tp))
    received = torch.empty(shape, dtype=dtype, device=mesh.device)
    dist.recv(received, source)
    return received


# -- agreement ---------------------------------------------------------------------------------------------------------
@contextmanager
def agreed() -> Iterator[None]:
    """What fails inside on one rank fails on all, instead of leaving the others waiting. Every rank enters it.

    A rank raises its own error, others a ShardcError that says which rank failed and why; an OSError (a full disk)
    becomes a ShardcError. Inside, a rank must not wait for one that may have failed."""
    failure: Exception | None = None
    try:
        yield
    except OSError as error:
        failure = ShardcError(f"{error}", "free space, or choose a folder that can be written; nothing was replaced")
        failure.__cause__ = error
    except Exception as error:  # raised again when all ranks know
        failure = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if failure is None else f"{failure}")
        failed = next((rank for rank, text in enumerate(said) if text is not None), None)
        if failed is not None and failure is None:
            failure = ShardcError(*f"rank {failed}: {said[failed]}".split("\n  ", 1))
    if failure is not None:
        raise failure


@contextmanager
def drained(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Where the reader inside fails, the rest is received all the same: other ranks are sending it."""
    try:
        yield
    finally:
        for _ in tensors:
            pass


# -- files -------------------------------------------------------------------------------------------------------------
def save_pretrained(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    spec: PlanSpec,
    mesh: Mesh,
    plan_folder: Path,
    max_shard_bytes: int,
    *,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write config.json and safetensors files of at most max_shard_bytes, with an index if there are several.

    tensors: from gather, on every rank. A tied weight is written once, under its canonical name. The files are written
    into a folder beside `folder`, which takes its place at the end: a killed save leaves the old one whole. What else
    lies in `folder` (a tokenizer, an optimizer's files) is kept. finish: called with the folder before it is in place,
    to add files. All ranks return when it is in place, or raise what failed on rank 0.
    """
    sizes = {name: numel(parameter) * spec.dtype.itemsize for name, parameter in sorted(spec.parameters.items())}
    with agreed():
        if mesh.rank == 0:
            with drained(tensors), replacing(folder, is_old=written_as("model")) as partial:
                write_tensors(partial, tensors, sizes, max_shard_bytes, stem="model")
                shutil.copyfile(plan_folder / CONFIG_FILE, partial / CONFIG_FILE)
                if finish is not None:
                    finish(partial)
        else:
            send_all(tensors)


def save_file(
    path: Path, tensors: Iterator[tuple[str, Tensor]], spec: PlanSpec, mesh: Mesh, use_safetensors: bool | None
) -> None:
    """Write one file: safetensors with tied weights once, or torch's own format under all their names.

    use_safetensors: None goes by the name's end. Rank 0 holds the whole model. All ranks return when it is in place."""
    if use_safetensors is None:
        use_safetensors = path.suffix == ".safetensors"
    with agreed():
        if mesh.rank != 0:
            send_all(tensors)
            return
        whole = {name: tensor.contiguous() for name, tensor in tensors}
        with replacing_file(path) as partial:
            if use_safetensors:
                save_safetensors(whole, partial, metadata={"format": "pt"})
            else:
                names = {alias: name for name in whole for alias in (name, *spec.parameters[name].aliases)}
                torch.save({alias: whole[name] for alias, name in names.items()}, partial)


def send_all(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """On ranks but the first: take part in the gathering."""
    for _ in tensors:
        raise AssertionError("only rank 0 receives tensors")


def write_tensors(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], sizes: Mapping[str, int], max_shard_bytes: int, *, stem: str
) -> None:
    """Write safetensors files of at most max_shard_bytes, `stem`.safetensors or several with an index.

    sizes: bytes of each tensor, in the order in which they come. One file's tensors are in memory at a time."""
    file_of = _files(sizes, max_shard_bytes, stem)
    pending: dict[str, Tensor] = {}
    names = list(file_of)
    for position, (name, tensor) in enumerate(tensors):
        assert name == names[position]
        pending[name] = tensor.contiguous()
        if position + 1 == len(names) or file_of[names[position + 1]] != file_of[name]:
            save_safetensors(pending, folder / file_of[name], metadata={"format": "pt"})
            pending = {}
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _files(sizes: Mapping[str, int], max_shard_bytes: int, stem: str) -> dict[str, str]:
    """File of each tensor, filled in their order."""
    number, filled, number_of = 1, 0, {}
    for name, size in sizes.items():
        if filled and filled + size > max_shard_bytes:
            number, filled = number + 1, 0
        number_of[name] = number
        filled += size
    if number == 1:
        return dict.fromkeys(number_of, f"{stem}.safetensors")
    return {name: f"{stem}-{index:05d}-of-{number:05d}.safetensors" for name, index in number_of.items()}


def numel(parameter: ParameterSpec) -> int:
    """Elements of the whole parameter."""
    return torch.Size(parameter.shape).numel()


def written_as(stem: str) -> Callable[[str], bool]:
    """Whether a file of that name is one that write_tensors may have written with this stem."""
    return lambda name: name.startswith(stem) and name.endswith((".safetensors", ".safetensors.index.json"))
