"""Bundled policies fit their families; other architectures get their own plan, or a refusal."""

import pytest
import torch

from shardc import ShardcError
from shardc.models import list_presets, resolve, source_from_config
from shardc.policy import (
    bundled_policies,
    find_blocks,
    load_bundled,
    match,
    module_classes,
    policy_for,
    policy_from_hf_plan,
)

ADVICE = "\n  write one (CONTRIBUTING.md, A policy) and give it by --policy my_model.yaml"


def built(config):
    with torch.device("meta"):
        return module_classes(source_from_config(config, "x").make())


@pytest.mark.parametrize("name", list_presets())
def test_the_bundled_policy_gives_every_matrix_a_role(name):
    config = resolve(name, {"num_hidden_layers": 2}).config
    policy, modules = policy_for(config), built(config)
    blocks = find_blocks(policy, modules)
    found = match(policy, modules, blocks)
    positions = {"transformer.wpe", "model.decoder.embed_positions"}
    assert {p for p, kind in modules.items() if kind in ("Linear", "Conv1D", "Embedding")} - set(found) <= positions
    assert len(blocks) == 2
    assert policy.file in {f"{family}.yaml" for family in bundled_policies()}


def test_olmo2_keeps_attention_whole_because_its_norms_span_the_heads():
    config = resolve("OLMo-2-1B", {"num_hidden_layers": 1}).config
    found = match(policy_for(config), built(config))
    assert {p.rpartition(".")[2]: rule.role for p, rule in found.items() if "layers" in p} == {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], "replicate"),
        **dict.fromkeys(["gate_proj", "up_proj"], "column"),
        "down_proj": "row",
    }


@pytest.mark.parametrize(
    "name", ["Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-0.6B", "gemma-2-2b", "gemma-3-1b", "OLMo-2-1B", "pythia-70m"]
)
def test_a_models_own_plan_gives_the_roles_of_the_bundled_file(name):
    config = resolve(name, {"num_hidden_layers": 1}).config
    modules = built(config)
    own, bundled = policy_from_hf_plan(config), policy_for(config)
    assert find_blocks(own, modules) == find_blocks(bundled, modules)
    roles = [{path: rule.role for path, rule in match(policy, modules).items()} for policy in (own, bundled)]
    assert roles[0] == roles[1]


def test_an_architecture_without_a_file_gets_its_own_plan():
    from transformers import SmolLM3Config

    config = SmolLM3Config(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    )
    policy, modules = policy_for(config), built(config)
    found = match(policy, modules, find_blocks(policy, modules))
    assert policy.file == "SmolLM3Config.base_model_tp_plan"
    assert found["model.layers.0.self_attn.o_proj"].role == "row"
    assert found["model.embed_tokens"].role == found["lm_head"].role == "vocab"
    assert found["model.layers.0.self_attn.q_proj"].place == "SmolLM3Config.base_model_tp_plan:1"


def test_an_unknown_bundled_name_lists_the_bundled_ones():
    with pytest.raises(ShardcError) as caught:
        load_bundled("qwen4")
    assert str(caught.value) == (
        "policy 'qwen4' is not bundled; bundled: gemma2, gemma3, gpt2, gpt_neox, llama, mistral, olmo2, opt, phi3, "
        "qwen2, qwen3\n  give a file of your own by --policy"
    )


def test_refusals_name_what_to_write():
    from transformers import BloomConfig, MixtralConfig

    for config, problem in (
        (None, "a model that is not from transformers has no bundled policy"),
        (BloomConfig(), "model_type 'bloom' has no bundled policy and no plan of its own"),
    ):
        with pytest.raises(ShardcError) as caught:
            policy_for(config)
        assert str(caught.value) == problem + ADVICE
    with pytest.raises(
        ShardcError, match=r"^MixtralConfig.base_model_tp_plan:\d+: model.layers.* has the style \w+, for which"
    ):
        policy_for(MixtralConfig())
