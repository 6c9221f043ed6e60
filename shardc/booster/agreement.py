"""What the ranks agree on before a model is built: a result of rank 0, and the values that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.errors import ShardcError

T = TypeVar("T")


def on_rank_0(make: Callable[[], T]) -> T:
    """What make() gives on rank 0, on every rank, which all call it. Where it fails, every rank raises its error."""
    if not _several_ranks():
        return make()
    shared: list = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            shared = [make(), None]
        except ShardcError as error:
            failure, shared = error, [None, (error.problem, error.advice)]
        except Exception as error:  # raised again below, after the other ranks know
            failure, shared = error, [None, (f"rank 0 failed: {type(error).__name__}: {error}", "")]
    dist.broadcast_object_list(shared)
    result, problem = shared
    if failure is not None:
        raise failure
    if problem is not None:
        raise ShardcError(*problem)
    return result


def take_values_of_rank_0(model: nn.Module) -> None:
    """Write rank 0's values into the parameters that differ on some rank, as DistributedDataParallel does.

    So ranks that drew a model from other seeds do not train apart. Every rank calls it; it reads all values once, and
    sends only what differs. Raises ShardcError, the same on every rank, where a parameter has another name, shape
    or dtype than on rank 0, or values on some ranks only."""
    if not _several_ranks():
        return
    mine = [(_described(name, p), _digest(p)) for name, p in model.named_parameters()]
    first = on_rank_0(lambda: mine)
    differs = {index for index, (ours, theirs) in enumerate(zip(mine, first, strict=False)) if ours != theirs}
    problem = _problem(mine, first, differs)
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (differs, problem))
    problems = [problem for _, problem in found if problem is not None]
    if problems:
        raise ShardcError(f"boost: {problems[0]}", "make the same model on every rank")
    parameters = [parameter.detach() for parameter in model.parameters()]
    for index in sorted(set().union(*(differs for differs, _ in found))):
        _broadcast(parameters[index])


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _problem(mine: list, first: list, differs: set[int]) -> str | None:
    """Why this rank's parameters cannot take rank 0's values."""
    rank = dist.get_rank()
    if len(mine) != len(first):
        return f"rank {rank} has a model of {len(mine)} parameters, rank 0 one of {len(first)}"
    for index in sorted(differs):
        (ours, _), (theirs, _) = mine[index], first[index]
        if ours != theirs:
            return f"parameter {index} is {ours} on rank {rank}, {theirs} on rank 0"
    return None


def _described(name: str, value: Tensor) -> str:
    """Everything that has to be alike for values to be sent."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{name} {list(value.shape)} {dtype}{' on the meta device' if value.is_meta else ''}"


def _digest(value: Tensor) -> tuple[int, ...] | None:
    """A sum of the bits, eight bytes at a time (ten times as fast as a hash), and the bytes that remain."""
    if value.is_meta:
        return None
    bits = value.detach().contiguous().view(-1).view(torch.uint8)
    whole = bits.numel() // 8 * 8
    if bits.storage_offset() % 8:
        bits = bits.clone()
    return int(bits[:whole].view(torch.int64).sum()), *bits[whole:].tolist()


def _broadcast(value: Tensor) -> None:
    """Rank 0's value, in place; by way of the GPU, where there is one: NCCL sends no tensors of the CPU."""
    sent = value.cuda() if torch.cuda.is_available() else value.contiguous()
    dist.broadcast(sent, 0)
    value.copy_(sent)
