"""One rank's training state: its chunks, and what a step does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime.gradients import norm_over
from shardc.runtime.memory.access import ParameterAccess
from shardc.runtime.memory.chunk import Chunk, gradients_in_the_way
from shardc.runtime.memory.copies import Copies
from shardc.runtime.memory.homes import DEVICE, HOST, Home, find_homes
from shardc.runtime.memory.layout import ChunkLayout, Slot, find_units, lay_out, overlaps
from shardc.runtime.memory.placement import Placement
from shardc.runtime.memory.reduce import GradientReducer
from shardc.runtime.memory.update import HostStep, HostUpdates, optimizer_of_one, step_on_device
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
        self.copies, self.offload = Copies(device), options.offload
        units, by_unit = find_units(stages, spec), placement.parameters or self.offload is not None
        layouts = lay_out(units, groups, spec, mesh, schedule, max_elements=options.max_elements, by_unit=by_unit)
        homes, reuses = self._homes(layouts), self._reuses_memory(options)
        self.chunks: list[Chunk] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.slots: dict[str, tuple[Chunk, Slot]] = {}
        for layout, home in zip(layouts, homes, strict=True):
            chunk = Chunk(layout, placement, home, mesh.dp, spec.dtype, self.copies, reuses_memory=reuses)
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
        if by_unit:
            self.access = ParameterAccess(units, {name: chunk for name, (chunk, _) in self.slots.items()})
        on_host = [chunk for chunk in self.trained if chunk.home.states == HOST]
        self.host_updates = HostUpdates(self.copies, on_host) if on_host else None

    def _homes(self, layouts: Sequence[ChunkLayout]) -> list[Home]:
        """One rank has nothing to split: its parameters are sharded only to be on the host."""
        splits = self.placement.parameters and self.mesh.dp.size > 1
        if self.offload is None:
            return [Home(sharded=splits)] * len(layouts)
        sizes, trained = [layout.numel for layout in layouts], [layout.group is not None for layout in layouts]
        return find_homes(
            sizes,
            trained,
            sharded=self.offload.sharded_parameters if splits else 0.0,
            host_parameters=self.offload.host_parameters,
            host_states=self.offload.host_states,
        )

    def _reuses_memory(self, options: StateOptions) -> bool:
        """Whether a gradient may take the place of its parameters: there is one backward pass a step, and it fits."""
        return (
            self.offload is not None
            and not self.offload.accumulates
            and options.communication_dtype in (None, self.spec.dtype)
        )

    def before_call(self) -> None:
        """Raises ShardcError, before anything is sent, where gradients have taken the place of parameters."""
        if any(chunk.holds_gradient for chunk in self.trained):
            raise gradients_in_the_way()

    def hold(self) -> AbstractContextManager[None]:
        """Inside, parameters stay gathered: for calls of several micro-batches.

        One rank has nothing to gather in one order with others, and brings them from the host again."""
        return self.access.hold() if self.access and self.mesh.dp.size > 1 else nullcontext()

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
        self.settle()
        return [chunk.master for chunk in self.trained if chunk.layout.group == group]

    def piece(self, name: str, coord: int | None = None) -> Piece | None:
        """What a dp coord, None is this rank's, holds of a trained parameter's master; None where it holds nothing."""
        if name not in self.slots or not self.slots[name][0].trained:
            return None
        self.settle()
        chunk, slot = self.slots[name]
        coord = self.mesh.dp.coord if coord is None else coord
        return self._part(chunk, slot, coord, split=self.placement.states)

    def load(self, weights: Weights) -> None:
        """Take other values for all parameters and their masters; what the optimizer keeps of them stays."""
        self.settle()
        for chunk in self.chunks:
            chunk.wait_for_gradient()  # it may still be written where the values go
            chunk.forget_gradient()
            chunk.load(self._values(chunk, weights))

    def settle(self) -> None:
        """Wait for the steps that a thread makes."""
        for chunk in self.trained:
            chunk.wait_for_update()

    def publish(self) -> None:
        """Bring the masters' values to where modules read them."""
        self.settle()
        self._publish(self.trained)

    def _publish(self, chunks: Sequence[Chunk]) -> None:
        for work in [chunk.publish() for chunk in chunks]:
            if work is not None:
                work.wait()

    def reduce_gradients(self) -> None:
        """Before a step: reduce what waits, free what is gathered. Every rank calls it.

        Raises ShardcError after a backward pass that failed."""
        self.reducer.check_ended()
        if self.reducer.has_fresh:
            self.reducer.finish()
        if self.access:
            self.access.release_all()

    def zero_grad(self) -> None:
        """Forget all gradients, those of a backward pass that failed too; parameters that they replaced are made anew
        from the masters."""
        self.reducer.abandon()
        replaced = [chunk for chunk in self.trained if chunk.holds_gradient]
        for chunk in self.trained:
            chunk.wait_for_gradient()  # it may still be written where the parameters go
            chunk.forget_gradient()
            chunk.fresh, chunk.is_used_up = None, False
        self._publish(replaced)

    def grad_norm(self) -> Tensor:
        """0-d float32, equal on every rank: 2-norm of the whole model's gradient, each element once."""
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for chunk in self.trained:
            if chunk.total is not None:
                total += chunk.sum_of_squares(chunk.total) if chunk.squares is None else chunk.squares
        return norm_over(total, [self.mesh.tp, self.mesh.pp, *([self.mesh.dp] if self.placement.states else [])])

    def step(self, optimizer: torch.optim.Optimizer, scale: Tensor | None = None) -> None:
        """Update the masters by an elementwise optimizer over `masters`, and the parameters from them.

        scale: 0-d, multiplies the gradients first. One chunk after another, so that a chunk's parameters travel while
        the next is updated, and float32 gradients exist for one chunk at a time. Chunks whose states are on the host
        are updated by a thread, which goes on when this returns; the next call waits for each when it needs it."""
        self.settle()
        optimizer.step()  # no master has a gradient yet: its hooks, and a schedule that counts its steps, are told
        stepped = [(chunk, optimizer_of_one(optimizer, chunk)) for chunk in self.trained if chunk.total is not None]
        on_host = [(chunk, own) for chunk, own in stepped if chunk.home.states == HOST]
        if on_host:
            self.host_updates.start([HostStep(chunk, own, chunk.total, chunk.left) for chunk, own in on_host], scale)
            for chunk, _ in on_host:
                chunk.is_gathered = False
                if chunk.holds_gradient:
                    chunk.forget_gradient()
        arriving = []
        for chunk, own in stepped:
            if chunk.home.states == DEVICE:
                step_on_device(chunk, own, scale)
                arriving.append(chunk.publish())
        for work in arriving:
            if work is not None:
                work.wait()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""
        for chunk in self.trained:
            if chunk.total is not None:
                chunk.wait_for_gradient()
                chunk.total.mul_(factor.to(chunk.total.device, chunk.total.dtype))
                chunk.squares = None if chunk.squares is None else chunk.squares * factor**2

    def parameter(self, name: str) -> Tensor | None:
        """This tp rank's part of a parameter on dp coord 0, None elsewhere. All dp ranks call it."""
        if name not in self.slots:
            return None
        chunk, slot = self.slots[name]
        if chunk.holds_gradient:
            return self._whole(chunk, slot, chunk.master.detach().to(chunk.flat.dtype))
        if chunk.home.is_gathered_to_use:
            chunk.wait_for_update()
            return self._whole(chunk, slot, chunk.shard)
        chunk.wait()
        return self._whole(chunk, slot, chunk.flat)

    def gradient(self, name: str) -> Tensor | None:
        """Its reduced gradient in the same way, None where it has none."""
        if name not in self.slots or self.slots[name][0].total is None:
            return None
        chunk, slot = self.slots[name]
        chunk.wait_for_gradient()
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
