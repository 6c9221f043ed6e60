"""Logits as a user reads them, from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from shardc.runtime.batch import Batch
from shardc.runtime.collectives import all_gather_invariant
from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import Mesh
from shardc.runtime.spec import LogitsSpec


def whole_logits(logits: Tensor, spec: LogitsSpec, batch: Batch, mesh: Mesh) -> Tensor:
    """S -> I: join the shards of the logits of `batch`, and drop what its padding added.

    logits: as the last stage returns them. Returns (B, T, V), T the tokens that the caller gave. Sends (n-1) *
    bytes(logits) forward over the axis that splits them, nothing backward."""
    if spec.shard is not None:
        dim, axis = spec.shard
        logits = all_gather_invariant(logits, mesh.axis(axis), dim, size=_shape(spec, batch.rows, batch.length)[dim])
    for dim, size in enumerate(spec.shape):
        if size == "S" and batch.true_length != batch.length:
            logits = logits.narrow(dim, 0, batch.true_length)
    return logits


def logits_on_all_stages(
    parts: Sequence[Tensor], spec: LogitsSpec, batch: Batch, mesh: Mesh, *, last_stage: int
) -> Tensor:
    """Whole logits on every rank of a model replica, without a graph. All of them call it.

    parts: of the micro-batches, on the ranks of the last stage, else empty. last_stage: its pp coord."""
    with torch.no_grad():
        if parts:
            logits = whole_logits(join_rows(parts), spec, batch, mesh).to(spec.dtype)
        else:
            shape = _shape(spec, batch.rows, batch.true_length)
            logits = torch.empty(shape, dtype=spec.dtype, device=mesh.device)
        if mesh.pp.group is not None:
            logits = logits.contiguous()
            dist.broadcast(logits, group=mesh.pp.group, group_src=last_stage)
        return logits


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """The micro-batches' logits as one tensor; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def refuse_backward(logits: Tensor) -> Tensor:
    """The same values, cut off from the model: a backward through them raises ShardcError, before any collective."""
    return _RefuseBackward.apply(torch.empty(0, requires_grad=True), logits.detach())


def _shape(spec: LogitsSpec, rows: int, length: int) -> list[int]:
    known = {"B": rows, "S": length}
    return [known[size] if isinstance(size, str) else size for size in spec.shape]


class _RefuseBackward(torch.autograd.Function):
    """trigger: a leaf that makes the values require grad."""

    @staticmethod
    def forward(ctx: FunctionCtx, trigger: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> NoReturn:
        raise ShardcError(
            "backward through .logits: gradients exist through .loss only, because a loss of one rank's logits is no "
            "loss of the global batch",
            "give the loss to boost(criterion=...), as a function (outputs, batch) -> mean loss; "
            "detach() what is only looked at",
        )
