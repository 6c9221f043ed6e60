"""The tensors of one chunk on one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime.memory.layout import ChunkLayout, Slot
from shardc.runtime.memory.placement import Placement
from shardc.runtime.mesh import MeshAxis

# torch 2.13 renames the two; both ends of the supported range have one of the names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Chunk:
    """Flat tensors of n elements, n = layout.numel, or of this rank's shard of n / dp.

    flat: (n,) what the modules compute with; its storage is empty while sharded parameters are not gathered.
    shard: this rank's part of it: a view, or with sharded parameters a tensor of its own.
    master: what the optimizer updates, in float32 at least, (n,) or a shard as the placement has the states; it is flat
    or shard itself where nothing is rounded. None for frozen parameters.
    fresh: (n,) gradients of this rank that were not yet reduced. total: the reduced ones, as long as master.
    """

    def __init__(
        self, layout: ChunkLayout, placement: Placement, dp: MeshAxis, dtype: torch.dtype, device: torch.device
    ):
        self.layout, self.placement, self.dp = layout, placement, dp
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.part = layout.numel // dp.size
        self.start = self.part * dp.coord
        self.shard = self.flat[self.start : self.start + self.part]
        self.master: nn.Parameter | None = None
        self.fresh: Tensor | None = None
        self.total: Tensor | None = None
        self.is_gathered = True
        self._arriving: dist.Work | None = None

    @property
    def trained(self) -> bool:
        """Whether an optimizer updates these parameters."""
        return self.layout.group is not None

    def slot_view(self, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter of a whole flat tensor, in its own shape."""
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)

    @property
    def owned(self) -> tuple[int, int]:
        """[start, end) of the elements whose states, and reduced gradients, this rank holds."""
        return (self.start, self.start + self.part) if self.placement.states else (0, self.layout.numel)

    # -- parameters ----------------------------------------------------------------------------------------------------
    def fill(self, values: Tensor, master_weights: bool) -> None:
        """Take the values of all parameters, (n,) in the widest dtype that they have; keep what this rank holds."""
        with torch.no_grad():
            self.flat.copy_(values)
            if self.placement.parameters:
                self.shard = self.shard.clone()
            if self.trained:
                start, end = self.owned
                own = self.shard if self.placement.states else self.flat
                if master_weights and values.dtype != own.dtype:
                    own = values[start:end].clone()
                self.master = nn.Parameter(own.detach())
        if self.placement.parameters:
            self.release()

    def load(self, values: Tensor) -> None:
        """Take other values, as `fill` does, into the tensors that are there."""
        with torch.no_grad():
            if self.placement.parameters:
                self.release()
                self.shard.copy_(values[self.start : self.start + self.part])
            else:
                self.flat.copy_(values)
            if self.master is not None:
                start, end = self.owned
                self.master.copy_(values[start:end])

    def gather(self) -> None:
        """Begin to make flat whole, unless it is; `wait` ends it."""
        if self.is_gathered or self._arriving is not None:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        if self.dp.group is None:
            self.flat.copy_(self.shard)
            self.is_gathered = True
        else:
            self._arriving = all_gather_flat(self.flat, self.shard, group=self.dp.group, async_op=True)

    @property
    def is_arriving(self) -> bool:
        """Whether a gather was begun and not waited for."""
        return self._arriving is not None

    def wait(self) -> None:
        """Until flat is whole."""
        self.gather()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self.is_gathered = True

    def release(self) -> None:
        """Free flat; views of it, the parameters, keep their shape and are filled again by the next gather."""
        if self._arriving is not None:
            self.wait()
        self.flat.untyped_storage().resize_(0)
        self.is_gathered = False

    def publish(self) -> dist.Work | None:
        """Bring what the optimizer wrote to where modules read it; returns what is still on its way, if anything."""
        assert self.master is not None
        held = self.shard if self.placement.states else self.flat
        if self.master.data_ptr() != held.data_ptr():
            held.copy_(self.master.detach())
        if self.placement.states and not self.placement.parameters and self.dp.group is not None:
            return all_gather_flat(self.flat, self.shard, group=self.dp.group, async_op=True)
        return None

    # -- gradients -----------------------------------------------------------------------------------------------------
    def receive(self, slot: Slot, grad: Tensor) -> None:
        """Add a gradient of this rank to the fresh ones."""
        if self.fresh is None:
            self.fresh = torch.zeros(self.layout.numel, dtype=self.flat.dtype, device=self.flat.device)
        self.slot_view(self.fresh, slot).add_(grad)

    def reduce(self, dtype: torch.dtype | None) -> tuple[Tensor, dist.Work | None, Tensor]:
        """Begin to sum the fresh gradients over dp, in `dtype` if given.

        Returns the sum, this rank's part of it where states are sharded, what to wait for, and what to keep until then.
        """
        fresh, self.fresh = self.fresh, None
        if fresh is None:  # nothing arrived here; other ranks may have something
            fresh = torch.zeros(self.layout.numel, dtype=self.flat.dtype, device=self.flat.device)
        if dtype is not None:
            fresh = fresh.to(dtype)
        if self.dp.group is None:
            return fresh, None, fresh
        if not self.placement.states:
            return fresh, dist.all_reduce(fresh, group=self.dp.group, async_op=True), fresh
        part = fresh.new_empty(self.part)
        return part, reduce_scatter_flat(part, fresh, group=self.dp.group, async_op=True), fresh

    def add(self, contribution: Tensor) -> None:
        """Add a reduced gradient to the total; from the second on, low precision adds up in float32."""
        if self.total is None:
            self.total = contribution
        else:
            wide = torch.promote_types(self.total.dtype, torch.float32)
            self.total = self.total.to(wide).add_(contribution)
