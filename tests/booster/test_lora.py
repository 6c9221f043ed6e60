"""Adapters for the Booster: what enable_lora gives and refuses, and what peft reads of a saved one."""

from __future__ import annotations

import builtins
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from shardc.booster.lora import enable_lora, save_adapter, saved_names
from shardc.errors import ShardcError

IDS = torch.arange(12).view(2, 6) % 31


def gpt2() -> nn.Module:
    """Its products have biases."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, loss_type=None)
    return transformers.GPT2LMHeadModel(config).eval()


def lora(**fields: Any) -> peft.LoraConfig:
    options = {"r": 2, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**options, **fields})


def trained(**fields: Any) -> peft.PeftModel:
    """A model with adapters whose trained parameters have all moved."""
    model = enable_lora(gpt2(), lora_config=lora(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=IDS).logits


def test_a_new_adapter_is_trained_alone_and_changes_nothing_yet() -> None:
    model = enable_lora(gpt2(), lora_config=lora()).eval()
    assert isinstance(model, peft.PeftModel)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    assert torch.equal(logits(model), logits(gpt2()))


FIELDS = [
    {},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"target_modules": ["wte", "c_fc"]},
    {"target_modules": "all-linear", "use_rslora": True},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_peft_reads_what_was_saved(fields: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**fields)
    save_adapter(tmp_path / "a", dict(model.named_parameters()), model.peft_config["default"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of keys that are missing
        again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "a").eval()
    assert not any(p.requires_grad for name, p in again.named_parameters() if "lora_" in name), "as peft saves"
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(gpt2()))
    further = enable_lora(gpt2(), pretrained_dir=tmp_path / "a").eval()
    assert torch.equal(logits(further), logits(model))
    names = {name for name, p in further.named_parameters() if p.requires_grad}
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("fields", FIELDS[:4], ids=str)
def test_the_file_is_the_one_that_peft_writes(fields: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**fields)
    model.save_pretrained(tmp_path / "peft")
    save_adapter(tmp_path / "ours", dict(model.named_parameters()), model.peft_config["default"])
    expected, found = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("peft", "ours"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    expected, found = (
        json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("peft", "ours")
    )
    assert found | {"target_modules": None} == expected | {"target_modules": None}
    assert found["target_modules"] == sorted(expected["target_modules"]), "a set, in one order"


def test_only_the_parameters_of_the_adapter_need_to_be_gathered() -> None:
    model = trained(bias="lora_only")
    names = saved_names((name for name, _ in model.named_parameters()), model.peft_config["default"])
    assert set(names) == {name for name, p in model.named_parameters() if p.requires_grad}
    first = "base_model.model.transformer.h.0.mlp.c_fc.lora_A"
    assert names[f"{first}.default.weight"] == f"{first}.weight"


def test_a_save_replaces_the_old_one_and_keeps_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = trained(), tmp_path / "a"
    tensors, config = dict(model.named_parameters()), model.peft_config["default"]
    save_adapter(folder, tensors, config)
    (folder / "README.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        save_adapter(folder, doubled, config)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_adapter(folder, doubled, config)
    assert (folder / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    saved = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(next(iter(saved.values())), doubled[next(n for n in sorted(doubled) if "lora_A" in n)])


CONFIG = "give lora_config=peft.LoraConfig(...), or pretrained_dir= a folder that peft wrote"
QUANTIZED = (
    "enable_lora: quantized base weights are not supported",
    "leave out quantize and bnb_quantization_config, and load the model in bfloat16",
)
REFUSED: list[tuple[str, Callable[[], Any], str, str]] = [
    ("quantize", lambda: enable_lora(gpt2(), None, lora(), None, True), *QUANTIZED),
    ("bnb", lambda: enable_lora(gpt2(), None, lora(), object()), *QUANTIZED),
    ("nothing", lambda: enable_lora(gpt2()), "enable_lora: neither pretrained_dir nor lora_config is given", CONFIG),
    (
        "no adapter there",
        lambda: enable_lora(gpt2(), "/nowhere"),
        "enable_lora: /nowhere holds no adapter_config.json",
        CONFIG,
    ),
    (
        "twice",
        lambda: enable_lora(enable_lora(gpt2(), lora_config=lora()), lora_config=lora()),
        "enable_lora: the model is a PeftModelForCausalLM already",
        "give it to boost as it is",
    ),
    (
        "modules_to_save",
        lambda: enable_lora(gpt2(), lora_config=lora(modules_to_save=["lm_head"])),
        "LoraConfig: modules_to_save is not supported",
        "leave modules_to_save out",
    ),
]


@pytest.mark.parametrize(("call", "problem", "advice"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_refused(call: Callable[[], Any], problem: str, advice: str) -> None:
    with pytest.raises(ShardcError) as caught:
        call()
    assert (caught.value.problem, caught.value.advice) == (problem, advice)


def test_a_refused_config_leaves_the_model_as_it_was() -> None:
    model = gpt2()
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(ShardcError):
        enable_lora(model, lora_config=lora(use_dora=True))
    assert [name for name, _ in model.named_modules()] == before


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ShardcError) as caught:
        enable_lora(nn.Linear(1, 1), lora_config=object())
    assert (caught.value.problem, caught.value.advice) == (
        "enable_lora: peft is not installed",
        "pip install 'shardc[train]'",
    )
