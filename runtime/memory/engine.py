"""One rank's training state: its chunks, and what a step does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime.gradients import norm_over
from shardc.runtime.memory.access import ParameterAccess
from shardc.runtime.memory.chunk import Chunk
from shardc.runtime.memory.layout import Slot, find_units, lay_out, overlaps, runs
from shardc.runtime.memory.placement import Placement
from shardc.runtime.memory.reduce import GradientReducer
from shardc.runtime.mesh import Mesh
from shardc.runtime.pieces import gather_pieces
from shardc.runtime.schedule import Schedule
from shardc.runtime.spec import PlanSpec
from shardc.runtime.state import Kept, Piece, StateOptions
from shardc.runtime.weights import Weights


class MemoryEngine:
    """Parameters, gradients and master weights of this rank in chunks; made by `Plan.build(placement=...)`."""

    calls_meet = True

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        spec: PlanSpec,
        mesh: Mesh,
        schedule: Schedule,
        weights: Weights,
        device: torch.device,
        placement: Placement,
        tie_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        options: StateOptions,
    ):
        """stages: on the meta device."""
        groups = options.groups
        if groups is None:
            groups = {name: 0 for name, parameter in spec.parameters.items() if parameter.requires_grad}
        self.spec, self.mesh, self.placement = spec, mesh, placement
        units = find_units(stages, spec)
        sizes = {"max_elements": options.max_elements, "by_unit": placement.parameters}
        layouts = lay_out(units, groups, spec, mesh, schedule, **sizes)
        self.chunks: list[Chunk] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.slots: dict[str, tuple[Chunk, Slot]] = {}
        for layout in layouts:
            chunk = Chunk(layout, placement, mesh.dp, spec.dtype, device)
            for slot in layout.slots:
                # .data has a version counter of its own: a gather between forward and backward is no change of values.
                view = chunk.slot_view(chunk.flat, slot).data
                parameter = nn.Parameter(view, requires_grad=chunk.trained)
                self.parameters[slot.name], self.slots[slot.name] = parameter, (chunk, slot)
            chunk.fill(self._values(chunk, weights), options.master_weights)
            self.chunks.append(chunk)
        self.trained = [chunk for chunk in self.chunks if chunk.trained]
        self.reducer = GradientReducer(self.trained, placement, mesh, tie_groups, options.communication_dtype)
        known = spec.by_any_name()
        readers = [{known[n].name for n, _ in s.named_parameters(remove_duplicate=False)} for s in stages.values()]
        for name, (chunk, slot) in self.slots.items():
            if chunk.trained:
                num_stages = sum(name in names for names in readers)
                self.reducer.watch(self.parameters[name], chunk, slot, num_stages)
        self.access: ParameterAccess | None = None
        if placement.parameters:
            self.access = ParameterAccess(units, {name: chunk for name, (chunk, _) in self.slots.items()})

    def hold(self) -> AbstractContextManager[None]:
        """Inside, parameters stay gathered: for calls of several micro-batches."""
        return self.access.hold() if self.access else nullcontext()

    @contextmanager
    def collect(self, microbatches: int) -> Iterator[Kept]:
        """Inside, backward passes of so many micro-batches are one, reduced at its end; parameters stay gathered."""
        with self.hold(), self.reducer.collect(microbatches) as kept:
            yield kept

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank and are reduced later, where the placement has them whole."""
        self.reducer.is_synced = False
        try:
            yield
        finally:
            self.reducer.is_synced = True

    def masters(self, group: int) -> list[nn.Parameter]:
        """What the optimizer's parameter group updates, flat."""
        return [chunk.master for chunk in self.trained if chunk.layout.group == group]

    def piece(self, name: str, coord: int | None = None) -> Piece | None:
        """What a dp coord, None is this rank's, holds of a trained parameter's master; None where it holds nothing."""
        if name not in self.slots or not self.slots[name][0].trained:
            return None
        chunk, slot = self.slots[name]
        coord = self.mesh.dp.coord if coord is None else coord
        return self._part(chunk, slot, coord, split=self.placement.states)

    def load(self, weights: Weights) -> None:
        """Take other values for all parameters and their masters; what the optimizer keeps of them stays."""
        for chunk in self.chunks:
            chunk.load(self._values(chunk, weights))

    def publish(self) -> None:
        """Bring the masters' values to where modules read them."""
        for chunk in self.trained:
            work = chunk.publish()
            if work is not None:
                work.wait()

    def reduce_gradients(self) -> None:
        """Before a step: reduce what waits, free what is gathered. Every rank calls it."""
        if self.reducer.has_fresh:
            self.reducer.finish()
        if self.access:
            self.access.release_all()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self.trained:
            chunk.fresh = chunk.total = None

    def grad_norm(self) -> Tensor:
        """0-d float32, equal on every rank: 2-norm of the whole model's gradient, each element once."""
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for chunk in self.trained:
            if chunk.total is None:
                continue
            wide = torch.promote_types(chunk.total.dtype, torch.float32)
            counted = [slot for slot in chunk.layout.slots if slot.counted]
            for start, end in runs([(a, b) for _, a, b in overlaps(counted, *chunk.owned)]):
                total += torch.linalg.vector_norm(chunk.total[start:end], dtype=wide) ** 2
        return norm_over(total, [self.mesh.tp, self.mesh.pp, *([self.mesh.dp] if self.placement.states else [])])

    def step(self, optimizer: torch.optim.Optimizer, scale: Tensor | None = None) -> None:
        """Update the masters by an elementwise optimizer over `masters`, and the parameters from them.

        scale: 0-d, multiplies the gradients first. One chunk after another, so that a chunk's parameters travel while
        the next is updated, and float32 gradients exist for one chunk at a time."""
        arriving = []
        for chunk in self.trained:
            if chunk.total is None:
                continue
            grad = chunk.total.to(chunk.master.dtype)
            chunk.master.grad = grad if scale is None else grad.mul_(scale.to(grad.dtype))
            optimizer.step()
            chunk.master.grad = None
            arriving.append(chunk.publish())
        for work in arriving:
            if work is not None:
                work.wait()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""
        for chunk in self.trained:
            if chunk.total is not None:
                chunk.total.mul_(factor.to(chunk.total.dtype))

    def parameter(self, name: str) -> Tensor | None:
        """This tp rank's part of a parameter on dp coord 0, None elsewhere. All dp ranks call it."""
        if name not in self.slots:
            return None
        chunk, slot = self.slots[name]
        return self._whole(chunk, slot, chunk.shard if self.placement.parameters else chunk.flat)

    def gradient(self, name: str) -> Tensor | None:
        """Its reduced gradient in the same way, None where it has none."""
        if name not in self.slots or self.slots[name][0].total is None:
            return None
        chunk, slot = self.slots[name]
        grad = self._whole(chunk, slot, chunk.total)
        return None if grad is None else grad.to(chunk.flat.dtype)  # sums may be wider, and are sent as parameters are

    def _values(self, chunk: Chunk, weights: Weights) -> Tensor:
        """The values of all parameters of a chunk, flat, in the widest dtype that they have."""
        values = torch.zeros(
            chunk.layout.numel, dtype=torch.promote_types(self.spec.dtype, torch.float32), device=chunk.flat.device
        )
        for slot in chunk.layout.slots:
            value = weights.shard(self.spec.parameters[slot.name], self.mesh.tp, values.dtype, values.device)
            chunk.slot_view(values, slot).copy_(value)
        return values

    def _part(self, chunk: Chunk, slot: Slot, coord: int, *, split: bool) -> Piece | None:
        """The part of a slot that a dp coord holds in a tensor like `chunk`, whole or split into shards."""
        start, end = (coord * chunk.part, (coord + 1) * chunk.part) if split else (0, chunk.layout.numel)
        found = overlaps([slot], start, end)
        if not found:
            return None
        ((_, first, last),) = found
        master = chunk.master if coord == self.mesh.dp.coord else None
        return Piece(master, first, start + first - slot.offset, last - first)

    def _whole(self, chunk: Chunk, slot: Slot, own: Tensor) -> Tensor | None:
        """A slot of a tensor like `chunk`, whole or this rank's shard of it, on dp coord 0; None on others."""
        split = own.numel() != chunk.layout.numel
        pieces = [self._part(chunk, slot, coord, split=split) for coord in range(self.mesh.dp.size)]
        flat = gather_pieces(pieces, own, self.mesh, dtype=own.dtype)
        return flat.view(slot.shape) if flat is not None and self.mesh.dp.coord == 0 else None
