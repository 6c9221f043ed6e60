"""Join the processes that a launcher started.

Each function returns the device of this process and seeds the default generators; where the group exists already, it
does only that. Common arguments:

backend: None is NCCL for GPU tensors and gloo for CPU tensors. seed: of the default generators; Mesh.create makes it
distinct where it has to be. verbose: rank 0 says on stderr how many ranks there are. config: has no effect; older
ColossalAI scripts pass it.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from shardc.runtime.errors import ShardcError


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Any = None,
) -> torch.device:
    """Join world_size processes as `rank`; rank 0 listens on host:port (an IPv6 address with or without brackets).

    local_rank: the index of this process on its machine, None is rank modulo the number of GPUs.
    Raises ShardcError where rank is out of range, this machine has too few GPUs, or the port is in use.
    """
    _ignore(config)
    if not 0 <= rank < world_size:
        raise ShardcError(
            f"launch: rank={rank} with world_size={world_size}; valid: 0 to {world_size - 1}",
            "ranks are numbered from 0 and each is used once",
        )
    if local_rank is None:
        local_rank = rank % max(1, torch.cuda.device_count())
    name = host.strip("[]")
    place = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    group = {"init_method": f"tcp://{place}", "rank": rank, "world_size": world_size}
    return _join(group, place, local_rank, backend, seed, verbose)


def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, *, config: Any = None
) -> torch.device:
    """Join the job that torchrun (shardc run) described in the environment.

    Without a launcher (no RANK in the environment) the job is this one process. Raises ShardcError where only a part of
    the variables is set, this machine has too few GPUs, or the port is in use.
    """
    if isinstance(backend, dict):  # the first argument of older scripts
        backend, config = None, backend
    _ignore(config)
    if "RANK" not in os.environ:
        return _join(None, "", _number("LOCAL_RANK", "0"), backend, seed, verbose)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        _variable(name, "launch_from_torch: RANK is set, but ", "start the script by shardc run or torchrun")
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return _join({}, place, _number("LOCAL_RANK", "0"), backend, seed, verbose)


def launch_from_slurm(
    host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True, *, config: Any = None
) -> torch.device:
    """Join the job that srun described: SLURM_PROCID, SLURM_NPROCS, SLURM_LOCALID. Otherwise as `launch`."""
    names = ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
    return _launch_from("launch_from_slurm", names, "srun", host, port, backend, seed, verbose, config)


def launch_from_openmpi(
    host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True, *, config: Any = None
) -> torch.device:
    """Join the job that mpirun described: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK. Otherwise as `launch`."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    return _launch_from("launch_from_openmpi", names, "Open MPI's mpirun", host, port, backend, seed, verbose, config)


def _launch_from(caller: str, names: tuple[str, ...], launcher: str, host: str, port: int, *rest: Any) -> torch.device:
    """`launch` with the numbers of the named variables: rank, world size, local rank."""
    backend, seed, verbose, config = rest
    for name in names:
        _variable(name, f"{caller}: ", f"start the script by {launcher}")
    rank, world_size, local_rank = (_number(name) for name in names)
    if torch.cuda.device_count() == 1:  # it may show each process its own GPU only
        local_rank = 0
    return launch(rank, world_size, host, port, backend, local_rank, seed, verbose, config=config)


def _join(
    group: dict[str, Any] | None, place: str, local_rank: int, backend: str | None, seed: int, verbose: bool
) -> torch.device:
    """Take the device and make the process group (None: there is none to make) with these arguments."""
    device = _device(local_rank)
    if group is not None and not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo")
        try:
            dist.init_process_group(backend, device_id=device if "nccl" in backend else None, **group)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ShardcError(
                f"port {place.rpartition(':')[2]} of {place.rpartition(':')[0]} is in use",
                "end the job that holds it, or choose another port (shardc run --master_port)",
            ) from None
        if verbose and dist.get_rank() == 0:
            print(f"shardc: {dist.get_world_size()} ranks, backend {backend}, {place}", file=sys.stderr, flush=True)
    torch.manual_seed(seed)
    return device


def _device(local_rank: int) -> torch.device:
    """The GPU of this process, made current; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ShardcError(
            f"local rank {local_rank}: the number of GPUs that this process sees is {count}; valid: 0 to {count - 1}",
            f"start at most {count} processes on this machine (shardc run --nproc_per_node {count})",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _variable(name: str, context: str, advice: str) -> str:
    if name not in os.environ:
        raise ShardcError(f"{context}{name} is not set in the environment", advice)
    return os.environ[name]


def _number(name: str, default: str | None = None) -> int:
    value = os.environ[name] if default is None else os.environ.get(name, default)
    if not value.isdecimal():
        raise ShardcError(f"{name}={value!r} in the environment is no number", "unset it, or let the launcher set it")
    return int(value)


def _ignore(config: Any) -> None:
    if config is not None:
        warnings.warn("config has no effect: settings are arguments of Booster and its plugins", stacklevel=3)
