"""Layers whose weight is sharded: vocabulary, and linears that end a sharded region.

Shapes: B batch, T tokens, D model, F the sharded inner dim, V vocabulary, N rows (tokens of a batch); lower-case v, f
are this rank's part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shardc.runtime.collectives import all_reduce, one_call, reduce_ranks, reduce_scatter, sum_ranks
from shardc.runtime.mesh import MeshAxis


@one_call
def vocab_embedding(
    ids: Tensor, weight: Tensor, axis: MeshAxis, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    """Look ids up in this rank's rows of the table: P over `axis`, zeros where another rank holds the row.

    ids: (...), integers in [0, num_embeddings). weight: (v, D), rows axis.bounds(num_embeddings). padding_idx: global
    row that gets no gradient, negative from the end as in nn.Embedding. Returns (..., D). Sends nothing.
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += num_embeddings
    if axis.size == 1:
        return F.embedding(ids, weight, padding_idx)
    start, end = axis.bounds(num_embeddings)
    elsewhere = (ids < start) | (ids >= end)
    local_padding = padding_idx - start if padding_idx is not None and start <= padding_idx < end else None
    rows = F.embedding((ids - start).masked_fill(elsewhere, 0), weight, local_padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


@one_call
def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: MeshAxis,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """F.cross_entropy over logits that are sharded along the vocabulary: S -> I, logits are never gathered.

    logits: (N, v), columns axis.bounds(vocab_size). target: (N,), global classes or ignore_index. reduction: "sum",
    "mean" over the targets that are not ignored, or "none". Returns a 0-d tensor, or (N,) for "none", in float32 at
    least. Sends two all-reduces of N and 2N (with label smoothing 3N) numbers; keeps one float copy of the logits,
    turned into the softmax in place and, in the backward, into the gradient: so a second backward is refused by
    autograd.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r} is not one of 'sum', 'mean', 'none'")
    if axis.size == 1:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(
            wide, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
    losses = _VocabCrossEntropy.apply(logits, target, axis, vocab_size, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


class _VocabCrossEntropy(torch.autograd.Function):
    """Loss of each row; with label smoothing s, (1 - s) * (lse - x[target]) + s * (lse - mean of x)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        target: Tensor,
        axis: MeshAxis,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        highest = reduce_ranks(logits.amax(-1).to(wide), axis, "max")
        shifted = logits.to(wide, copy=True).sub_(highest.unsqueeze(-1))
        start, end = axis.bounds(vocab_size)
        valid = target != ignore_index
        here = valid & (target >= start) & (target < end)
        column = (target - start).masked_fill(~here, 0).unsqueeze(-1)
        at_target = shifted.gather(-1, column).squeeze(-1).masked_fill(~here, 0)
        sums = [at_target, shifted.sum(-1)] if smoothing else [at_target]
        probs = shifted.exp_()
        at_target, *mean, total = sum_ranks(torch.stack([*sums, probs.sum(-1)]), axis)
        probs.div_(total.unsqueeze(-1))
        loss = total.log() - at_target
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (total.log() - mean[0] / vocab_size)
        ctx.save_for_backward(probs, column, here, valid)
        ctx.smoothing, ctx.vocab_size, ctx.dtype = smoothing, vocab_size, logits.dtype
        return loss.masked_fill(~valid, 0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        probs, column, here, valid = ctx.saved_tensors
        scale = grad.masked_fill(~valid, 0).unsqueeze(-1)
        if ctx.smoothing:
            probs.sub_(ctx.smoothing / ctx.vocab_size)
        probs.scatter_add_(-1, column, (ctx.smoothing - 1) * here.unsqueeze(-1).to(probs.dtype))
        return probs.mul_(scale).to(ctx.dtype), None, None, None, None, None


class VocabEmbedding(nn.Module):
    """Embedding table of which each rank holds the rows axis.bounds(num_embeddings); its output is P."""

    def __init__(self, num_embeddings: int, dim: int, axis: MeshAxis, padding_idx: int | None = None):
        super().__init__()
        self.num_embeddings, self.axis, self.padding_idx = num_embeddings, axis, padding_idx
        start, end = axis.bounds(num_embeddings)
        self.weight = nn.Parameter(torch.empty(end - start, dim))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D), P over the axis."""
        return vocab_embedding(ids, self.weight, self.axis, self.num_embeddings, padding_idx=self.padding_idx)


class _Row(nn.Module):
    """Adds up the ranks' products over the sharded input dim, then adds the bias once."""

    def __init__(self, weight: Tensor, out_features: int, axis: MeshAxis, bias: bool, scatter_dim: int | None):
        super().__init__()
        self.axis, self.scatter_dim = axis, scatter_dim
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def finish(self, partial: Tensor) -> Tensor:
        """P -> I, or P -> S(scatter_dim); under S the gradient of the bias is partial and its plan lists
        grad_reduce."""
        if self.scatter_dim is None:
            total = all_reduce(partial, self.axis)
        else:
            total = reduce_scatter(partial, self.axis, self.scatter_dim)
        return total if self.bias is None else total + self.bias


class RowLinear(_Row):
    """nn.Linear whose input dim is sharded: weight (out_features, in_features_local)."""

    def __init__(
        self,
        in_features_local: int,
        out_features: int,
        axis: MeshAxis,
        bias: bool = True,
        scatter_dim: int | None = None,
    ):
        super().__init__(torch.empty(out_features, in_features_local), out_features, axis, bias, scatter_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, f) -> (B, T, D); T is sharded after if scatter_dim is 1."""
        return self.finish(F.linear(x, self.weight))


class RowConv1D(_Row):
    """Hugging Face's Conv1D whose input dim is sharded: weight (in_features_local, out_features)."""

    def __init__(
        self,
        in_features_local: int,
        out_features: int,
        axis: MeshAxis,
        bias: bool = True,
        scatter_dim: int | None = None,
    ):
        super().__init__(torch.empty(in_features_local, out_features), out_features, axis, bias, scatter_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, f) -> (B, T, D); T is sharded after if scatter_dim is 1."""
        return self.finish(F.linear(x, self.weight.t()))


class Conv1D(nn.Module):
    """Hugging Face's Conv1D, a linear whose weight is (in_features, out_features)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in) -> (B, T, out)."""
        return F.linear(x, self.weight.t(), self.bias)
