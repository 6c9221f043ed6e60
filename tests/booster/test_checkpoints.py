"""Checkpoints of every plugin: plain transformers reads them, and any other plugin goes on from them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from shardc.booster import Booster
from shardc.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from shardc.errors import ShardcError
from tests.booster.small import (
    PLUGINS,
    ROWS,
    make_loader,
    make_model,
    make_rows,
    parameter_groups,
    plugin_named,
    train_on,
)
from tests.workers import Workers

HERE = "tests.booster.test_checkpoints"


# -- weights -----------------------------------------------------------------------------------------------------------
def trained_and_saved(name: str, folder: str, tied: bool) -> None:
    """Two steps, then a folder, small files and one file: from_pretrained gives equal logits."""
    plugin = plugin_named(name)
    model = make_model(tie_word_embeddings=tied)
    booster = Booster(plugin=plugin)
    loader = make_loader(2, ROWS // plugin.dp_size)
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2), None, loader)
    for batch in loader:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(model, f"{folder}/whole", shard=True)
    booster.save_model(model, f"{folder}/one.safetensors")
    booster.save_model(model, f"{folder}/one.bin")
    batch = next(iter(make_loader(1)))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
        if model.module.mesh.rank == 0:
            again = AutoModelForCausalLM.from_pretrained(f"{folder}/whole").eval()
            torch.testing.assert_close(again(input_ids=batch["input_ids"]).logits, logits, rtol=1e-5, atol=1e-5)
            assert _keys(f"{folder}/whole/model.safetensors") == set(make_keys(tied))
            assert _keys(f"{folder}/one.safetensors") == set(make_keys(tied))
            assert (Path(folder) / "whole/generation_config.json").is_file()
            loaded = make_model(tie_word_embeddings=tied)
            loaded.load_state_dict(torch.load(f"{folder}/one.bin", weights_only=True))
            assert _differences(loaded, again) == []
    for source in ("whole", "one.safetensors", "one.bin"):
        fresh = make_model(tie_word_embeddings=tied, initializer_range=0.5)
        fresh, *_ = booster.boost(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
        booster.load_model(fresh, f"{folder}/{source}")
        with torch.no_grad():
            assert torch.equal(fresh(input_ids=batch["input_ids"]).logits, logits), source


def make_keys(tied: bool) -> list[str]:
    """What transformers saves of the model."""
    return [key for key in make_model(tie_word_embeddings=tied).state_dict() if not (tied and key == "lm_head.weight")]


def _keys(path: str) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


def _differences(one: nn.Module, other: nn.Module) -> list[str]:
    values = dict(other.named_parameters())
    return [name for name, value in one.named_parameters() if not torch.equal(value, values[name])]


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in PLUGINS), ("gemini", False), ("tp2_pp2_zero1", False)]
)
def test_from_pretrained_reads_what_each_plugin_saves(workers: Workers, name: str, tied: bool, tmp_path: Path) -> None:
    workers.run(4, f"{HERE}:trained_and_saved", name, str(tmp_path), tied)


def test_the_size_of_files_is_honoured(tmp_path: Path) -> None:
    booster, big = Booster(), make_model(hidden_size=512, num_hidden_layers=4, intermediate_size=256)
    model, *_ = booster.boost(big)
    booster.save_model(model, tmp_path / "m", shard=True, size_per_shard=2)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 2 * 2**20 + 4096 for file in files)
    assert _differences(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), big) == []


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    booster, other = Booster(), make_model(intermediate_size=40)
    other.save_pretrained(tmp_path / "other")
    model, *_ = booster.boost(make_model())
    with pytest.raises(ShardcError, match=r"gate_proj\.weight is \[40, 32\], the plan has \[48, 32\]"):
        booster.load_model(model, tmp_path / "other")
    with pytest.raises(ShardcError, match="nowhere"):
        booster.load_model(model, tmp_path / "nowhere")
    assert _differences(make_model(), _whole(model.module.gather_parameters())) == []


def _whole(parameters: dict[str, torch.Tensor]) -> Qwen3ForCausalLM:
    model = make_model()
    model.load_state_dict(parameters, strict=False)
    return model


def test_a_save_keeps_what_else_lies_in_its_folder(tmp_path: Path) -> None:
    """Model, optimizer and older checkpoints in one folder; a file is not replaced by a folder."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "model.safetensors").write_text("old")
    (tmp_path / "tokenizer.json").write_text("{}")
    booster, live = Booster(), make_model()
    model, optimizer, *_ = booster.boost(live, torch.optim.AdamW(live.parameters()))
    for _ in range(2):
        booster.save_model(model, tmp_path, shard=True)
        booster.save_optimizer(optimizer, tmp_path)
    booster.load_model(model, tmp_path)
    booster.load_optimizer(optimizer, tmp_path)
    assert (tmp_path / "checkpoint-1" / "model.safetensors").read_text() == "old"
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    for save in (booster.save_optimizer, booster.save_model):
        with pytest.raises(ShardcError, match=r"tokenizer\.json is a file, not a folder"):
            save(model if save == booster.save_model else optimizer, tmp_path / "tokenizer.json", shard=True)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for path in (tmp_path / "tokenizer.json", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ShardcError, match=f"load_lr_scheduler: {path} cannot be read"):
            booster.load_lr_scheduler(schedule, path)


def failing_saves(path: str) -> None:
    """Rank 0 alone writes, and fails; the others say so too instead of going on."""
    booster, live = Booster(plugin=LowLevelZeroPlugin(1, "fp32")), make_model()
    model, optimizer, *_ = booster.boost(live, torch.optim.AdamW(live.parameters()))
    said = "" if model.module.mesh.rank == 0 else "rank 0: "
    for save in (
        lambda: booster.save_model(model, path, shard=True),
        lambda: booster.save_model(model, f"{path}/model.bin"),
        lambda: booster.save_optimizer(optimizer, path),
        lambda: booster.save_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), f"{path}/schedule.pt"),
    ):
        with pytest.raises(ShardcError, match=rf"^{said}.*{Path(path).name}"):
            save()
    booster.save_model(model, f"{path}.saved", shard=True)


def test_a_save_that_fails_on_one_rank_fails_on_all(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    workers.run(2, f"{HERE}:failing_saves", str(tmp_path / "taken"))


def peaks(name: str, folder: str) -> tuple[int, int]:
    """Resident bytes of this rank: at most in a training step, at most in saves of model and optimizer after it."""
    model, plugin = make_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4), plugin_named(name)
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(
        model, torch.optim.AdamW(model.parameters()), None, make_loader(1, ROWS // plugin.dp_size)
    )
    gc.collect()
    _forget_peak()
    for batch in loader:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    training = _peak()
    _forget_peak()
    booster.save_model(model, f"{folder}/model", shard=True, size_per_shard=2)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", size_per_shard=2)
    return training, _peak()


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory are read from /proc")
def test_a_save_needs_at_most_a_file_more_than_training(workers: Workers, tmp_path: Path) -> None:
    """50 MiB of parameters, 150 of what the optimizer keeps, in files of 2 MiB, or of one parameter of 4."""
    for rank, (training, saving) in enumerate(workers.run(2, f"{HERE}:peaks", "gemini", str(tmp_path))):
        assert saving - training < (4 + 8) * 2**20, (rank, training, saving)
    files = [path.stat().st_size for path in (tmp_path / "optimizer").glob("*.safetensors")]
    assert len(files) > 30 and max(files) < 5 * 2**20


# -- runs that go on ---------------------------------------------------------------------------------------------------
STEPS, SAVED_AFTER = 8, 3


def run_of(plugin: Any, *, dropout: float = 0.0, std: float = 0.02) -> tuple[Any, ...]:
    """Everything of a run over shuffled data: booster, then what boost returns. std: of the values it begins with."""
    model = make_model(attention_dropout=dropout, initializer_range=std)
    optimizer = torch.optim.AdamW(list(parameter_groups(model)), lr=3e-3)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        ],
        [4],
    )
    loader = DataLoader(make_rows(ROWS * STEPS), batch_size=ROWS // plugin.dp_size, shuffle=True)
    booster = Booster(plugin=plugin)
    return booster, *booster.boost(model, optimizer, None, loader, schedule)


def train(run: tuple[Any, ...], steps: int, folder: str | None = None) -> list[tuple[float, float]]:
    """Loss and rate of each step; saves after SAVED_AFTER of them where a folder is given."""
    booster, model, optimizer, _, loader, schedule = run
    done = []
    for batch in loader:
        loss = train_on(batch, booster, model, optimizer, schedule)
        done.append((loss.item(), optimizer.param_groups[0]["lr"]))
        if len(done) == SAVED_AFTER and folder is not None:
            booster.save_model(model, f"{folder}/model", shard=True)
            booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
            booster.save_lr_scheduler(schedule, f"{folder}/schedule.pt")
        if len(done) == steps:
            break
    return done


def first_run(name: str, precision: str, folder: str, dropout: float) -> list[tuple[float, float]]:
    """The whole run, which saves in the middle."""
    return train(run_of(plugin_named(name, precision), dropout=dropout), STEPS, folder)


def resumed(name: str, precision: str, folder: str, dropout: float) -> list[tuple[float, float]]:
    """The rest of it, from the folder; with dropout, on the same layout, from the masters."""
    plugin = plugin_named(name, precision) if name != "tp4" else HybridParallelPlugin(4, 1, precision=precision)
    run = run_of(plugin, dropout=dropout, std=0.5)
    booster, model, optimizer, _, _, schedule = run
    if not dropout:
        booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(schedule, f"{folder}/schedule.pt")
    return train(run, STEPS - SAVED_AFTER)


@pytest.mark.parametrize(("precision", "dropout"), [("fp32", 0.0), ("bf16", 0.2)])
def test_a_run_of_tp2_pp2_zero1_goes_on_anywhere(
    workers: Workers, precision: str, dropout: float, tmp_path: Path
) -> None:
    """Bit by bit on its own layout, with the masks of dropout; elsewhere without them."""
    first = workers.run(4, f"{HERE}:first_run", "tp2_pp2_zero1", precision, str(tmp_path), dropout)[0]
    rest = workers.run(4, f"{HERE}:resumed", "tp2_pp2_zero1", precision, str(tmp_path), dropout)[0]
    assert rest == first[SAVED_AFTER:]
    others = ["ddp", "tp4", "zero2", "gemini", "fsdp"] if not dropout else []
    for name in others:
        found = workers.run(4, f"{HERE}:resumed", name, precision, str(tmp_path), dropout)[0]
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(first[SAVED_AFTER:]), rtol=1e-5, atol=1e-9, msg=name
        )


@pytest.mark.parametrize("name", ["zero2", "fsdp", "gemini", "pp2_zero3"])
def test_each_placement_goes_on_bit_by_bit_on_its_own_layout(workers: Workers, name: str, tmp_path: Path) -> None:
    first = workers.run(4, f"{HERE}:first_run", name, "fp32", str(tmp_path), 0.2)[0]
    assert workers.run(4, f"{HERE}:resumed", name, "fp32", str(tmp_path), 0.2)[0] == first[SAVED_AFTER:]


def test_the_loss_scale_is_restored(tmp_path: Path) -> None:
    runs = []
    for resumes in (False, True):
        run = run_of(LowLevelZeroPlugin(1, "fp16", initial_scale=2.0**30, hysteresis=1))
        booster, _, optimizer, *_ = run
        if resumes:
            booster.load_optimizer(optimizer, tmp_path / "optimizer")
            assert (optimizer.scaler.value, optimizer.num_steps) == runs[-1]
        else:
            train(run, 2)
            booster.save_optimizer(optimizer, tmp_path / "optimizer")
            runs.append((optimizer.scaler.value, optimizer.num_steps))
    assert runs[0][0] < 2**30


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    booster, _, optimizer, *_ = run_of(LowLevelZeroPlugin(1, "fp32"))
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    model = make_model()
    _, other, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ShardcError, match="SGD"):
        booster.load_optimizer(other, tmp_path / "optimizer")


# -- killed saves ------------------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys, torch
import safetensors.torch
from shardc.booster import Booster
from shardc.runtime import checkpoint, optimizer_checkpoint
from tests.booster.small import make_loader, make_model

kind, folder = sys.argv[1:]
model = make_model()
booster = Booster()
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
save = {
    "model": lambda: booster.save_model(model, folder, shard=True, size_per_shard=1),
    "file": lambda: booster.save_model(model, folder + "/one.safetensors"),
    "optimizer": lambda: booster.save_optimizer(optimizer, folder),
}[kind]
save()
booster.backward(model(**next(iter(make_loader(1)))).loss, optimizer)
optimizer.step()
rename = os.rename

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

os.replace = os.rename = killed  # everything is written, nothing is in place
save()
"""


@pytest.mark.parametrize("kind", ["model", "file", "optimizer"])
def test_a_killed_save_leaves_the_previous_one(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, kind, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    model = make_model()
    booster = Booster()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if kind == "optimizer":
        booster.load_optimizer(optimizer, folder)
        assert optimizer.num_steps == 0
        return
    booster.load_model(boosted, folder if kind == "model" else folder / "one.safetensors")
    assert _differences(_whole(boosted.module.gather_parameters()), make_model()) == []
