"""Sharded layers against their dense counterparts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc import runtime
from shardc.runtime import MeshAxis
from tests.runtime.test_collectives import Recorder, random, world_axis
from tests.workers import Workers

VOCAB = 101  # divides over no number of ranks that is tested
HERE = "tests.runtime.test_layers"

LOSSES = [
    {},
    {"reduction": "mean"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "reduction": "mean"},
    {"ignore_index": 7},
]


def check_cross_entropy(options: dict, masked: bool, all_ignored: bool) -> None:
    axis = world_axis()
    logits = 10 * random(9, VOCAB, seed=0)
    logits = 30 * torch.tanh(logits / 30)
    target = (random(9, seed=1).abs() * 1000).long() % VOCAB
    target[:4] = torch.tensor([0, VOCAB - 1, 7, 50])
    ignore_index = options.get("ignore_index", -100)
    target[5] = ignore_index
    if all_ignored:
        target[:] = ignore_index
    if masked:  # the whole shard of rank 0 for one row, and a column everywhere
        logits[1, :60] = -torch.inf
        logits[4:, 33] = -torch.inf
        target[4:] = target[4:].masked_fill(target[4:] == 33, 34)
    options = {"reduction": "sum", **options}
    grad = random(9, seed=2) if options["reduction"] == "none" else torch.tensor(1.7, dtype=torch.float64)

    dense = logits.clone().requires_grad_()
    expected = F.cross_entropy(dense, target, **options)
    expected.backward(grad)
    local = logits.tensor_split(axis.size, 1)[axis.coord].clone().requires_grad_()
    loss = runtime.vocab_cross_entropy(local, target, axis, VOCAB, **options)
    loss.backward(grad)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(local.grad, dense.grad.tensor_split(axis.size, 1)[axis.coord])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_cross_entropy_of_an_odd_vocabulary_equals_the_dense_one(workers: Workers, ranks: int) -> None:
    workers.run(ranks, f"{HERE}:check_cross_entropies")


def check_cross_entropies() -> None:
    for options in LOSSES:
        check_cross_entropy(options, masked=False, all_ignored=False)
    check_cross_entropy({}, masked=True, all_ignored=False)
    check_cross_entropy({}, masked=False, all_ignored=True)


def check_half_precision_loss() -> None:
    axis = world_axis()
    logits = random(4, VOCAB, seed=0).to(torch.bfloat16)
    target = torch.tensor([1, 2, 3, 100])
    local = logits.tensor_split(axis.size, 1)[axis.coord].clone().requires_grad_()
    loss = runtime.vocab_cross_entropy(local, target, axis, VOCAB)
    loss.backward()
    assert loss.dtype == torch.float32
    assert local.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target, reduction="sum"))


def test_cross_entropy_of_half_precision_logits_is_float32(workers: Workers) -> None:
    workers.run(2, f"{HERE}:check_half_precision_loss")
    logits = torch.zeros(2, 4, dtype=torch.bfloat16)
    loss = runtime.vocab_cross_entropy(logits, torch.tensor([0, 1]), MeshAxis.abstract("tp", 1), 4)
    assert loss.dtype == torch.float32


def check_second_backward_is_refused() -> None:
    axis = world_axis()
    local = random(2, VOCAB, seed=0).tensor_split(axis.size, 1)[axis.coord].clone().requires_grad_()
    loss = runtime.vocab_cross_entropy(local, torch.tensor([0, 1]), axis, VOCAB)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_backward_of_cross_entropy_is_refused_not_wrong(workers: Workers) -> None:
    workers.run(2, f"{HERE}:check_second_backward_is_refused")


def check_embedding(padding_idx: int | None) -> None:
    axis = world_axis()
    table, grad = random(VOCAB, 3, seed=0), random(2, 4, 3, seed=1)
    ids = torch.tensor([[0, VOCAB - 1, 50, 51], [33, 34, 0, 67]])
    dense = table.clone().requires_grad_()
    expected = F.embedding(ids, dense, padding_idx)
    expected.backward(grad)
    module = runtime.VocabEmbedding(VOCAB, 3, axis, padding_idx=padding_idx).double()
    with torch.no_grad():
        module.weight.copy_(table.tensor_split(axis.size)[axis.coord])
    found = runtime.all_reduce(module(ids), axis)
    found.backward(grad)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(module.weight.grad, dense.grad.tensor_split(axis.size)[axis.coord])


def check_embeddings() -> None:
    for padding_idx in (None, 0, 50, VOCAB - 1, -1):
        check_embedding(padding_idx)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_embedding_of_an_odd_vocabulary_equals_the_dense_one(workers: Workers, ranks: int) -> None:
    workers.run(ranks, f"{HERE}:check_embeddings")


def check_row(kind: str, scatter_dim: int | None) -> None:
    """Input features 8, sharded over the ranks; a sequence of 5, so that scattered shards are unequal."""
    axis = world_axis()
    x, weight, bias, grad = random(2, 5, 8, seed=0), random(3, 8, seed=1), random(3, seed=2), random(2, 5, 3, seed=3)
    dense = nn.Linear(8, 3).double()
    with torch.no_grad():
        dense.weight.copy_(weight)
        dense.bias.copy_(bias)
    x.requires_grad_()
    expected = dense(x)
    expected.backward(grad)

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.tensor_split(axis.size, dim)[axis.coord]

    local_x = part(x.detach(), -1).clone().requires_grad_()
    local_weight = part(weight, 1)
    module = getattr(runtime, kind)(local_x.shape[-1], 3, axis, scatter_dim=scatter_dim).double()
    with torch.no_grad():
        module.weight.copy_(local_weight if kind == "RowLinear" else local_weight.t())
        module.bias.copy_(bias)
    found = module(local_x)
    found.backward(grad if scatter_dim is None else part(grad, scatter_dim))
    found_bias_grad = module.bias.grad
    if scatter_dim is not None:
        expected = part(expected, scatter_dim)
        found_bias_grad = runtime.all_reduce(found_bias_grad, axis)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(local_x.grad, part(x.grad, -1))
    weight_grad = module.weight.grad if kind == "RowLinear" else module.weight.grad.t()
    torch.testing.assert_close(weight_grad, part(dense.weight.grad, 1))
    torch.testing.assert_close(found_bias_grad, dense.bias.grad)


def check_rows() -> None:
    for kind in ("RowLinear", "RowConv1D"):
        for scatter_dim in (None, 1):
            check_row(kind, scatter_dim)


@pytest.mark.parametrize("ranks", [2, 3])
def test_row_layers_equal_the_dense_linear(workers: Workers, ranks: int) -> None:
    """The gradient of a row bias under sequence parallelism is partial: its sum, not a part, is right."""
    workers.run(ranks, f"{HERE}:check_rows")


def test_conv1d_is_a_linear_with_a_transposed_weight() -> None:
    module = runtime.Conv1D(4, 3)
    with torch.no_grad():
        module.weight.copy_(random(4, 3, seed=0))
        module.bias.copy_(random(3, seed=1))
    x = random(2, 4, seed=2).float()
    torch.testing.assert_close(module(x), x @ module.weight + module.bias)


def test_vocabulary_functions_are_one_call_on_meta_tensors() -> None:
    axis = MeshAxis.abstract("tp", 4, coord=3)
    ids = torch.empty(6, dtype=torch.int64, device="meta")
    weight = torch.empty(25, 3, device="meta", requires_grad=True)
    logits = torch.empty(6, 25, device="meta", requires_grad=True)
    with Recorder() as recorder:
        rows = runtime.vocab_embedding(ids, weight, axis, VOCAB, padding_idx=100)
        loss = runtime.vocab_cross_entropy(logits, ids, axis, VOCAB)
    assert recorder.calls == ["vocab_embedding", "vocab_cross_entropy"]
    assert rows.shape == (6, 3)
    assert loss.shape == ()
    (rows.sum() + loss).backward()
    assert logits.grad.shape == logits.shape


def test_unknown_reduction_is_refused() -> None:
    axis = MeshAxis("tp", 1, 0)
    with pytest.raises(ValueError, match="reduction='max'"):
        runtime.vocab_cross_entropy(torch.zeros(1, 4), torch.zeros(1).long(), axis, 4, reduction="max")
