"""What a device is asked: its peak, its memory, the time."""

from __future__ import annotations

import re
import resource
import sys
import time

import torch

GIB = 2**30

# Dense bfloat16 TFLOPS without sparsity, from the vendors' data sheets. The words of a row all occur in the device's
# name; the first row that fits holds.
PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.0),
    (("GH200",), 989.0),
    (("H100", "NVL"), 835.0),
    (("H100", "PCIe"), 756.0),
    (("H100",), 989.0),
    (("H800",), 989.0),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A40",), 149.7),
    (("L40S",), 362.0),
    (("L4",), 121.0),
    (("MI300X",), 1307.0),
)


def peak_tflops_of(device_name: str) -> float | None:
    """Dense bfloat16 peak of a device by its name, such as "NVIDIA H100 80GB HBM3"; None for one that is unknown."""
    words = set(re.split(r"\W+", device_name))
    if "MIG" in words:  # a slice of a device, of unknown size
        return None
    return next((peak for row, peak in PEAK_TFLOPS if words >= set(row)), None)


def name_of(device: torch.device) -> str:
    """The name of a GPU, "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_of(device: torch.device) -> tuple[float, float]:
    """GiB allocated now and at most so far; of the CPU 0 and the most that was resident of the whole process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB, torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


Mark = float | torch.cuda.Event


class Clock:
    """Times between points of a device's work; marking one does not wait for it."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Mark:
        """This point of the work that was given to the device so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Time from one mark to a later one; waits until the device has reached it."""
        if isinstance(begin, torch.cuda.Event):
            end.synchronize()
            return begin.elapsed_time(end) / 1000
        return end - begin
