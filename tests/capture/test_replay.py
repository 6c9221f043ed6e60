"""Every captured graph, run node by node on real weights, is bit for bit the model it came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from shardc.capture import CapturedModel, ModelGraph, Variant
from tests.capture import families
from tests.pipeline.run_stage import run_stage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def real_model(family: str) -> nn.Module:
    """Weights that no symmetry hides: no norm is 1, no bias 0."""
    torch.manual_seed(0)
    model = families.source(family).make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def run_model(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, logits and every gradient of the model itself."""
    model.zero_grad()
    torch.manual_seed(5)
    out = model(**batch)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **_gradients(model)}


def run_graph(graph: ModelGraph, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of the graph, over the model's own parameters; buffers come from the graph's constants."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | graph.constants
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    model.zero_grad()
    torch.manual_seed(5)
    inputs = batch | {"num_targets": num_targets.float()}
    out = run_stage(graph, inputs, tensors.__getitem__, training=model.training)
    out["loss"].backward()
    assert torch.equal(out["count"], num_targets)
    return {"loss": out["loss"].detach(), "logits": out["logits"].detach(), **_gradients(model)}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sizes(captured: CapturedModel, variant: Variant) -> list[tuple[int, int]]:
    """(rows, length) on the variant's side of the window; none was probed, and one has a single row."""
    return [(1, 31), (2, 23)] if variant.long else [(3, 17), (1, 9 if captured.window else 26)]


def assert_bit_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    assert found.keys() == wanted.keys(), where
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, f"{name} {where}"
        assert torch.equal(found[name], tensor), f"{name} {where}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", families.PRESETS)
def test_loss_logits_and_gradients_are_bit_equal_in_every_variant(family: str, dtype: str) -> None:
    """Pitfalls 3 and 5 as well: one capture serves both dtypes, and eval after a capture of training (dropout 0.1)."""
    captured = families.captured(family)
    with default_dtype(DTYPES[dtype]):
        model = real_model(family)
        for variant, graph in captured.variants.items():
            for rows, length in sizes(captured, variant):
                for left_padding in (False, True) if variant.masked else (False,):
                    batch = families.batch(
                        variant, rows=rows, length=length, vocab=model.config.vocab_size, left_padding=left_padding
                    )
                    for training in (True, False):
                        model.train(training)
                        where = f"of {variant.name} at {rows} x {length}, left={left_padding}, training={training}"
                        assert_bit_equal(run_graph(graph, model, batch), run_model(model, batch), where)
