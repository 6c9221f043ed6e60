"""A saved folder opens in transformers; a save replaces the old one as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shardc.runtime import Mesh, checkpoint, load_plan
from shardc.runtime.spec import ParameterSpec, PlanSpec
from tests.runtime import toy


def spec_of(parameters: dict[str, torch.Tensor], aliases: dict[str, tuple[str, ...]]) -> PlanSpec:
    specs = {
        name: ParameterSpec(name, tuple(p.shape), (0,), aliases.get(name, ()), True, None, (), None)
        for name, p in parameters.items()
    }
    return PlanSpec("tiny", 1, 1, None, False, torch.float32, specs, {}, (), (), ())


@pytest.mark.parametrize("tied", [True, False])
def test_saved_folder_opens_in_transformers(tmp_path: Path, tied: bool) -> None:
    """One copy of a tied weight; equal logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "plan")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    spec = spec_of(parameters, {"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {})
    pieces = iter(sorted(parameters.items()))
    checkpoint.save_pretrained(tmp_path / "saved", pieces, spec, Mesh.single(), tmp_path / "plan", 2000)
    names = set()
    for path in (tmp_path / "saved").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert ("lm_head.weight" in names) is not tied
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_save_keeps_other_files_and_drops_old_weights(tmp_path: Path) -> None:
    module = load_plan(toy.write_plan(tmp_path / "plan")).build(seed=0, device="cpu")
    target = tmp_path / "saved"
    module.save_pretrained(target, max_shard_bytes=1000)
    (target / "tokenizer.json").write_text("{}")
    module.save_pretrained(target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan", "saved"]


def test_failed_save_leaves_the_old_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_plan(toy.write_plan(tmp_path / "plan")).build(seed=0, device="cpu")
    module.save_pretrained(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_safetensors", killed)
    with pytest.raises(KeyboardInterrupt):
        module.save_pretrained(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
