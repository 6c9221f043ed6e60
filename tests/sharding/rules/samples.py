"""Small calls of every operation that has a rule. Sizes differ from dim to dim, so that no two mistakes agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from shardc.capture.graph import block_input, block_output
from shardc.runtime import collectives
from shardc.runtime.layers import vocab_cross_entropy, vocab_embedding
from shardc.runtime.mesh import MeshAxis
from shardc.sharding.factors import segment, unify
from shardc.sharding.rules import dims_of
from tests.sharding.rules.truth import Sample

_generator = torch.Generator().manual_seed(0)
_TP = MeshAxis.abstract("tp", 1)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator).requires_grad_()


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64, generator=_generator) + 0.5).requires_grad_()


def constant(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def truths(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


def _unary(function: Callable, make: Callable = real) -> list[Sample]:
    return [Sample(function, (make(4, 6),)), Sample(function, (make(1, 5, 4),))]


def _binary(function: Callable, make: Callable = real) -> list[Sample]:
    return [
        Sample(function, (make(4, 6), make(4, 6))),
        Sample(function, (make(1, 16), make(2, 1))),
        Sample(function, (make(2, 1, 6), make(4, 1))),
        Sample(lambda x: function(x, 2.0), (make(4, 3),)),
    ]


def _compare(function: Callable) -> list[Sample]:
    return [Sample(function, (constant(4, 6), constant(4, 6))), Sample(function, (constant(1, 8), constant(6, 1)))]


def _logical(function: Callable) -> list[Sample]:
    return [Sample(function, (truths(4, 6), truths(4, 6)))]


def _reduce(name: str) -> list[Sample]:
    function = getattr(torch.Tensor, name)
    return [
        Sample(lambda x: function(x, dim=-1, keepdim=True), (real(4, 6),)),
        Sample(lambda x: function(x, dim=0), (real(4, 6),)),
    ]


def _equal_pieces(node: fx.Node) -> None:
    """The two halves of a dim of 8 count the same."""
    (x,) = node.all_input_nodes
    unify(*segment(dims_of(x)[1], (4, 4), node), node)


def _equal_pieces_and_rest(node: fx.Node) -> None:
    (x,) = node.all_input_nodes
    first, second, _ = segment(dims_of(x)[1], (4, 4, 2), node)
    unify(first, second, node)


SPLIT = {"relate": _equal_pieces}

SAMPLES: dict[str, list[Sample]] = {
    # -- products ------------------------------------------------------------------------------------------------------
    "linear": [
        Sample(F.linear, (real(2, 3, 4), real(6, 4))),
        Sample(F.linear, (real(3, 4), real(6, 4), real(6))),
        Sample(F.linear, (real(1, 16), real(2, 16))),
    ],
    "matmul": [
        Sample(torch.matmul, (real(2, 4, 6), real(2, 6, 3))),
        Sample(torch.matmul, (real(2, 4, 3, 6), real(1, 4, 6, 5))),
        Sample(torch.matmul, (real(1, 16), real(16, 2))),
        Sample(torch.matmul, (real(2, 3, 4), real(4, 6))),
        Sample(lambda x: torch.matmul(x, x), (real(4, 4),)),
    ],
    "bmm": [Sample(torch.bmm, (real(2, 4, 6), real(2, 6, 3)))],
    "embedding": [Sample(F.embedding, (integers(5, 2, 4), real(5, 6)))],
    "vocab_embedding": [Sample(lambda i, w: vocab_embedding(i, w, _TP, 5), (integers(5, 2, 4), real(5, 6)))],
    "scaled_dot_product_attention": [
        Sample(F.scaled_dot_product_attention, (real(2, 4, 3, 6), real(2, 4, 5, 6), real(2, 4, 5, 2))),
        Sample(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
            (real(2, 4, 3, 6), real(2, 4, 5, 6), real(2, 4, 5, 6), truths(2, 1, 3, 5) | True),
        ),
        Sample(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            (real(2, 8, 3, 6), real(2, 4, 3, 6), real(2, 4, 3, 6)),
        ),
        Sample(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            (real(2, 4, 3, 6), real(2, 1, 3, 6), real(2, 1, 3, 6)),
        ),
    ],
    # -- element by element --------------------------------------------------------------------------------------------
    "add": [*_binary(torch.add), Sample(lambda x: torch.add(x, x), (real(4, 3),))],
    "sub": _binary(torch.sub),
    "mul": [*_binary(torch.mul), Sample(lambda x: torch.mul(x, x), (real(4, 3),))],
    "div": [*_binary(torch.div, positive), Sample(lambda x: torch.div(2.0, x), (positive(4, 3),))],
    "rdiv": [Sample(lambda x: 2.0 / x, (positive(4, 6),))],
    "true_divide": _binary(torch.true_divide, positive),
    "rsub": [Sample(torch.rsub, (real(4, 6), real(4, 6))), Sample(lambda x: 2.0 - x, (real(4, 6),))],
    "pow": [Sample(lambda x: x.pow(2), (real(4, 6),)), Sample(torch.pow, (positive(4, 1), positive(1, 6)))],
    "rpow": [Sample(lambda x: 2.0**x, (real(4, 6),))],
    "neg": _unary(torch.neg),
    "to": _unary(lambda x: x.to(torch.float64)),
    "float": _unary(lambda x: x.float(), constant),
    "half": _unary(lambda x: x.half(), constant),
    "bfloat16": _unary(lambda x: x.bfloat16(), constant),
    "double": _unary(lambda x: x.double()),
    "type_as": [Sample(lambda x, y: x.type_as(y), (real(4, 6), real(3, 2)))],
    "contiguous": _unary(lambda x: x.contiguous()),
    "clone": _unary(torch.clone),
    "detach": _unary(torch.detach),
    "block_input": _unary(block_input),
    "block_output": _unary(block_output),
    "dropout": _unary(lambda x: F.dropout(x, 0.5, False)),
    "rsqrt": _unary(torch.rsqrt, positive),
    "sqrt": _unary(torch.sqrt, positive),
    "reciprocal": _unary(torch.reciprocal, positive),
    "exp": _unary(torch.exp),
    "expm1": _unary(torch.expm1),
    "log": _unary(torch.log, positive),
    "log1p": _unary(torch.log1p, positive),
    "abs": _unary(torch.abs),
    "cos": _unary(torch.cos),
    "sin": _unary(torch.sin),
    "tanh": _unary(torch.tanh),
    "sigmoid": _unary(torch.sigmoid),
    "relu": _unary(F.relu),
    "silu": _unary(F.silu),
    "gelu": _unary(F.gelu),
    "softplus": _unary(F.softplus),
    "erf": _unary(torch.erf),
    "square": _unary(torch.square),
    "leaky_relu": _unary(F.leaky_relu),
    "mish": _unary(F.mish),
    "elu": _unary(F.elu),
    "selu": _unary(F.selu),
    "relu6": _unary(F.relu6),
    "hardswish": _unary(F.hardswish),
    "clamp": _unary(lambda x: torch.clamp(x, min=-0.5)),
    "clip": _unary(lambda x: torch.clip(x, max=0.5)),
    "where": [Sample(torch.where, (truths(4, 6), real(4, 6), real(1, 6)))],
    "masked_fill": [Sample(lambda x, m: x.masked_fill(m, 3.0), (real(4, 6), truths(4, 1)))],
    "maximum": [*_compare(torch.maximum), Sample(torch.maximum, (real(4, 6), real(4, 6)))],
    "minimum": _compare(torch.minimum),
    "bool": _unary(lambda x: x.bool(), lambda *s: integers(2, *s)),
    "long": _unary(lambda x: x.long(), truths),
    "int": _unary(lambda x: x.int(), truths),
    "type": _unary(lambda x: x.type(torch.float64), truths),
    "logical_not": _unary(torch.logical_not, truths),
    "bitwise_not": _unary(torch.bitwise_not, truths),
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "bitwise_and": _logical(torch.bitwise_and),
    "bitwise_or": _logical(torch.bitwise_or),
    "bitwise_xor": _logical(torch.bitwise_xor),
    "lt": _compare(torch.lt),
    "le": _compare(torch.le),
    "gt": _compare(torch.gt),
    "ge": _compare(torch.ge),
    "eq": _compare(torch.eq),
    "ne": _compare(torch.ne),
    "floor_divide": [Sample(lambda x: x // 2, (constant(4, 6),))],
    "remainder": [Sample(lambda x: x % 2, (constant(4, 6),))],
    "zeros_like": _unary(torch.zeros_like, constant),
    "ones_like": _unary(torch.ones_like, constant),
    "full_like": _unary(lambda x: torch.full_like(x, 3.0), constant),
    "isnan": _unary(torch.isnan, constant),
    "isinf": _unary(torch.isinf, constant),
    # -- along a dim ---------------------------------------------------------------------------------------------------
    "sum": [*_reduce("sum"), Sample(torch.sum, (real(4, 6),)), Sample(lambda x: x.sum((0, 2)), (real(4, 3, 6),))],
    "mean": [*_reduce("mean"), Sample(torch.mean, (real(4, 6),)), Sample(lambda x: x.mean((0, 2)), (real(4, 3, 6),))],
    "amax": _reduce("amax"),
    "amin": _reduce("amin"),
    "max": [*_reduce("max"), Sample(torch.max, (real(4, 6),)), Sample(torch.max, (real(4, 6), real(4, 6)))],
    "min": [*_reduce("min"), Sample(torch.min, (real(4, 6),))],
    "var": _reduce("var"),
    "argmax": [Sample(lambda x: x.argmax(-1), (constant(4, 6),)), Sample(torch.argmax, (constant(4, 6),))],
    "all": [Sample(lambda x: x.all(-1), (truths(4, 6),)), Sample(torch.all, (truths(4, 6),))],
    "any": [Sample(lambda x: x.any(0), (truths(4, 6),)), Sample(torch.any, (truths(4, 6),))],
    "prod": _reduce("prod"),
    "logsumexp": _reduce("logsumexp"),
    "softmax": [Sample(lambda x: F.softmax(x, dim=-1), (real(4, 6),)), Sample(lambda x: x.softmax(0), (real(4, 6),))],
    "log_softmax": [Sample(lambda x: F.log_softmax(x, dim=-1), (real(4, 6),))],
    "cumsum": [Sample(lambda x: x.cumsum(-1), (real(4, 6),)), Sample(lambda x: torch.cumsum(x, dim=0), (real(4, 6),))],
    "flip": [
        Sample(lambda x: x.flip(0, 1), (real(4, 6, 2),)),
        Sample(lambda x: torch.flip(x, dims=(1,)), (real(4, 6),)),
        Sample(lambda x: torch.flip(x, [-1, 0]), (real(4, 6, 2),)),
    ],
    "layer_norm": [
        Sample(lambda x, w, b: F.layer_norm(x, (6,), w, b), (real(2, 4, 6), real(6), real(6))),
        Sample(lambda x: F.layer_norm(x, (6,)), (real(4, 6),)),
    ],
    "rms_norm": [Sample(lambda x, w: F.rms_norm(x, (6,), w), (real(2, 4, 6), real(6)))],
    "cross_entropy": [
        Sample(lambda x, y: F.cross_entropy(x, y, reduction="sum"), (real(4, 6), integers(6, 4))),
        Sample(lambda x, y: F.cross_entropy(x, y), (real(4, 6), integers(6, 4))),
        Sample(lambda x, y: F.cross_entropy(x, y, reduction="none"), (real(4, 6), integers(6, 4))),
        Sample(lambda x, y: F.cross_entropy(x, y, reduction="sum"), (real(4, 6, 3), integers(6, 4, 3))),
    ],
    "vocab_cross_entropy": [
        Sample(lambda x, y: vocab_cross_entropy(x, y, _TP, 6, reduction="sum"), (real(4, 6), integers(6, 4)))
    ],
    "diff": [
        Sample(lambda x: x.diff(dim=-1), (real(4, 6),)),
        Sample(lambda x, y: torch.diff(x, prepend=y, dim=-1), (real(4, 6), real(4, 1))),
    ],
    "triu": [Sample(lambda x: x.triu(1), (real(2, 4, 6),))],
    "tril": [Sample(lambda x: x.tril(), (real(4, 6),))],
    # -- shapes --------------------------------------------------------------------------------------------------------
    "view": [
        Sample(lambda x: x.view(3, 4, 2), (real(3, 8),)),
        Sample(lambda x: x.view(3, 8), (real(3, 4, 2),)),
        Sample(lambda x: x.view(3, -1, 4), (real(3, 8),)),
        Sample(lambda x: x.view((4, 6)), (real(6, 4),)),
        Sample(lambda x: x.view(2, 8), (real(1, 16),)),
    ],
    "reshape": [
        Sample(lambda x: x.reshape(3, 4, 2), (real(3, 8),)),
        Sample(lambda x: torch.reshape(x, (12, 2)), (real(3, 8),)),
    ],
    "flatten": [Sample(lambda x: x.flatten(1), (real(3, 4, 2),)), Sample(torch.flatten, (real(4, 3),))],
    "unflatten": [
        Sample(lambda x: x.unflatten(-1, (4, 2)), (real(3, 8),)),
        Sample(lambda x: x.unflatten(0, (4, -1)), (real(8, 3),)),
    ],
    "view_as": [Sample(lambda x, y: x.view_as(y), (real(3, 8), real(3, 4, 2)))],
    "transpose": [
        Sample(lambda x: x.transpose(1, -1), (real(2, 4, 6),)),
        Sample(lambda x: torch.transpose(x, dim0=0, dim1=1), (real(4, 6),)),
    ],
    "swapaxes": [Sample(lambda x: x.swapaxes(0, 1), (real(4, 6),))],
    "t": [Sample(lambda x: x.t(), (real(4, 6),))],
    "T": [Sample(lambda x: x.T, (real(4, 6),))],
    "mT": [Sample(lambda x: x.mT, (real(2, 4, 6),))],
    "permute": [
        Sample(lambda x: x.permute(2, 0, 1), (real(2, 4, 6),)),
        Sample(lambda x: torch.permute(x, (0, -1, 1)), (real(2, 4, 6),)),
        Sample(lambda x: torch.permute(x, dims=(1, 0)), (real(4, 6),)),
    ],
    "unsqueeze": [Sample(lambda x: x.unsqueeze(1), (real(4, 6),)), Sample(lambda x: x.unsqueeze(-1), (real(4, 6),))],
    "squeeze": [
        Sample(lambda x: x.squeeze(1), (real(4, 1, 6),)),
        Sample(lambda x: x.squeeze(), (real(4, 1, 6, 1),)),
        Sample(lambda x: x.squeeze((1, 3)), (real(4, 1, 6, 1),)),
        Sample(lambda x: x.squeeze(0), (real(4, 6),)),
    ],
    "expand": [
        Sample(lambda x: x.expand(3, 4, 6), (real(1, 6),)),
        Sample(lambda x: x.expand((4, 1, -1)), (real(4, 1, 6),)),
        Sample(lambda x: x.expand(size=(4, 6)), (real(4, 1),)),
    ],
    "expand_as": [Sample(lambda x, y: x.expand_as(y), (real(1, 6), real(4, 6)))],
    "broadcast_to": [Sample(lambda x: x.broadcast_to(3, 4, 6), (real(4, 6),))],
    "repeat_interleave": [
        Sample(lambda x: x.repeat_interleave(3, dim=1), (real(2, 4, 6),)),
        Sample(lambda x: torch.repeat_interleave(x, 3), (real(4, 6),)),
    ],
    "repeat": [Sample(lambda x: x.repeat(3, 1, 2), (real(4, 6),)), Sample(lambda x: x.repeat((2, 1)), (real(4, 6),))],
    "getitem": [
        Sample(lambda x: x[:, None, ..., :], (real(4, 6),)),
        Sample(lambda x: x[..., :3], (real(4, 6),)),
        Sample(lambda x: x[:, 1:], (real(4, 6),)),
        Sample(lambda x: x[0], (real(4, 6),)),
        Sample(lambda x: x[:, -1, ::2], (real(4, 6, 4),)),
        Sample(lambda x: x[:, :4], (real(3, 8),), **SPLIT),
        Sample(lambda x: x[:, 4:8], (real(3, 8),), **SPLIT),
        Sample(lambda x: x[:, -4:], (real(3, 8),), **SPLIT),
        Sample(lambda x, i: x[i], (real(4, 6), integers(4, 3))),
    ],
    "split": [
        Sample(lambda x: x.split(4, dim=1), (real(3, 8),), **SPLIT),
        Sample(lambda x: torch.split(x, [4, 4], 1), (real(3, 8),), **SPLIT),
        Sample(lambda x: x.split((4, 4, 2), -1), (real(3, 10),), _equal_pieces_and_rest),
        Sample(lambda x: x.split(3), (real(7, 4),)),
    ],
    "chunk": [
        Sample(lambda x: x.chunk(2, dim=-1), (real(3, 8),), **SPLIT),
        Sample(lambda x: torch.chunk(x, chunks=3, dim=0), (real(7, 4),)),
    ],
    "tensor_split": [
        Sample(lambda x: x.tensor_split(2, dim=1), (real(3, 8),), **SPLIT),
        Sample(lambda x: x.tensor_split(3), (real(7, 4),)),
        Sample(lambda x: x.tensor_split((2, 5)), (real(7, 4),)),
    ],
    "unbind": [Sample(lambda x: x.unbind(0), (real(3, 4),)), Sample(lambda x: torch.unbind(x, dim=-1), (real(4, 2),))],
    "cat": [
        Sample(lambda x, y: torch.cat((x, y), -1), (real(4, 2), real(4, 6))),
        Sample(lambda x, y: torch.cat([x, y], dim=0), (real(2, 4), real(6, 4))),
    ],
    "concat": [Sample(lambda x, y: torch.concat((x, y), dim=1), (real(4, 2), real(4, 6)))],
    "stack": [Sample(lambda x, y: torch.stack((x, y), dim=1), (real(4, 6), real(4, 6)))],
    "pad": [
        Sample(lambda x: F.pad(x, (1, 2)), (real(4, 6),)),
        Sample(lambda x: F.pad(x, (0, 1), value=3.0), (real(4, 6),)),
    ],
    "roll": [Sample(lambda x: x.roll(1, 0), (real(4, 6),))],
    # -- new tensors ---------------------------------------------------------------------------------------------------
    "arange": [Sample(lambda: torch.arange(6), ())],
    "zeros": [Sample(lambda: torch.zeros(4, 6), ())],
    "ones": [Sample(lambda: torch.ones((4, 6)), ())],
    "full": [Sample(lambda: torch.full((4, 6), 2.0), ())],
    "tensor": [Sample(lambda: torch.tensor([1.0, 2.0]), ())],
    "scalar_tensor": [Sample(lambda: torch.scalar_tensor(2.0), ())],
    "new_zeros": [Sample(lambda x: x.new_zeros(4, 6), (constant(4, 6),))],
    "new_ones": [Sample(lambda x: x.new_ones((4, 6)), (constant(4, 6),))],
    "new_full": [Sample(lambda x: x.new_full((4, 6), 2.0), (constant(4, 6),))],
    "new_tensor": [Sample(lambda x: x.new_tensor([1.0, 2.0]), (constant(4, 6),))],
    "linspace": [Sample(lambda: torch.linspace(0, 1, 5), ())],
    "eye": [Sample(lambda: torch.eye(4), ())],
}

COPIES = {
    "expand": Sample(lambda x: x.expand(2, 3, 4, 6), (real(2, 3, 1, 6),)),
    "broadcast_to": Sample(lambda x: x.broadcast_to((4, 6)), (real(6),)),
    "repeat_interleave": Sample(lambda x: x.repeat_interleave(4, dim=1), (real(2, 3, 6),)),
    "repeat": Sample(lambda x: x.repeat(4, 1), (real(6),)),
}

CONVERSION_SAMPLES = [
    Sample(lambda x: collectives.copy_to(x, _TP), (real(4, 6),)),
    Sample(lambda x: collectives.all_reduce(x, _TP), (real(4, 6),)),
    Sample(lambda x: collectives.all_gather(x, _TP, dim=1), (real(3, 4, 6),)),
    Sample(lambda x: collectives.all_gather(x, _TP, dim=1, size=5), (real(3, 5),)),
    Sample(lambda x: collectives.reduce_scatter(x, _TP, dim=0), (real(4, 6),)),
    Sample(lambda x: collectives.shard(x, _TP, dim=-1), (real(4, 6),)),
    Sample(lambda x: collectives.all_gather_invariant(x, _TP, dim=0), (real(4, 6),)),
    Sample(lambda x: collectives.all_gather_invariant(x, _TP, dim=0, size=5), (real(5, 6),)),
    Sample(lambda x: collectives.keep_on_first(x, _TP), (real(4, 6),)),
]
