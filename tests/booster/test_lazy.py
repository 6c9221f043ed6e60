"""lazy_init: a model without values trains as one that was loaded, and no rank holds all of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
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
    config = make_model().config
    torch.manual_seed(torch.distributed.get_rank())
    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_config(config)
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


def test_a_model_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network; what some repositories keep beside the model is not downloaded."""
    repository, commit = tmp_path / "models--org--small", "0" * 40
    make_model().save_pretrained(repository / "snapshots" / commit, max_shard_size="20KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    asked: list[str] = []
    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *a, **kw: (asked.extend(kw["allow_patterns"]), download(*a, **kw))[1],
    )
    with shardc.lazy_init():
        model = Qwen3ForCausalLM.from_pretrained("org/small", cache_dir=tmp_path, local_files_only=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    found = Booster().boost(model)[0].module.gather_parameters()
    for name, value in make_model().named_parameters():
        assert torch.equal(found[name], value), name
    files = ["model.safetensors.index.json", "model-00001-of-00004.safetensors", "consolidated.safetensors"]
    assert list(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=asked)) == files[:2]


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, Qwen3ForCausalLM])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_dropout": 0.25, "use_cache": False},
        {"tie_word_embeddings": False},
        {"trust_remote_code": True, "low_cpu_mem_usage": True, "attn_implementation": "eager"},
        {"device_map": None, "output_loading_info": False, "token": None},
    ],
    ids=str,
)
def test_arguments_have_the_effect_that_they_have_in_transformers(tmp_path: Path, kind: Any, arguments: dict) -> None:
    make_model().save_pretrained(tmp_path)
    with shardc.lazy_init():
        lazy = kind.from_pretrained(tmp_path, **arguments)
    loaded = kind.from_pretrained(tmp_path, **arguments)
    assert lazy.config.to_dict() == loaded.config.to_dict()
    assert lazy.config._attn_implementation == loaded.config._attn_implementation
    assert lazy.name_or_path == loaded.name_or_path
    assert lazy.state_dict().keys() == loaded.state_dict().keys()


def test_a_config_that_is_given_stays_as_it_was(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    config = make_model(attention_dropout=0.5).config
    before = config.to_dict()
    with shardc.lazy_init():
        model = Qwen3ForCausalLM.from_pretrained(tmp_path, config=config)
    assert model.config.attention_dropout == 0.5
    assert config.to_dict() == before


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_without_a_head(tmp_path: Path, tied: bool) -> None:
    """Of the bare model: a tied head is there, another one is missing, and named."""
    whole = make_model(tie_word_embeddings=tied)
    whole.model.save_pretrained(tmp_path)
    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    if tied:
        batch = next(iter(make_loader(1)))
        boosted, *_ = Booster().boost(model)
        with torch.no_grad():
            torch.testing.assert_close(boosted(**batch).loss, whole(**batch).loss)
    else:
        with pytest.raises(ShardcError, match=r"lm_head\.weight is missing"):
            Booster().boost(model)


def test_a_model_without_values_is_not_called(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with shardc.lazy_init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = next(iter(make_loader(1)))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for called in (model, model.model, adapted):
        with pytest.raises(ShardcError, match=r"Qwen3\w+: was made inside lazy_init, and has no values"):
            called(input_ids=batch["input_ids"])
    model = model.to_empty(device="cpu")  # values of the user's own
    model.load_state_dict(make_model().state_dict(), strict=False)
    assert model(**batch).loss is not None


REFUSED: list[tuple[dict, str]] = [
    ({"device_map": "auto"}, "from_pretrained does not take device_map"),
    ({"variant": "fp16", "ignore_mismatched_sizes": True}, "does not take ignore_mismatched_sizes, variant"),
    ({"quantization_config": {"quant_method": "fp8"}}, "does not take quantization_config"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[row[1] for row in REFUSED])
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, Qwen3ForCausalLM])
def test_arguments_that_change_the_weights_are_refused(
    tmp_path: Path, kind: Any, arguments: dict, message: str
) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ShardcError, match=message), shardc.lazy_init():
        kind.from_pretrained(tmp_path, **arguments)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    """Their integers or float8 numbers are no values without the scales beside them."""
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ShardcError, match="the checkpoint is quantized"), shardc.lazy_init():
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, Qwen3ForCausalLM])
@pytest.mark.parametrize("beside_its_base", [False, True])
def test_folders_of_adapters_are_refused(tmp_path: Path, kind: Any, beside_its_base: bool) -> None:
    """transformers would load the adapter too."""
    make_model().save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        kind.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    model.save_pretrained(tmp_path / "adapter")
    if beside_its_base:
        shutil.copytree(tmp_path / "base", tmp_path / "adapter", dirs_exist_ok=True)
    with pytest.raises(ShardcError, match=r"holds an adapter.*\n.*enable_lora"), shardc.lazy_init():
        kind.from_pretrained(tmp_path / "adapter")


def test_what_has_no_values_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
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
