"""Copies between a device and the host, beside computation; where the device is the CPU, plain copies at once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


class Copies:
    """Two streams of a GPU, one for each direction, as PCIe has it. Any thread may use one of them at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._to_device = torch.cuda.Stream(device) if self.is_cuda else None
        self._to_host = torch.cuda.Stream(device) if self.is_cuda else None

    def now(self) -> torch.cuda.Event | None:
        """Where the current stream is: what was queued on it so far."""
        return self._event(torch.cuda.current_stream(self.device)) if self.is_cuda else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """The current stream goes on after the event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def towards_device(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, operations are queued on the stream of copies to the device, after the event."""
        with self._on(self._to_device, after):
            yield

    def to_device(self, target: Tensor, source: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Begin to copy host memory, which `empty` made, into a tensor of the device, after an event; when it ends."""
        return self._copy(self._to_device, target, source, after)

    def to_host(
        self, target: Tensor, source: Tensor, after: torch.cuda.Event | None, *, keep: bool = False
    ) -> torch.cuda.Event | None:
        """The other way. keep: the source, of the current stream, is not freed before the copy's end."""
        if keep and self._to_host is not None:
            source.record_stream(self._to_host)
        return self._copy(self._to_host, target, source, after)

    def on_host(self, tensor: Tensor, after: torch.cuda.Event | None) -> Tensor:
        """A tensor of the device on the host; the calling thread waits for it, and for the event."""
        with self._on(self._to_host, after):
            return tensor.to("cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of host memory that a GPU copies fast: page-locked, of exactly this size."""
        buffer = torch.empty(numel, dtype=dtype)
        if self.is_cuda and numel:
            _lock_pages(buffer)
        return buffer

    def _copy(
        self, stream: torch.cuda.Stream | None, target: Tensor, source: Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        with self._on(stream, after):
            target.copy_(source, non_blocking=True)
        return None if stream is None else self._event(stream)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> Iterator[None]:
        if stream is not None and after is not None:
            stream.wait_event(after)
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            yield

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


def _lock_pages(buffer: Tensor) -> None:
    """Page-lock memory as long as its storage lives. torch's own pinned memory comes in powers of two."""
    runtime, storage = torch.cuda.cudart(), buffer.untyped_storage()
    torch.cuda.check_error(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr())


def threads_of_rank() -> int:
    """CPU cores of this machine, divided by its ranks."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
