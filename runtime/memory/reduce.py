"""Sum gradients over ranks while backward runs.

When all gradients of a chunk are there, the chunk is reduced over dp. Chunks are reduced in one fixed order, the
reverse of the order of use, whatever order their gradients arrive in: all ranks must call collectives alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from shardc.runtime.memory.chunk import Chunk
from shardc.runtime.memory.layout import Slot, overlaps, runs
from shardc.runtime.memory.placement import Placement
from shardc.runtime.mesh import Mesh
from shardc.runtime.state import incomplete, used_up

_IN_FLIGHT = 2  # chunks that are on their way at once; each keeps a whole chunk of gradients alive


class KeptChunks:
    """Reduced gradients of one call, aside from the totals until its loss is given to backward."""

    def __init__(self) -> None:
        self.gradients: dict[Chunk, Tensor] | None = {}

    def release(self, scale: Tensor) -> None:
        """Add them, times `scale` (0-d), to the totals. Raises ShardcError the second time."""
        if self.gradients is None:
            raise used_up()
        gradients, self.gradients = self.gradients, None
        while gradients:
            chunk, gradient = gradients.popitem()
            chunk.add(gradient.mul_(scale.to(gradient.dtype)))


class GradientReducer:
    """Takes gradients from autograd, chunk by chunk, and leaves their sums in `chunk.total`."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        placement: Placement,
        mesh: Mesh,
        tie_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        dtype: torch.dtype | None,
    ):
        """chunks: of trained parameters, in order of use. dtype: in which gradients travel; None is their own."""
        self.order, self.placement = list(reversed(chunks)), placement
        self.mesh, self.tie_groups, self.dtype = mesh, tie_groups, dtype
        self.microbatches = 1
        self.is_synced = True
        self.kept: KeptChunks | None = None
        self._is_running = False
        self._expected = dict.fromkeys(self.order, 0)
        self._reset()

    def watch(self, parameter: nn.Parameter, chunk: Chunk, slot: Slot, num_stages: int) -> None:
        """Take the gradients of a parameter as autograd makes them: one a micro-batch in each stage that reads it."""
        self._expected[chunk] += num_stages
        self._missing[chunk] += num_stages

        # It must not hold the parameter, which holds the hook where no garbage collector looks.
        def arrived(reached: Tensor) -> None:
            grad, reached.grad = reached.grad, None
            if self.kept is None and not self._is_running:  # the first of a backward pass
                self._is_running = True
                Variable._execution_engine.queue_callback(self._end_backward)
            chunk.receive(slot, grad)
            self._missing[chunk] -= 1
            if self._reduces:
                self._launch_ready()

        parameter.register_post_accumulate_grad_hook(arrived)

    @contextmanager
    def collect(self, microbatches: int) -> Iterator[KeptChunks]:
        """Inside, backward passes of several micro-batches are one: reduced at its end, into what is given here."""
        before = {chunk: chunk.fresh for chunk in self.order}
        for chunk in self.order:
            chunk.fresh = None
        self.microbatches, self.kept = microbatches, KeptChunks()
        self._reset()
        try:
            yield self.kept
            self.finish()
        finally:
            self.microbatches, self.kept = 1, None
            self._reset()
            for chunk, fresh in before.items():
                chunk.fresh = fresh

    def finish(self) -> None:
        """Reduce what was not reduced yet, and wait for all. Every rank calls it alike."""
        while self._launched < len(self.order):
            self._launch()
        while self._in_flight:
            self._settle()
        # Stages that share parameters settle them at different times, so their sums come last.
        for chunk in sorted(self._tied, key=lambda chunk: (chunk.layout.tie, chunk.layout.slots[0].name)):
            dist.all_reduce(self._tied[chunk], group=self.tie_groups[chunk.layout.tie])
            self._deliver(chunk, self._tied[chunk])
        self._reset()

    def check_ended(self) -> None:
        """Raises ShardcError where a backward pass failed before its end, and its gradients are not all reduced."""
        if self._is_running:
            raise incomplete()

    def abandon(self) -> None:
        """Forget a backward pass that failed."""
        if self._is_running:
            for _, _, work, _ in self._in_flight:
                if work is not None:
                    work.wait()
            self._is_running = False
            self._reset()

    @property
    def has_fresh(self) -> bool:
        """Whether gradients wait to be reduced, after no_sync."""
        return any(chunk.fresh is not None for chunk in self.order)

    @property
    def _reduces(self) -> bool:
        """Whether this backward pass reduces. Sharded gradients are never kept whole, inside no_sync neither."""
        return self.is_synced or self.placement.gradients

    def _reset(self) -> None:
        self._missing = {chunk: count * self.microbatches for chunk, count in self._expected.items()}
        self._launched = 0
        self._in_flight: deque[tuple[Chunk, Tensor, dist.Work | None, Tensor]] = deque()
        self._tied: dict[Chunk, Tensor] = {}

    def _end_backward(self) -> None:
        self._is_running = False
        if self._reduces:
            self.finish()
        else:
            self._reset()

    def _launch_ready(self) -> None:
        while self._launched < len(self.order) and self._missing[self.order[self._launched]] <= 0:
            self._launch()

    def _launch(self) -> None:
        chunk = self.order[self._launched]
        self._launched += 1
        self._in_flight.append((chunk, *chunk.reduce(self.dtype)))
        if len(self._in_flight) > _IN_FLIGHT:
            self._settle()

    def _settle(self) -> None:
        chunk, contribution, work, _ = self._in_flight.popleft()
        if work is not None:
            work.wait()
        self._reduce_over_axes(chunk, contribution)
        if chunk.layout.tie in self.tie_groups:
            self._tied[chunk] = contribution
        else:
            self._deliver(chunk, contribution)

    def _deliver(self, chunk: Chunk, contribution: Tensor) -> None:
        if self.kept is None:
            chunk.add(contribution)
        else:
            self.kept.gradients[chunk] = contribution

    def _reduce_over_axes(self, chunk: Chunk, contribution: Tensor) -> None:
        """Sum partial gradients over the axes of the tp group, all of one axis at once."""
        for axis in sorted({axis for slot in chunk.layout.slots for axis in slot.reduce_axes}):
            group = self.mesh.axis(axis).group
            found = [piece for piece in overlaps(chunk.layout.slots, *chunk.owned) if axis in piece[0].reduce_axes]
            if group is not None and found:
                parts = [contribution[start:end] for start, end in runs([(start, end) for _, start, end in found])]
                flat = torch.cat(parts)
                dist.all_reduce(flat, group=group)
                for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    part.copy_(total)
