"""lazy_init: a model without values trains as one that was loaded, and no rank holds all of it."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import GeminiPlugin, HybridParallelPlugin
from shardc.errors import ShardcError
from shardc.runtime.weights import FolderWeights
from tests.booster.small import make_loader, make_model
from tests.workers import Workers

HERE = "tests.booster.test_lazy"


def lazily_loaded(folder: str) -> None:
    """Every value is the file's own; what a rank reads at once is one parameter's part."""
    largest = []
    read = FolderWeights.shard

    def watched(self: FolderWeights, spec: object, *rest: object) -> torch.Tensor:
        value = read(self, spec, *rest)
        largest.append(value.numel())
        return value

    FolderWeights.shard = watched
    try:
        with shardc.lazy_init():
            model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not model.training
        plugin = HybridParallelPlugin(2, 2, precision="fp32", num_microbatches=2)
        boosted, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        FolderWeights.shard = read
    reference = AutoModelForCausalLM.from_pretrained(folder)
    found = boosted.module.gather_parameters()
    if boosted.module.mesh.rank == 0:
        for name, value in reference.named_parameters():
            assert torch.equal(found[name], value), name
    assert sum(largest) < 0.6 * sum(p.numel() for p in reference.parameters()), "a rank reads its own part"
    batch = next(iter(make_loader(1)))
    with torch.no_grad():
        torch.testing.assert_close(boosted(**batch).logits, reference(**batch).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_folder_is_read_slice_by_slice(workers: Workers, tmp_path: Path, max_shard_size: str) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size=max_shard_size)
    workers.run(4, f"{HERE}:lazily_loaded", str(tmp_path))


def drawn() -> list[float]:
    """From rank 0's seed, whatever the others' are."""
    torch.manual_seed(torch.distributed.get_rank())
    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_config(make_model().config)
    losses = []
    for plugin in (GeminiPlugin(precision="fp32"), HybridParallelPlugin(2, 1, precision="fp32")):
        boosted, *_ = Booster(plugin=plugin).boost(model)
        with torch.no_grad():
            losses.append(boosted(**next(iter(make_loader(1)))).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    return losses


def test_values_that_are_drawn_are_the_same_on_all_ranks(workers: Workers) -> None:
    first, second = workers.run(2, f"{HERE}:drawn")
    assert first == second


def test_dtypes_are_those_of_from_pretrained(tmp_path: Path) -> None:
    make_model(torch.bfloat16).save_pretrained(tmp_path)
    for arguments in ({}, {"dtype": torch.float32}, {"torch_dtype": "bfloat16"}, {"dtype": "auto"}):
        with shardc.lazy_init():
            lazy = Qwen3ForCausalLM.from_pretrained(tmp_path, **arguments)
        loaded = Qwen3ForCausalLM.from_pretrained(tmp_path, **arguments)
        assert lazy.dtype is loaded.dtype
        assert lazy.generation_config.to_dict() == loaded.generation_config.to_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with shardc.lazy_init():
        assert Qwen3ForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16


def test_masters_of_a_lazy_model_hold_the_files_float32_values(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with shardc.lazy_init():
        model = Qwen3ForCausalLM.from_pretrained(tmp_path)
    boosted, *_ = Booster(plugin=GeminiPlugin(precision="bf16")).boost(model, torch.optim.SGD(model.parameters()))
    (name, value) = next(iter(make_model().named_parameters()))
    piece = boosted.module.state.piece(name)
    held = piece.master.data.view(-1)[piece.start : piece.start + piece.numel]
    assert torch.equal(held, value.detach().flatten())


def test_adapters_of_a_lazy_model(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    batch = next(iter(make_loader(1)))
    losses = []
    for lazily in (False, True):
        torch.manual_seed(5)
        if lazily:
            with shardc.lazy_init():
                model = Qwen3ForCausalLM.from_pretrained(tmp_path / "base")
        else:
            model = Qwen3ForCausalLM.from_pretrained(tmp_path / "base")
        booster = Booster()
        model = booster.enable_lora(model, lora_config=config)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        for _ in range(3):
            loss = boosted(**batch).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(boosted(**batch).loss.item())
        booster.save_lora_as_pretrained(boosted, tmp_path / f"adapter{lazily}")
    plain = make_model()(**batch).loss.item()
    assert abs(losses[0] - plain) > 0.05 and abs(losses[1] - plain) > 0.05
    with shardc.lazy_init():
        model = Qwen3ForCausalLM.from_pretrained(tmp_path / "base")
    model = Booster().enable_lora(model, pretrained_dir=tmp_path / "adapterTrue")
    boosted, *_ = Booster().boost(model)
    with torch.no_grad():
        assert boosted(**batch).loss.item() == pytest.approx(losses[1], rel=1e-5)


def test_what_cannot_be_lazy_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ShardcError, match="does not take device_map"), shardc.lazy_init():
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    with torch.device("meta"):
        model = make_meta()
    with pytest.raises(ShardcError, match=r"model\.embed_tokens\.weight is on the meta device.*\n.*lazy_init"):
        Booster().boost(model)
    other = make_model(intermediate_size=40).config
    with shardc.lazy_init():
        model = Qwen3ForCausalLM.from_pretrained(tmp_path, config=other)
    with pytest.raises(ShardcError, match=r"gate_proj\.weight is \[48, 32\], the plan has \[40, 32\]"):
        Booster().boost(model)


def make_meta() -> nn.Module:
    return Qwen3ForCausalLM(make_model().config)


def test_transformers_is_as_before_afterwards() -> None:
    before = PreTrainedModel.__dict__["from_pretrained"], PreTrainedModel.__init__
    with pytest.raises(RuntimeError, match="stop"), shardc.lazy_init(), shardc.lazy_init():
        raise RuntimeError("stop")
    assert (PreTrainedModel.__dict__["from_pretrained"], PreTrainedModel.__init__) == before
    assert not next(Qwen3ForCausalLM(make_model().config).parameters()).is_meta
