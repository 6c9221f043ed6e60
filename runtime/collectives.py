"""Typed conversions between layouts over one mesh axis: all communication inside a model.

Layouts over an axis: I value and gradient equal on all ranks; R value equal, gradient partial; S sharded; P partial
sum. Every conversion names the layout before and after; its backward is the conversion of the gradients. n is the axis
size, w the coord. Each is one call under a TorchFunctionMode, returns its argument on an axis of size 1, and computes
shapes only on meta tensors. Layouts were proved at compile time, so that nothing is checked here.

Shards follow torch.tensor_split: of a dim of 5 over 3 coords, 2, 2 and 1 elements. Where shards are unequal they
travel padded to the longest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardc.runtime.mesh import MeshAxis


def one_call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a TorchFunctionMode see `function` as a single call: a tracer records the conversion, not its inside."""

    @functools.wraps(function)
    def public(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(x):
            return handle_torch_function(public, (x,), x, *args, **kwargs)
        return function(x, *args, **kwargs)

    return public


@one_call
def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """I -> R: the value enters a sharded region, where each rank computes a part of its gradient.

        forward   w0 [a]  w1 [a]   ->  w0 [a]    w1 [a]
        backward  w0 [g+h] w1 [g+h] <- w0 [g]    w1 [h]

    x: any shape and dtype; returns the same shape. Sends nothing forward, 2(n-1)/n * bytes(x) backward. Megatron's f.
    """
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


@one_call
def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """P -> I: adds the ranks' partial sums.

        forward   w0 [a]  w1 [b]  ->  w0 [a+b]  w1 [a+b]
        backward  w0 [g]  w1 [g]  <-  w0 [g]    w1 [g]

    x: any shape, float; returns the same shape. Sends 2(n-1)/n * bytes(x) forward, nothing backward. Megatron's g.
    """
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


@one_call
def all_gather(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """S -> R: joins the shards along `dim`; each rank computes a part of the gradient.

        forward   w0 [a]      w1 [b]    ->  w0 [a b]  w1 [a b]
        backward  w0 [g+i]    w1 [h+j]  <-  w0 [g h]  w1 [i j]

    x: this rank's shard. size: global length of `dim`, needed where the shards are unequal. Returns x with `dim`
    whole. Sends (n-1) * bytes(x) each way.
    """
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim, x.shape[dim] * axis.size if size is None else size)


@one_call
def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """P -> S: adds the ranks' partial sums, of which each keeps its part of `dim`.

        forward   w0 [a b]  w1 [c d]  ->  w0 [a+c]  w1 [b+d]
        backward  w0 [g h]  w1 [g h]  <-  w0 [g]    w1 [h]

    x: any shape, float; `dim` is whole before and sharded after. Sends (n-1)/n * bytes(x) each way.
    """
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


@one_call
def shard(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """I -> S: each rank keeps its part of `dim`.

        forward   w0 [a b]  w1 [a b]  ->  w0 [a]  w1 [b]
        backward  w0 [g h]  w1 [g h]  <-  w0 [g]  w1 [h]

    x: any shape; `dim` is whole before and sharded after. Sends nothing forward, (n-1)/n * bytes(x) backward.
    """
    return x if axis.size == 1 else _Shard.apply(x, axis, dim)


@one_call
def all_gather_invariant(x: Tensor, axis: MeshAxis, dim: int, size: int | None = None) -> Tensor:
    """S -> I: joins the shards along `dim` for a use that is the same on all ranks.

        forward   w0 [a]  w1 [b]  ->  w0 [a b]  w1 [a b]
        backward  w0 [g]  w1 [h]  <-  w0 [g h]  w1 [g h]

    x: this rank's shard. size: global length of `dim`, needed where the shards are unequal. Sends (n-1) * bytes(x)
    forward, nothing backward; all_gather is the one to use where the gradients differ between ranks.
    """
    size = x.shape[dim] * axis.size if size is None else size
    return x if axis.size == 1 else _AllGatherInvariant.apply(x, axis, dim, size)


@one_call
def keep_on_first(x: Tensor, axis: MeshAxis) -> Tensor:
    """I -> P: the value counts once in a sum over the ranks, such as a bias before a reduction.

        forward   w0 [a]  w1 [a]  ->  w0 [a]  w1 [0]
        backward  w0 [g]  w1 [g]  <-  w0 [g]  w1 [.]

    x: any shape; returns the same shape. Sends nothing forward; backward, coord 0's gradient is spread as a sum with
    zeros, 2(n-1)/n * bytes(x).
    """
    return x if axis.size == 1 else _KeepOnFirst.apply(x, axis)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return sum_ranks(grad, ctx.axis), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis) -> Tensor:
        return sum_ranks(x, axis)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis, dim: int, size: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _join(x, axis, dim, size)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_and_keep(grad, ctx.axis, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return _sum_and_keep(x, axis, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _join(grad, ctx.axis, ctx.dim, ctx.size), None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return _keep(x, axis, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _join(grad, ctx.axis, ctx.dim, ctx.size), None, None


class _AllGatherInvariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis, dim: int, size: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _join(x, axis, dim, size)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _keep(grad, ctx.axis, ctx.dim), None, None, None


class _KeepOnFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x) if axis.coord == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return sum_ranks(grad if ctx.axis.coord == 0 else torch.zeros_like(grad), ctx.axis), None


# The functional operators behind torch.distributed: they return new tensors, and torch.compile takes them as they are,
# whereas it rewrites the in-place functions, which differ between versions of torch.
_ops = torch.ops._c10d_functional


def sum_ranks(x: Tensor, axis: MeshAxis) -> Tensor:
    """A new tensor: the sum of x over the axis. No autograd."""
    return reduce_ranks(x, axis, "sum")


def reduce_ranks(x: Tensor, axis: MeshAxis, operation: str) -> Tensor:
    """A new tensor: x combined over the axis by "sum" or "max". No autograd."""
    if x.is_meta:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, axis.group.group_name))


def _keep(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    start, end = axis.bounds(x.shape[dim])
    return x.narrow(dim, start, end - start).contiguous()


def _longest(size: int, axis: MeshAxis) -> int:
    return -(-size // axis.size)


def _join(x: Tensor, axis: MeshAxis, dim: int, size: int) -> Tensor:
    """The shards of all coords along `dim`, of `size` elements together."""
    dim %= x.dim()
    longest = _longest(size, axis)
    padded = _pad(x, dim, longest).contiguous()
    if x.is_meta:
        shards = padded.new_empty((axis.size, *padded.shape))
    else:
        gathered = _ops.all_gather_into_tensor(padded, axis.size, axis.group.group_name)
        shards = _ops.wait_tensor(gathered).view(axis.size, *padded.shape)
    if size == longest * axis.size:
        return shards.movedim(0, dim).flatten(dim, dim + 1)
    lengths = [end - start for start, end in (axis.bounds(size, coord) for coord in range(axis.size))]
    return torch.cat([shards[coord].narrow(dim, 0, length) for coord, length in enumerate(lengths)], dim)


def _sum_and_keep(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """This coord's part along `dim` of the sum of x over the axis."""
    if x.is_meta:
        return _keep(x, axis, dim)
    if x.device.type == "cpu":  # gloo lacks reduce-scatter for part of the dtypes
        return _keep(sum_ranks(x, axis), axis, dim)
    size = x.shape[dim]
    longest = _longest(size, axis)
    parts = x.movedim(dim, 0)
    if size != longest * axis.size:
        split = (parts[slice(*axis.bounds(size, coord))] for coord in range(axis.size))
        parts = torch.cat([_pad(part, 0, longest) for part in split])
    kept = _ops.wait_tensor(_ops.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group.group_name))
    start, end = axis.bounds(size)
    return kept[: end - start].movedim(0, dim).contiguous()


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """x with zeros behind it up to `length` along `dim`."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
