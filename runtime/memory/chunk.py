"""The tensors of one chunk on one rank."""

from __future__ import annotations

from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime.errors import ShardcError
from shardc.runtime.memory.copies import Copies
from shardc.runtime.memory.homes import DEVICE, HOST, Home
from shardc.runtime.memory.layout import ChunkLayout, Slot, overlaps, runs
from shardc.runtime.memory.placement import Placement
from shardc.runtime.mesh import MeshAxis

# torch 2.13 renames the two; both ends of the supported range have one of the names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Chunk:
    """Flat tensors of n elements, n = layout.numel, or of this rank's shard of n / dp.

    flat: (n,) on the device, what the modules compute with; its storage is empty while parameters that are gathered to
    be used are not. shard: this rank's part of it: a view, or of such parameters a tensor of its own, where their home
    is. held: flat or shard, as long as master.
    master: what the optimizer updates, in float32 at least, (n,) or a shard as the placement has the states, at the
    home of the states; it is held itself where both have one home and nothing is rounded. None for frozen parameters.
    fresh: (n,) gradients of this rank that were not yet reduced. total: the reduced ones, as long as master. Where
    `reuses_memory`, total lies in the memory of held, so that the parameters are lost until a step, or `restore`.
    squares: 0-d on the device, of a total that is on the host, else None. left: when it has arrived there.
    is_used_up: a step used a gradient that was in the parameters' place, and zero_grad was not called since.
    update: of a step that a thread makes, until the parameters arrive on the device.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        placement: Placement,
        home: Home,
        dp: MeshAxis,
        dtype: torch.dtype,
        copies: Copies,
        *,
        reuses_memory: bool,
    ):
        self.layout, self.placement, self.home, self.dp, self.copies = layout, placement, home, dp, copies
        self.may_reuse = reuses_memory
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=copies.device)
        self.part = layout.numel // dp.size
        self.start = self.part * dp.coord
        self.shard = self.flat[self.start : self.start + self.part]
        self.master: nn.Parameter | None = None
        self.fresh: Tensor | None = None
        self.total: Tensor | None = None
        self.squares: Tensor | None = None
        self.left: torch.cuda.Event | None = None
        self.is_used_up = False
        self.update: Future[torch.cuda.Event | None] | None = None
        self.is_gathered = True
        self._arriving: dist.Work | torch.cuda.Event | None = None
        self._sent: Tensor | None = None

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

    @property
    def held(self) -> Tensor:
        """Parameters of the elements that this rank owns."""
        return self.shard if self.placement.states else self.flat

    @property
    def reuses_memory(self) -> bool:
        """Whether a gradient takes the place of the parameters: they are made anew from masters that lie elsewhere."""
        return self.may_reuse and self.master is not None and self.master.data_ptr() != self.held.data_ptr()

    @property
    def holds_gradient(self) -> bool:
        """Whether it took their place just now."""
        return self.total is not None and self.total.data_ptr() == self.held.data_ptr()

    # -- parameters ----------------------------------------------------------------------------------------------------
    def fill(self, values: Tensor, master_weights: bool) -> None:
        """Take the values of all parameters, (n,) in the widest dtype that they have; keep what this rank holds."""
        with torch.no_grad():
            self.flat.copy_(values)
            if self.home.parameters == HOST:
                part, self.shard = self.shard, self.copies.empty(self.part, self.flat.dtype)
                self.shard.copy_(part)
            elif self.home.sharded:
                self.shard = self.shard.clone()
            if self.trained:
                own, (start, end) = self.held, self.owned
                if master_weights and values.dtype != own.dtype:
                    own = values[start:end].clone()
                device = self.copies.device if self.home.states == DEVICE else torch.device("cpu")
                if own is self.held and self.home.states != self.home.parameters:
                    own = own.clone()
                self.master = nn.Parameter(own.detach().to(device))
        if self.home.is_gathered_to_use:
            self.release()

    def load(self, values: Tensor) -> None:
        """Take other values, as `fill` does, into the tensors that are there."""
        start, end = self.owned
        with torch.no_grad():
            if self.home.is_gathered_to_use:
                self.release()
                self.shard.copy_(values[self.start : self.start + self.part])
            else:
                self.flat.copy_(values)
                self.is_gathered = True
            if self.master is not None:
                self.master.copy_(values[start:end])

    def gather(self) -> None:
        """Begin to make flat whole, unless it is; `wait` ends it. Raises ShardcError where gradients lie there."""
        if self.is_gathered or self._arriving is not None:
            return
        if self.holds_gradient:
            raise gradients_in_the_way()
        self.wait_for_update()
        if self.home.is_gathered_to_use:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        here = self.copies.now()
        if self.dp.group is None or not (self.placement.states or self.home.is_gathered_to_use):
            if self.home.is_gathered_to_use:
                self._arriving = self.copies.to_device(self.flat, self.shard, here)
            self.is_gathered = self._arriving is None
        elif self.home.parameters == HOST:
            with self.copies.towards_device(here):
                self._sent = self.shard.to(self.flat.device, non_blocking=True)
                self._arriving = all_gather_flat(self.flat, self._sent, group=self.dp.group, async_op=True)
        else:
            self._arriving = all_gather_flat(self.flat, self.shard, group=self.dp.group, async_op=True)

    @property
    def is_arriving(self) -> bool:
        """Whether a gather was begun and not waited for."""
        return self._arriving is not None

    def wait(self) -> None:
        """Until flat is whole: the current stream waits, not the host."""
        self.gather()
        if self._arriving is not None:
            if isinstance(self._arriving, torch.cuda.Event):
                self.copies.wait(self._arriving)
            else:
                self._arriving.wait()
            self._arriving = self._sent = None
            self.is_gathered = True

    def release(self) -> None:
        """Free flat where it is gathered to be used; views of it, the parameters, keep their shape, and the next gather
        fills them again."""
        if self._arriving is not None:
            self.wait()
        if self.home.is_gathered_to_use:
            self.flat.untyped_storage().resize_(0)
            self.is_gathered = False

    def publish(self) -> dist.Work | None:
        """Bring what the optimizer wrote to where modules read it; returns what is still on its way, if anything."""
        assert self.master is not None
        if self.master.data_ptr() != self.held.data_ptr():
            with torch.no_grad():
                self.held.copy_(self.master)
        if self.home.is_gathered_to_use:
            self.release()
            return None
        self.is_gathered = True
        if self.placement.states and self.dp.group is not None:
            return all_gather_flat(self.flat, self.shard, group=self.dp.group, async_op=True)
        return None

    def wait_for_update(self) -> None:
        """Until a step that a thread makes has brought its parameters; raises what it raised."""
        if self.update is not None:
            update, self.update = self.update, None
            self.copies.wait(update.result())

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
        """Add a reduced gradient to the total; from the second on, low precision adds up in float32.

        Raises ShardcError for a second one where the first has taken, or took before its step, the parameters' place.
        """
        if self.is_used_up:
            raise ShardcError(
                "gradients of the last step were not forgotten, and chunks that are reused cannot add to them",
                "call optimizer.zero_grad() between a step and the next backward, or pass "
                "enable_gradient_accumulation=True to the plugin",
            )
        if self.total is None and self.reuses_memory:
            self._replace_parameters(contribution)
        elif self.total is None:
            self.total = contribution
        elif self.holds_gradient:
            raise gradients_in_the_way()
        else:
            wide = torch.promote_types(self.total.dtype, torch.float32)
            self.total = self.total.to(wide).add_(contribution)

    def _replace_parameters(self, contribution: Tensor) -> None:
        self.release()
        self.is_gathered = False
        self.total = self.held
        if self.home.parameters == HOST:
            self.squares = self.sum_of_squares(contribution)
            self.left = self.copies.to_host(self.total, contribution, self.copies.now(), keep=True)
        else:
            self.total.copy_(contribution)

    def sum_of_squares(self, gradient: Tensor) -> Tensor:
        """0-d: of the elements of a tensor like `total` that this rank counts, each element of the model once."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        squares = torch.zeros((), dtype=torch.float32, device=gradient.device)
        counted = [slot for slot in self.layout.slots if slot.counted]
        for start, end in runs([(a, b) for _, a, b in overlaps(counted, *self.owned)]):
            squares += torch.linalg.vector_norm(gradient[start:end], dtype=wide) ** 2
        return squares

    def wait_for_gradient(self) -> None:
        """Until a total that went to the host is there: the calling thread waits."""
        if self.left is not None:
            self.left.synchronize()

    def forget_gradient(self) -> None:
        """Drop the total; parameters that it replaced are not there until `publish`."""
        self.is_used_up = self.holds_gradient
        self.total = self.squares = self.left = None


def gradients_in_the_way() -> ShardcError:
    """The error of a call, or a backward pass, between a backward pass and its step, where chunks are reused."""
    return ShardcError(
        "gradients of an earlier backward pass have taken the place of the parameters, until optimizer.step() or "
        "optimizer.zero_grad()",
        "to call the model again before a step, pass enable_gradient_accumulation=True to the plugin (2 more bytes a "
        "parameter)",
    )
