"""The mesh of ranks: named axes dp, pp and tp over torch.distributed process groups.

rank = (dp coord * pp size + pp coord) * tp size + tp coord, so that tp neighbours share a host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardc.runtime import rng
from shardc.runtime.errors import ShardcError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh, as one rank sees it.

    group is None where nothing is ever sent: on an axis of size 1, and on an abstract axis, which traces modules on
    meta tensors. Sub-axes factor the axis, major first: coord = (kv coord) * replica size + (replica coord).
    """

    name: str
    size: int
    coord: int
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    sub_axes: tuple[MeshAxis, ...] = ()

    @classmethod
    def abstract(cls, name: str, size: int, *, coord: int = 0, sub_axes: Mapping[str, int] | None = None) -> MeshAxis:
        """An axis without a process group, for tracing on meta tensors and for shard maps."""
        subs = []
        for sub_name, (sub_size, sub_coord) in _factor_coord(name, size, coord, sub_axes).items():
            subs.append(cls(f"{name}.{sub_name}", sub_size, sub_coord))
        return cls(name, size, coord, None, tuple(subs))

    def sub(self, name: str) -> MeshAxis:
        """The sub-axis `name`: "kv" or "tp.kv". Raises ShardcError where the axis was made without it."""
        for axis in self.sub_axes:
            if axis.name in (name, f"{self.name}.{name}"):
                return axis
        known = [axis.name for axis in self.sub_axes]
        raise ShardcError(
            f"mesh axis {self.name!r} (size {self.size}) has no sub-axis {name!r}; it has {known}",
            "create the mesh with the plan's sub_axes, or let plan.build make it",
        )

    def at(self, coord: int) -> MeshAxis:
        """The same axis as another coord sees it, without groups."""
        prefix = len(self.name) + 1
        sub_axes = {axis.name[prefix:]: axis.size for axis in self.sub_axes}
        return MeshAxis.abstract(self.name, self.size, coord=coord, sub_axes=sub_axes)

    def named(self, name: str) -> MeshAxis:
        """This axis by its own name, or the sub-axis by its full name."""
        return self if name == self.name else self.sub(name)

    def bounds(self, size: int, coord: int | None = None) -> tuple[int, int]:
        """Start and end of a coord's part of a dim of `size` elements, by the torch.tensor_split rule.

        The first size % n parts hold one element more than the others. coord: this rank's, unless given."""
        coord = self.coord if coord is None else coord
        length, extra = divmod(size, self.size)
        start = coord * length + min(coord, extra)
        return start, start + length + (coord < extra)

    def shard_size(self, size: int) -> int:
        """How many of a dim's `size` elements this rank holds."""
        start, end = self.bounds(size)
        return end - start


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes that this rank lies on and the device that it computes on."""

    dp: MeshAxis
    pp: MeshAxis
    tp: MeshAxis
    device: torch.device

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Mesh:
        """One process, every axis of size 1; needs no torch.distributed."""
        axes = (MeshAxis(name, 1, 0) for name in ("dp", "pp", "tp"))
        return cls(*axes, torch.device(device))

    @classmethod
    def create(
        cls,
        *,
        tp: int = 1,
        pp: int = 1,
        sub_axes: Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Mesh:
        """Lay the ranks of the job out as dp x pp x tp; dp is what remains. Every rank calls it with the same sizes.

        sub_axes: factors of tp, major first. device: None is the current GPU, or the CPU where there is none. Seeds
        this rank's random stream (see rng) from torch.initial_seed(). Raises ShardcError, before any collective, if
        the sizes do not fit the job."""
        device = _default_device() if device is None else torch.device(device)
        world = dist.get_world_size() if dist.is_initialized() else 1
        _check_sizes(world, tp, pp)
        _factor_coord("tp", tp, 0, sub_axes)
        if not dist.is_initialized():
            return cls.single(device)
        dp = world // (tp * pp)
        grid = init_device_mesh(device.type, (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
        subs: tuple[MeshAxis, ...] = ()
        if sub_axes:
            names = tuple(f"tp.{name}" for name in sub_axes)
            factored = init_device_mesh(device.type, (dp * pp, *sub_axes.values()), mesh_dim_names=("outer", *names))
            subs = tuple(_axis(factored, name) for name in names)
        mesh = cls(_axis(grid, "dp"), _axis(grid, "pp"), _axis(grid, "tp", subs), device)
        rng.seed_stream(torch.initial_seed(), index=mesh.dp.coord * pp + mesh.pp.coord)
        return mesh

    def axis(self, name: str) -> MeshAxis:
        """An axis by name: "dp", "pp", "tp", or a sub-axis such as "tp.replica"."""
        axes = {axis.name: axis for axis in (self.dp, self.pp, self.tp, *self.tp.sub_axes)}
        if name not in axes:
            raise ShardcError(f"the mesh has no axis {name!r}; it has {sorted(axes)}", "compile the plan again")
        return axes[name]

    def rank_at(self, *, dp: int, pp: int, tp: int) -> int:
        """Global rank of the coords."""
        return (dp * self.pp.size + pp) * self.tp.size + tp

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.rank_at(dp=self.dp.coord, pp=self.pp.coord, tp=self.tp.coord)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _axis(grid: dist.DeviceMesh, name: str, subs: tuple[MeshAxis, ...] = ()) -> MeshAxis:
    size = grid.size(grid.mesh_dim_names.index(name))
    return MeshAxis(name, size, grid.get_local_rank(name), grid.get_group(name) if size > 1 else None, subs)


def _check_sizes(world: int, tp: int, pp: int) -> None:
    if tp < 1 or pp < 1:
        raise ShardcError(f"mesh: tp={tp} and pp={pp} must be at least 1", "leave out the axis that is not used")
    if world % (tp * pp):
        raise ShardcError(
            f"mesh: tp={tp} * pp={pp} = {tp * pp} does not divide the {world} process(es) of this job",
            f"start a multiple of {tp * pp} processes (torchrun --nproc_per_node {tp * pp}) or compile for other sizes",
        )


def _factor_coord(name: str, size: int, coord: int, sub_axes: Mapping[str, int] | None) -> dict[str, tuple[int, int]]:
    """(size, coord) of each sub-axis at a coord of the whole axis."""
    if not sub_axes:
        return {}
    if math.prod(sub_axes.values()) != size:
        raise ShardcError(
            f"mesh: sub-axes {dict(sub_axes)} do not multiply to {name}={size}", "their product must be the axis size"
        )
    factors = {}
    remaining = size
    for sub_name, sub_size in sub_axes.items():
        remaining //= sub_size
        factors[sub_name] = (sub_size, coord // remaining % sub_size)
    return factors
