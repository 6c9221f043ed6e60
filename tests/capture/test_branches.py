"""Pitfall 4: branches on the sequence that no probe took are found: captured as a variant, bounded or refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, Phi3Config, Qwen2Config

from shardc.capture import CapturedModel, Variant, capture, window_of
from shardc.errors import ShardcError
from shardc.models import list_presets, resolve, source_from_config
from tests.capture import families
from tests.capture.plain import Tiny, tiny_batch, with_body
from tests.capture.replay import assert_bit_equal, perturb, run_graph, run_model

PLAIN, LONG = Variant(), Variant(long=True)


def mistral(window: int) -> tuple[CapturedModel, torch.nn.Module]:
    config = copy.deepcopy(families.config("mistral"))
    config.sliding_window = window
    source = source_from_config(config, "mistral")
    torch.manual_seed(0)
    return capture(source.make), perturb(source.make())


def test_pitfall_4_mistral_with_window_23_at_40_equals_the_model_though_no_window_was_named() -> None:
    captured, model = mistral(23)
    assert captured.window == 23
    for variant, length in ((PLAIN, 22), (LONG, 23), (LONG, 40)):
        batch = families.batch(variant, rows=2, length=length, vocab=model.config.vocab_size)
        found = run_graph(captured.variants[variant], model.eval(), batch)
        assert_bit_equal(found, run_model(model, batch), f"at {length}")
    masked = Variant(masked=True, long=True)
    batch = families.batch(masked, rows=2, length=40, vocab=model.config.vocab_size)
    assert_bit_equal(run_graph(captured.variants[masked], model, batch), run_model(model, batch))


@pytest.mark.parametrize("window", [8, 11, 14, 23, 4096])
def test_a_window_that_is_named_bounds_the_plain_variants(window: int) -> None:
    config = copy.deepcopy(families.config("mistral"))
    config.sliding_window = window
    captured = capture(source_from_config(config, "mistral").make, window=window_of(config))
    assert captured.window == window
    assert {variant.long for variant in captured.variants} == {False, True}
    assert captured.shortest_sequence == 2


def test_a_window_too_small_to_probe_bounds_the_sequences() -> None:
    config = copy.deepcopy(families.config("mistral"))
    config.sliding_window = 6
    captured = capture(source_from_config(config, "mistral").make, window=6)
    assert {variant.long for variant in captured.variants} == {True}
    assert (captured.window, captured.shortest_sequence) == (6, 6)


def longrope() -> Phi3Config:
    config = copy.deepcopy(families.config("phi3"))
    config.sliding_window = None
    config.max_position_embeddings = 512
    config.original_max_position_embeddings = 64
    half = config.hidden_size // config.num_attention_heads // 2
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [2.0] * half,
        "original_max_position_embeddings": 64,
    }
    return config


def test_longrope_is_exact_on_both_sides_of_its_original_length() -> None:
    """Its frequencies change where a position reaches the original length: by values and not by a branch."""
    source = source_from_config(longrope(), "phi3")
    captured = capture(source.make)
    torch.manual_seed(0)
    model = perturb(source.make()).eval()
    for variant, graph in captured.variants.items():
        for length in (90, 20, 64, 65):
            batch = families.batch(variant, rows=2, length=length, vocab=model.config.vocab_size)
            assert_bit_equal(run_graph(graph, model, batch), run_model(model, batch), f"{variant.name} at {length}")


def test_dynamic_rope_is_refused_because_it_remembers_earlier_batches() -> None:
    config = copy.deepcopy(families.config("llama"))
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ShardcError, match=r"^model\.rotary_emb: "):
        capture(source_from_config(config, "llama").make)


class Chunked(Tiny):
    """Computes something else from 100 tokens on."""

    def body(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1] >= 100:
            hidden = hidden * 2
        return self.proj(hidden)


def test_a_threshold_of_a_plain_module_becomes_the_window() -> None:
    captured = capture(Chunked)
    assert captured.window == 100 and list(captured.variants) == [PLAIN, LONG]
    torch.manual_seed(0)
    model = Chunked()
    for variant, length in ((PLAIN, 99), (LONG, 100), (LONG, 130)):
        batch = tiny_batch(2, length)
        assert_bit_equal(run_graph(captured.variants[variant], model, batch), run_model(model, batch))


def two_thresholds(self: Tiny, hidden: Tensor) -> Tensor:
    length = hidden.shape[1]
    if length >= 100:
        hidden = hidden * 2
    if length > 200:
        hidden = hidden * 3
    return self.proj(hidden)


def one_row(self: Tiny, hidden: Tensor) -> Tensor:
    if hidden.shape[0] == 1:
        hidden = hidden * 2
    return self.proj(hidden)


def many_tokens(self: Tiny, hidden: Tensor) -> Tensor:
    if hidden.shape[0] * hidden.shape[1] > 3000:
        hidden = hidden * 2
    return self.proj(hidden)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (two_thresholds, "batch size 3, sequence length 201 by S > 200"),
        (one_row, r"batch size 1, sequence length 13 by B == 1"),
        (many_tokens, r"batch size 231, sequence length 13 by B\*S > 3000"),
    ],
)
def test_other_branches_on_sizes_are_refused_with_their_line(body: object, where: str) -> None:
    with pytest.raises(ShardcError) as error:
        capture(with_body(body))
    line = body.__code__.co_firstlineno
    found = re.match(rf"the model: the computation changes at {where} \(test_branches\.py:(\d+)\)", str(error.value))
    assert found and line < int(found.group(1)) <= line + 5, str(error.value)


def short(self: Tiny, hidden: Tensor) -> Tensor:
    if hidden.shape[1] <= 4:
        hidden = hidden * 2
    return self.proj(hidden)


def counted(self: Tiny, hidden: Tensor) -> Tensor:
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    if positions.max() + 1 > 64:
        hidden = hidden * 2
    return self.proj(hidden)


def test_a_branch_below_the_probes_bounds_the_sequences() -> None:
    assert capture(with_body(short)).shortest_sequence == 5


def test_a_branch_on_a_value_that_follows_from_sizes_is_found() -> None:
    captured = capture(with_body(counted))
    assert captured.window == 65 and captured.shortest_sequence == 1


WINDOWS = {
    "Mistral-7B-v0.1": 4096,
    "gemma-2-2b": 4096,
    "gemma-3-1b": 512,
    "Phi-3-mini-4k-instruct": 2047,
    **dict.fromkeys(("Mistral-7B-v0.3", "Qwen2.5-7B", "Qwen3-4B", "Llama-3.1-8B", "gpt2", "opt-125m")),
}


@pytest.mark.parametrize("preset", WINDOWS)
def test_window_of_presets(preset: str) -> None:
    assert window_of(resolve(preset).config) == WINDOWS[preset]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MistralConfig(), 4096),
        (MistralConfig(sliding_window=None), None),
        (Qwen2Config(sliding_window=4096, use_sliding_window=False), None),
        (Qwen2Config(sliding_window=4096, use_sliding_window=True, max_window_layers=2), 4096),
        (Qwen2Config(sliding_window=4096, use_sliding_window=True, max_window_layers=99), None),
    ],
    ids=["default", "none", "unused", "used", "used by no layer"],
)
def test_window_of_configs(config: object, window: int | None) -> None:
    assert window_of(config) == window


def test_presets_are_listed() -> None:
    names = {preset if isinstance(preset, str) else preset.name for preset in list_presets()}
    assert names >= WINDOWS.keys()
