"""Steps of an optimizer, chunk by chunk: on the device at once, on the host in a thread beside the next forward.

On the host a chunk's gradient is brought into a small buffer, widened to the dtype of its masters, used, and the new
parameters go back by another small buffer; while one chunk is updated, the next one's gradient is on its way. Chunks go
in the order in which the next forward needs them. Clipping enters as a factor that is known before the first of them:
what is computed is what clipping and then stepping in sequence computes, bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.runtime.memory.chunk import Chunk
from shardc.runtime.memory.copies import Copies, threads_of_rank
from shardc.runtime.memory.homes import HOST


def optimizer_of_one(optimizer: torch.optim.Optimizer, chunk: Chunk) -> torch.optim.Optimizer:
    """An optimizer over one chunk's master, with the options that the chunk's group has now, and the shared state."""
    own = object.__new__(type(optimizer))
    own.__dict__.update(optimizer.__dict__)
    own.__dict__.pop("step", None)  # schedules wrap the step of the object that they were made from
    own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    group = optimizer.param_groups[chunk.layout.group]
    options = {key: x.to(chunk.master.device, copy=True) if isinstance(x, Tensor) else x for key, x in group.items()}
    own.param_groups = [{**options, "params": [chunk.master]}]
    return own


def step_on_device(chunk: Chunk, optimizer: torch.optim.Optimizer, scale: Tensor | None) -> None:
    """Update the master of a chunk whose states are on the device; scale: 0-d, of the gradient."""
    chunk.wait_for_gradient()
    grad = chunk.total.to(chunk.master.device, chunk.master.dtype)
    chunk.master.grad = grad if scale is None else grad.mul_(scale.to(grad.dtype))
    optimizer.step()
    chunk.master.grad = None
    if chunk.holds_gradient:
        chunk.forget_gradient()


@dataclass(frozen=True, slots=True)
class HostStep:
    """What is to be done with a chunk. total, left: as the chunk's when the step began."""

    chunk: Chunk
    optimizer: torch.optim.Optimizer
    total: Tensor
    left: torch.cuda.Event | None

    @property
    def is_on_host(self) -> bool:
        """Whether the total took the place of parameters that are there."""
        return self.chunk.home.parameters == HOST and self.total.data_ptr() == self.chunk.held.data_ptr()


class HostUpdates:
    """A thread that makes steps on the host, and its buffers: two for gradients, one wide, two for parameters."""

    def __init__(self, copies: Copies, chunks: Sequence[Chunk]):
        """chunks: whose states are on the host."""
        self.copies = copies
        numel, dtype = max(chunk.held.numel() for chunk in chunks), chunks[0].flat.dtype
        self._grads = [copies.empty(numel, dtype) for _ in range(2)]
        self._parameters = [copies.empty(numel, dtype) for _ in range(2)]
        self._returned: list[torch.cuda.Event | None] = [None, None]
        self._wide = torch.empty(numel, dtype=chunks[0].master.dtype)
        self._thread = ThreadPoolExecutor(
            1, "shardc-step", initializer=torch.set_num_threads, initargs=(threads_of_rank(),)
        )

    def start(self, steps: Sequence[HostStep], scale: Tensor | None) -> None:
        """Begin; each chunk's `update` tells when its parameters are there. scale: 0-d, of the gradients."""
        for step in steps:
            step.chunk.update = Future()
        updates = [step.chunk.update for step in steps]
        self._thread.submit(self._run, list(steps), updates, scale, self.copies.now())

    def _run(
        self, steps: list[HostStep], updates: list[Future], scale: Tensor | None, ready: torch.cuda.Event | None
    ) -> None:
        try:
            with torch.no_grad():
                factor = None if scale is None else self.copies.on_host(scale, ready)
                arriving = self._fetch(steps, 0, ready)
                for index, (step, update) in enumerate(zip(steps, updates, strict=True)):
                    grad, event = arriving
                    if index + 1 < len(steps):
                        arriving = self._fetch(steps, index + 1, ready)
                    if event is not None:
                        event.synchronize()
                    self._update(step, grad, factor)
                    update.set_result(self._return(step.chunk, index % 2))
        except BaseException as error:
            for update in updates:
                if not update.done():
                    update.set_exception(error)

    def _fetch(
        self, steps: list[HostStep], index: int, ready: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to bring a gradient to the host; where it will be, and when."""
        step = steps[index]
        if step.is_on_host:
            return step.total, step.left
        if step.total.dtype != self._grads[0].dtype:  # sums of several calls are wider: not at once
            return self.copies.on_host(step.total, ready), None
        target = self._grads[index % 2][: step.total.numel()]
        return target, self.copies.to_host(target, step.total, ready)

    def _update(self, step: HostStep, grad: Tensor, factor: Tensor | None) -> None:
        master = step.chunk.master
        wide = self._wide[: grad.numel()]
        wide.copy_(grad)
        if factor is not None:
            wide.mul_(factor.to(wide.dtype))
        master.grad = wide
        step.optimizer.step()
        master.grad = None

    def _return(self, chunk: Chunk, buffer: int) -> torch.cuda.Event | None:
        """Begin to bring the new parameters to their home; when they will be there."""
        if chunk.home.parameters == HOST:
            chunk.shard.copy_(chunk.master)
            return None
        if self._returned[buffer] is not None:
            self._returned[buffer].synchronize()
        source = self._parameters[buffer][: chunk.held.numel()]
        source.copy_(chunk.master)
        self._returned[buffer] = self.copies.to_device(chunk.held, source, None)
        return self._returned[buffer]
