"""reduced_config keeps what decides how a model shards (DESIGN section 6, verify)."""

from dataclasses import dataclass

import pytest
import torch

from shardc.models import reduced_config, resolve, source_from_config

ONE_OF_EACH_FAMILY = [
    "Llama-3.1-8B",
    "Mistral-7B-v0.1",
    "Qwen2.5-3B",
    "Qwen3-4B",
    "gemma-2-2b",
    "gemma-3-1b",
    "Phi-3-medium-4k-instruct",
    "OLMo-2-7B",
    "gpt2",
    "pythia-70m",
    "opt-125m",
]
MESHES = [(1, 1), (1, 2), (2, 2), (1, 4), (4, 1)]  # (pp, tp)


def kv_heads(config):
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@pytest.mark.parametrize("pp_tp", MESHES, ids=str)
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_the_small_model_shards_as_the_large_one(name, pp_tp):
    pp, tp = pp_tp
    config = resolve(name).config
    small = reduced_config(config, pp, tp)
    heads, kv = small.num_attention_heads, kv_heads(small)
    assert type(small) is type(config)
    assert small.num_hidden_layers >= pp + 1
    assert heads * kv_heads(config) == config.num_attention_heads * kv, "head : KV head ratio"
    assert (heads % tp == 0) == (config.num_attention_heads % tp == 0)
    assert (kv % tp == 0) == (kv_heads(config) % tp == 0), "KV heads sharded or replicated"
    assert (getattr(small, "head_dim", None) or small.hidden_size // heads) % 2 == 0
    assert (small.hidden_size % tp, small.vocab_size) == (0, 101)
    kept = (
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "enable_bias",
        "rope_parameters",
        "hidden_act",
        "resid_pdrop",
    )
    assert {key: getattr(small, key, None) for key in kept} == {key: getattr(config, key, None) for key in kept}
    assert (getattr(small, "sliding_window", None) is None) == (getattr(config, "sliding_window", None) is None)
    assert set(getattr(small, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_the_small_model_runs_and_has_the_same_kinds_of_parameters(name):
    config = resolve(name).config
    small = source_from_config(reduced_config(config, 2, 2), name).make()
    with torch.device("meta"):
        large = source_from_config(config, name).make()
    ids = torch.arange(2 * 16).reshape(2, 16) + 3
    small(input_ids=ids, labels=ids).loss.backward()
    missing = [key for key, parameter in small.named_parameters() if parameter.grad is None]
    assert missing == []
    in_first_layer = lambda model: {key for key, _ in model.named_parameters() if ".0." in key}  # noqa: E731
    assert in_first_layer(small) == in_first_layer(large)
    assert sum(parameter.numel() for parameter in small.parameters()) < 3_000_000


@dataclass
class Case:
    name: str
    model: str
    overrides: dict
    pp_tp: tuple
    expected: dict


CASES = [
    Case("gemma-3 keeps five sliding layers to one", "gemma-3-1b", {}, (1, 1),
         {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
    Case("two KV heads at tp 4", "Qwen2.5-3B", {}, (1, 4), {"num_attention_heads": 16, "num_key_value_heads": 2}),
    Case("one KV head at tp 2", "gemma-3-1b", {}, (1, 2), {"num_attention_heads": 4, "num_key_value_heads": 1}),
    Case("heads that tp does not divide stay so", "gpt2", {}, (1, 5), {"n_head": 12}),
    Case("ffn width that tp does not divide stays so", "gpt2", {"n_inner": 3073}, (1, 2), {"n_inner": 97}),
    Case("hidden size unequal to heads times head_dim", "Qwen3-4B", {}, (1, 1),
         {"hidden_size": 80, "head_dim": 16, "num_attention_heads": 8}),
    Case("a pattern without a period keeps both kinds", "Qwen2.5-3B",
         {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 30}, (1, 1),
         {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": 6}),
    Case("a pad token stays inside the vocabulary", "Phi-3-mini-4k-instruct", {}, (1, 1), {"pad_token_id": 100}),
    Case("learned positions are cut, rotary ones are not", "gpt2", {}, (1, 1), {"n_positions": 128}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    small = reduced_config(resolve(case.model, case.overrides).config, *case.pp_tp)
    assert {key: getattr(small, key) for key in case.expected} == case.expected


def test_long_rope_factors_are_kept_one_for_each_rotated_pair():
    factors = [1.0 + i / 48 for i in range(48)]
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    config = resolve("Phi-3-mini-4k-instruct", {"rope_scaling": scaling, "max_position_embeddings": 131072}).config
    small = reduced_config(config, 1, 1)
    assert len(small.rope_parameters["short_factor"]) == small.hidden_size // small.num_attention_heads // 2
    source_from_config(small, "phi3").make()
