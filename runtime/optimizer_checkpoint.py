"""What an optimizer needs to go on, in a folder that any layout reads.

optimizer.json        the class, the parameter names of each group, the layout that saved it
optimizer.safetensors (or several files and an index) `NAME/master` and `NAME/KEY` of each state tensor, whole, as the
                      parameter lies in a Hugging Face checkpoint
state.pt              options of the groups, numbers of the state (`step`), random states of all ranks, the caller's own
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime import checkpoint, rng
from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import Mesh
from shardc.runtime.module import PlanModule
from shardc.runtime.pieces import gather_pieces
from shardc.runtime.replace_folder import replacing
from shardc.runtime.state import OptimizedState, Piece
from shardc.runtime.weights import FolderWeights

FORMAT = 1
INDEX, STATE, STEM = "optimizer.json", "state.pt", "optimizer"
MASTER = "master"
# How a step is computed, not what: these stay as they are when a checkpoint is loaded.
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True, slots=True)
class _Kept:
    """What an optimizer keeps of one parameter. dtypes: of its tensors by key, the master's too. numbers: by key."""

    group: int
    dtypes: dict[str, torch.dtype]
    numbers: dict[str, float]


def save_optimizer(
    folder: Path,
    module: PlanModule,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Mapping[str, Any],
    max_file_bytes: int = 2**30,
) -> None:
    """Write masters, states and random states. Every rank calls it.

    optimizer: over `module.state.masters`. extra: of torch.save, whose weights_only load returns it. max_file_bytes:
    of a file of tensors; rank 0 holds one file in memory, or one tensor where that is larger.
    They replace older ones as a whole; what else lies in the folder, such as the model, is kept. Raises ShardcError on
    every rank for what fails on one."""
    state, mesh = _state_of(module), module.mesh
    kept = _merged(_kept_here(module, state, optimizer))
    randoms = _on_every_rank(rng.state_dict())
    tensors = _tensors(module, state, optimizer, kept)
    sizes = {
        _key(name, key): checkpoint.numel(module.spec.parameters[name]) * dtype.itemsize
        for name, of_one in sorted(kept.items())
        for key, dtype in of_one.dtypes.items()
    }
    with checkpoint.agreed():
        if mesh.rank != 0:
            checkpoint.send_all(tensors)
            return
        with checkpoint.drained(tensors), replacing(folder, is_old=checkpoint.written_as(STEM)) as partial:
            checkpoint.write_tensors(partial, tensors, sizes, max_file_bytes, stem=STEM)
            options = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
            numbers = {
                name: of_one.numbers for name, of_one in kept.items() if of_one.numbers or len(of_one.dtypes) > 1
            }
            content = {"options": options, "numbers": numbers, "random": randoms, "extra": dict(extra)}
            torch.save(content, partial / STATE)
            (partial / INDEX).write_text(json.dumps(_index(module, optimizer, kept), indent=2, sort_keys=True) + "\n")


def load_optimizer(folder: Path, module: PlanModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Go on from a folder of save_optimizer, of any layout; returns its `extra`. Every rank calls it.

    Parameters become what the masters are. Random states are restored where the layout is the one that saved them.
    Raises ShardcError, on every rank and before anything is changed, for another class, other groups, another model."""
    state = _state_of(module)
    with checkpoint.agreed():
        index, content, weights = _read(folder)
    groups = _groups(module, state, optimizer)
    with checkpoint.agreed():
        _check(folder, index, weights, module, optimizer, groups)
        templates = [_template(optimizer, number, module.mesh) for number in range(len(optimizer.param_groups))]
        numbers = _numbers_of_masters(module, state, content["numbers"])
    for group, options in zip(optimizer.param_groups, content["options"], strict=True):
        group.update({key: _as_is(group.get(key), x) for key, x in options.items() if key not in _IMPLEMENTATION})
    _fill(module, state, optimizer, weights, templates, numbers)
    state.publish()
    if index["layout"] == _layout(module):
        rng.load_state_dict(content["random"][module.mesh.rank])
    return content["extra"]


# -- what is there -----------------------------------------------------------------------------------------------------
def _state_of(module: PlanModule) -> OptimizedState:
    if not hasattr(module.state, "masters"):
        raise ShardcError(
            "the optimizer's state is the script's own: the plan was built without a placement",
            'build it with plan.build(placement="ddp"), or save optimizer.state_dict() on each rank',
        )
    return module.state


def _layout(module: PlanModule) -> dict[str, Any]:
    mesh = module.mesh
    return {"dp": mesh.dp.size, "pp": mesh.pp.size, "tp": mesh.tp.size, "stages": len(module.spec.stages)}


def _key(name: str, key: str) -> str:
    return f"{name}/{key}"


def _kept_here(module: PlanModule, state: OptimizedState, optimizer: torch.optim.Optimizer) -> dict[str, _Kept]:
    """Of the parameters that this rank holds a piece of."""
    group_of = {id(master): i for i in range(len(optimizer.param_groups)) for master in state.masters(i)}
    found = {}
    for name in module.spec.parameters:
        piece = state.piece(name)
        if piece is None:
            continue
        dtypes, numbers = {MASTER: piece.master.dtype}, {}
        for key, value in optimizer.state.get(piece.master, {}).items():
            if isinstance(value, Tensor) and value.dim():
                dtypes[key] = value.dtype
            elif value is not None:
                numbers[key] = float(value)
        found[name] = _Kept(group_of[id(piece.master)], dtypes, numbers)
    return found


def _merged(here: dict[str, _Kept]) -> dict[str, _Kept]:
    """Of all parameters, on every rank."""
    return {name: kept for found in reversed(_on_every_rank(here)) for name, kept in found.items()}


def _on_every_rank(value: Any) -> list[Any]:
    """That of each rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _tensors(
    module: PlanModule, state: OptimizedState, optimizer: torch.optim.Optimizer, kept: Mapping[str, _Kept]
) -> Iterator[tuple[str, Tensor]]:
    """(`NAME/KEY`, whole tensor on the CPU) on rank 0; nothing elsewhere, but all must iterate."""
    mesh, schedule = module.mesh, module.pipeline.schedule
    for name, of_one in sorted(kept.items()):
        spec = module.spec.parameters[name]
        pieces = [state.piece(name, coord) for coord in range(mesh.dp.size)]
        own = pieces[mesh.dp.coord]
        for key, dtype in of_one.dtypes.items():
            held = None if own is None else _held(own, optimizer, key)
            flat = gather_pieces(pieces, held, mesh, dtype=dtype)
            shape = spec.shape if spec.shard is None else spec.shard.local_shape(spec.shape, mesh.tp)
            local = None if flat is None else flat.view(shape)
            whole = checkpoint.gather_one(local, spec, mesh, schedule, dtype=dtype)
            if whole is not None:
                yield _key(name, key), whole


def _held(piece: Piece, optimizer: torch.optim.Optimizer, key: str) -> Tensor:
    tensor = piece.master if key == MASTER else optimizer.state[piece.master][key]
    return tensor.detach().view(-1)


def _index(module: PlanModule, optimizer: torch.optim.Optimizer, kept: Mapping[str, _Kept]) -> dict[str, Any]:
    names = [sorted(n for n, of_one in kept.items() if of_one.group == i) for i in range(len(optimizer.param_groups))]
    return {"format": FORMAT, "class": type(optimizer).__name__, "groups": names, "layout": _layout(module)}


# -- reading -----------------------------------------------------------------------------------------------------------
def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any], FolderWeights]:
    if not (folder / INDEX).is_file():
        raise ShardcError(f"{folder} holds no {INDEX}", "pass a folder that booster.save_optimizer wrote")
    try:
        index = json.loads((folder / INDEX).read_text())
        content = torch.load(folder / STATE, weights_only=True)
    except Exception as error:  # of json, zipfile, pickle or torch, as the damage has it
        raise ShardcError(f"{folder} cannot be read: {error}", "pass an older checkpoint") from error
    if index["format"] != FORMAT:
        raise ShardcError(f"{folder}: format {index['format']}, this shardc reads {FORMAT}", "load it by the other one")
    return index, content, FolderWeights(folder, stem=STEM)


def _groups(module: PlanModule, state: OptimizedState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names in each group."""
    here = {name: kept.group for name, kept in _kept_here(module, state, optimizer).items()}
    group_of = {name: group for found in _on_every_rank(here) for name, group in found.items()}
    return [sorted(n for n, group in group_of.items() if group == i) for i in range(len(optimizer.param_groups))]


def _check(
    folder: Path,
    index: dict[str, Any],
    weights: FolderWeights,
    module: PlanModule,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]],
) -> None:
    advice = "make the optimizer as in the run that saved it"
    if index["class"] != type(optimizer).__name__:
        raise ShardcError(f"{folder} is of {index['class']}, the optimizer is {type(optimizer).__name__}", advice)
    if len(index["groups"]) != len(groups):
        raise ShardcError(f"{folder} has {len(index['groups'])} parameter groups, the optimizer {len(groups)}", advice)
    for number, (saved, live) in enumerate(zip(index["groups"], groups, strict=True)):
        only = sorted(set(saved) ^ set(live))
        if only:
            side = "the checkpoint" if only[0] in saved else "the optimizer"
            raise ShardcError(f"{folder}: group {number} holds {only[0]} in {side} alone", advice)
    specs = [module.spec.parameters[name] for names in groups for name in names]
    weights.check(replace(spec, name=_key(spec.name, MASTER), aliases=()) for spec in specs)


def _template(optimizer: torch.optim.Optimizer, number: int, mesh: Mesh) -> dict[str, Any]:
    """What the optimizer keeps of a parameter of a group, as it makes it in its first step."""
    probe = nn.Parameter(torch.zeros(1, device=mesh.device))
    taken = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    scratch = type(optimizer)([{**optimizer.param_groups[number], "params": [probe]}], **defaults)
    probe.grad = torch.zeros_like(probe)
    scratch.step()
    return dict(scratch.state[probe])


def _numbers_of_masters(
    module: PlanModule, state: OptimizedState, saved: Mapping[str, Mapping[str, float]]
) -> dict[nn.Parameter, dict[str, float]]:
    """The numbers of each master of this rank. Raises ShardcError where its parameters were saved with other ones."""
    found: dict[nn.Parameter, tuple[str, dict[str, float]]] = {}
    for name in module.spec.parameters:
        piece = state.piece(name)
        if piece is None or name not in saved:  # it had no gradient yet
            continue
        first, numbers = found.setdefault(piece.master, (name, dict(saved[name])))
        if numbers != saved[name]:
            key = next(key for key in saved[name] if numbers.get(key) != saved[name][key])
            raise ShardcError(
                f"{first} has {key} {numbers.get(key)}, {name} {saved[name][key]}: they lie in one chunk here",
                "load it on the layout that saved it",
            )
    return {master: numbers for master, (_, numbers) in found.items()}


def _fill(
    module: PlanModule,
    state: OptimizedState,
    optimizer: torch.optim.Optimizer,
    weights: FolderWeights,
    templates: Sequence[Mapping[str, Any]],
    numbers: Mapping[nn.Parameter, Mapping[str, float]],
) -> None:
    """Masters and states of this rank; it reads its own parts, and sends nothing."""
    for number, template in enumerate(templates):
        for master in state.masters(number):
            optimizer.state.pop(master, None)
            if master in numbers:
                optimizer.state[master] = {
                    key: _made(x, numbers[master].get(key), master) for key, x in template.items()
                }
    for name, spec in module.spec.parameters.items():
        piece = state.piece(name)
        if piece is None:
            continue
        own = optimizer.state.get(piece.master, {})
        targets = {MASTER: piece.master.data} | {k: x for k, x in own.items() if isinstance(x, Tensor) and x.dim()}
        for key, target in targets.items():
            stored = replace(spec, name=_key(name, key), aliases=())
            if weights.find(stored) is None:  # it had no state yet when it was saved
                continue
            local = weights.shard(stored, module.mesh.tp, target.dtype, target.device).view(-1)
            part = target.view(-1)[piece.start : piece.start + piece.numel]
            part.copy_(local[piece.offset : piece.offset + piece.numel])


def _made(like: Any, number: float | None, master: nn.Parameter) -> Any:
    """A state entry of a master: zeros in the place of a tensor, the saved number in that of a number."""
    if isinstance(like, Tensor) and like.dim():
        return torch.zeros_like(master, dtype=like.dtype)
    if isinstance(like, Tensor):  # on the CPU, or where a fused kernel reads it: beside its master
        device = like.device if like.device.type == "cpu" else master.device
        return like.to(device, copy=True) if number is None else torch.full_like(like, number, device=device)
    return like if number is None else type(like)(number)


def _as_is(live: Any, saved: Any) -> Any:
    """A saved option in the form of the live one: a tensor stays the tensor that a captured step reads."""
    if isinstance(live, Tensor):
        live.fill_(float(saved))
        return live
    return saved
