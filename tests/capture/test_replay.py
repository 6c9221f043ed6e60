"""Every captured graph, run node by node on real weights, is bit for bit the model it came from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardc.capture import CapturedModel, Variant
from shardc.capture.patches import default_dtype
from tests.capture import families
from tests.capture.replay import assert_bit_equal, perturb, run_graph, run_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOTH_DTYPES = ("gemma2", "gemma3", "gpt2", "opt", "qwen3")  # whose code differs most; in bfloat16 others are the grid's
MODES = ((False, True), (True, False))  # (left padding, training): two runs cover both of each


def real_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return perturb(families.source(family).make())


def sizes(captured: CapturedModel, variant: Variant) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, length) on the variant's side of the window; none was probed, and one has a single row."""
    return ((1, 31), (2, 23)) if variant.long else ((3, 17), (1, 9 if captured.window else 26))


CASES = [
    pytest.param(family, dtype, marks=[pytest.mark.grid] if dtype == "bfloat16" and family not in BOTH_DTYPES else [])
    for family in families.PRESETS
    for dtype in DTYPES
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_loss_logits_and_gradients_are_bit_equal_in_every_variant(family: str, dtype: str) -> None:
    """Pitfalls 3 and 5 as well: one capture serves both dtypes, and eval after a capture of training (dropout 0.1)."""
    captured = families.captured(family)
    with default_dtype(DTYPES[dtype]):
        model = real_model(family)
        for variant, graph in captured.variants.items():
            for rows, length in sizes(captured, variant):
                for left_padding, training in MODES:
                    batch = families.batch(
                        variant, rows=rows, length=length, vocab=model.config.vocab_size, left_padding=left_padding
                    )
                    model.train(training)
                    where = f"of {variant.name} at {rows} x {length}, left={left_padding}, training={training}"
                    assert_bit_equal(run_graph(graph, model, batch), run_model(model, batch), where)


@pytest.mark.parametrize("family", families.PRESETS)
def test_sequences_of_one_token_run_alike_or_are_below_the_shortest(family: str) -> None:
    """SDPA attention is told `is_causal=False` at one token: the graph says otherwise, so one token is refused."""
    captured = families.captured(family)
    attention = families.source(family).make().config._attn_implementation
    assert captured.shortest_sequence == (2 if attention == "sdpa" else 1)
    model = real_model(family).eval()
    batch = families.batch(
        Variant(), rows=2, length=captured.shortest_sequence, vocab=model.config.vocab_size, left_padding=False
    )
    batch["labels"][0, -1] = 3
    found, wanted = run_graph(captured.plain, model, batch), run_model(model, batch)
    assert torch.equal(found["logits"], wanted["logits"])
