"""Which parameters share a chunk, and where each lies in it: the same on all ranks that hold these parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardc.runtime.blocks import blocks_of
from shardc.runtime.gradients import counts_here
from shardc.runtime.mesh import Mesh
from shardc.runtime.schedule import Schedule
from shardc.runtime.spec import ParameterSpec, PlanSpec

# Elements to which the start of a parameter is aligned: kernels read 16 bytes at once, memory comes in lines of 128.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in a chunk: elements [offset, offset + numel) hold it, and up to `end` nothing else lies there.

    reduce_axes: over which its gradient is summed besides dp. counted: whether this rank's part of its gradient enters
    the norm; a replica is counted on one rank alone.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    end: int
    reduce_axes: tuple[str, ...]
    counted: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """group: the optimizer's parameter group, None for frozen parameters. tie: stages that share these parameters.
    numel: of the whole chunk, a multiple of the number of dp ranks."""

    index: int
    group: int | None
    tie: tuple[int, ...] | None
    slots: tuple[Slot, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are gathered together, with all modules inside: a block, or a module of its own.

    encloses: other units lie inside, so its parameters are needed as long as theirs."""

    module: nn.Module
    names: tuple[str, ...]
    encloses: bool


def find_units(stages: Mapping[int, nn.Module], spec: PlanSpec) -> list[Unit]:
    """Units of a rank's stages in the order of their definition, which is the order of use.

    Names are canonical: a tied weight belongs to every unit that reads it."""
    known = spec.by_any_name()
    units = []

    def names_in(module: nn.Module, path: str, inside: bool) -> tuple[str, ...]:
        named = module.named_parameters(recurse=inside, remove_duplicate=False)
        return tuple(dict.fromkeys(known[f"{path}{name}"].name for name, _ in named))

    def visit(module: nn.Module, path: str, blocks: Mapping[str, nn.Module]) -> None:
        if path[:-1] in blocks:
            units.append(Unit(module, names_in(module, path, True), encloses=False))
            return
        own, place = names_in(module, path, False), len(units)
        for name, child in module.named_children():
            visit(child, f"{path}{name}.", blocks)
        if own:
            units.insert(place, Unit(module, own, encloses=len(units) > place))

    for _, stage in sorted(stages.items()):
        visit(stage, "", blocks_of(stage))
    return [unit for unit in units if unit.names]


def lay_out(
    units: Sequence[Unit],
    groups: Mapping[str, int],
    spec: PlanSpec,
    mesh: Mesh,
    schedule: Schedule,
    *,
    max_elements: int,
    by_unit: bool,
) -> list[ChunkLayout]:
    """Chunks of at most max_elements, or of one larger parameter, in the order of the units.

    groups: parameter group of each trained parameter by canonical name; those that are left out are frozen.
    by_unit: a chunk holds parameters of one unit only, so that it can be gathered for it alone.
    A tied parameter lies in chunks of tied parameters, laid out alike on all stages that hold it.
    """
    ties = {tie.parameter: tie.stages for tie in spec.ties}
    place: dict[str, int] = {}
    for index, unit in enumerate(units):
        for name in unit.names:
            place.setdefault(name, index if by_unit else 0)
    keys: dict[tuple, list[ParameterSpec]] = {}
    for name, unit in place.items():
        tie = ties.get(name)
        # What stages share must not depend on where in a stage it is used.
        key = (0 if tie else unit, groups.get(name), tie)
        keys.setdefault(key, []).append(spec.parameters[name])
    layouts = []
    for (_, group, tie), members in sorted(keys.items(), key=lambda item: item[0][0]):
        if tie:
            members = sorted(members, key=lambda parameter: parameter.name)
        for slots in _fill(members, mesh, schedule, max_elements):
            align = math.lcm(mesh.dp.size, _ALIGNMENT)
            numel = -(-slots[-1].end // align) * align
            layouts.append(ChunkLayout(len(layouts), group, tie, tuple(slots), numel))
    return layouts


def _fill(members: Sequence[ParameterSpec], mesh: Mesh, schedule: Schedule, max_elements: int) -> list[list[Slot]]:
    chunks: list[list[Slot]] = []
    for spec in members:
        # Shards of a dim that tp does not divide differ by an element: room for the longest, which is the first, keeps
        # the layout equal on all tp ranks.
        room = math.prod(_local_shape(spec, mesh, 0))
        room = -(-room // _ALIGNMENT) * _ALIGNMENT
        start = chunks[-1][-1].end if chunks else 0
        if not chunks or start + room > max_elements:
            chunks.append([])
            start = 0
        counted = counts_here(spec, mesh, schedule)
        shape = _local_shape(spec, mesh, mesh.tp.coord)
        chunks[-1].append(Slot(spec.name, shape, start, start + room, spec.grad_reduce, counted))
    return chunks


def _local_shape(spec: ParameterSpec, mesh: Mesh, coord: int) -> tuple[int, ...]:
    return spec.shape if spec.shard is None else spec.shard.local_shape(spec.shape, mesh.tp.at(coord))


def overlaps(slots: Sequence[Slot], start: int, end: int) -> list[tuple[Slot, int, int]]:
    """Slots that meet the elements [start, end) of a chunk: (slot, first, last) relative to `start`, padding left out.

    Neighbouring slots are not merged."""
    found = []
    for slot in slots:
        first, last = max(slot.offset, start), min(slot.offset + slot.numel, end)
        if first < last:
            found.append((slot, first - start, last - start))
    return found


def runs(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring ranges, up to the padding between them, as one: fewer kernels."""
    merged: list[tuple[int, int]] = []
    for start, end in pieces:
        if merged and start - merged[-1][1] < _ALIGNMENT:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
