"""Each preset builds on meta tensors, and has as many parameters as were published (issue 2, Build 2)."""

import pytest
import torch

from shardc.models import Preset, list_presets, load_preset, resolve

FAMILIES = ["gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen3"]


@pytest.mark.parametrize("name", list_presets())
def test_the_parameter_count_is_the_published_one(name):
    with torch.device("meta"):
        model = resolve(name).make()
    count = sum(parameter.numel() for parameter in model.parameters())  # a tied weight is one parameter
    assert load_preset(name).params_match(count), (
        f"{count:,} parameters, published {load_preset(name).published_params}"
    )


def test_every_family_has_presets_and_the_list_is_in_natural_order():
    names = list_presets()
    assert len(names) >= 45
    assert {load_preset(name).fields["model_type"] for name in names} == set(FAMILIES)
    sizes = [name for name in names if name.startswith("Qwen3-")]
    assert sizes == ["Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]


def test_a_rounded_figure_allows_half_a_unit_in_its_last_place():
    rounded = Preset("x", "x/x", "8.03B", {})
    assert rounded.params_match(8_030_261_248)
    assert rounded.params_match(8_034_999_999)
    assert not rounded.params_match(8_036_000_000)


def test_a_preset_is_found_by_any_case_and_by_its_hub_id():
    assert load_preset("qwen3-4b").name == "Qwen3-4B"
    assert load_preset("Qwen/Qwen3-4B").name == "Qwen3-4B"
    assert load_preset("meta-llama/Meta-Llama-3-8B").name == "Llama-3-8B"
    assert load_preset("someone/Qwen3-4B") is None
