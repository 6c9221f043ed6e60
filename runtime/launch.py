"""Join the processes that a launcher started."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def launch_from_torch(backend: str | None = None, seed: int = 1024) -> torch.device:
    """Join the job that torchrun described in the environment; returns the device of this process.

    Without a launcher (no RANK in the environment) the job is this one process. backend: None is NCCL for GPU tensors
    and gloo for CPU tensors. seed: of the default generators; Mesh.create makes it distinct where it has to be.
    """
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if use_cuda else "cpu:gloo")
        dist.init_process_group(backend, device_id=device if "nccl" in backend else None)
    torch.manual_seed(seed)
    return device
