"""The examples as a user starts them: they train what plain transformers trains, and say how to start them."""

from __future__ import annotations

import importlib.util
import json
import os
import pydoc_data.topics
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardc.plan.verification import RELATIVE, relative_error
from tests.end_to_end.exact import Layout, prepare, small
from tests.end_to_end.scripts import shardc_run
from tests.workers import Workers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS, ROWS, LENGTH, LR = 20, 8, 24, 3e-4

# Python runs a sitecustomize.py of its path at start: here one that makes `import transformers` fail.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ImportError("transformers is blocked in this process")

sys.meta_path.insert(0, Blocked())
"""


def plain_loop(model: nn.Module) -> list[dict[str, float]]:
    """What examples/train_plan.py does, in one process with the Hugging Face model and nothing of shardc."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sampler = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    log = []
    for _ in range(STEPS):
        offsets = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=sampler).tolist()
        rows = torch.stack([tokens[i : i + LENGTH] for i in offsets]).long()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.append({"loss": loss.item(), "grad_norm": norm.item()})
    return log


@pytest.mark.parametrize(
    ("layout", "launched"), [(Layout(tp=2, pp=2), True), (Layout(tp=2, dp=2, sp=True), False)], ids=str
)
def test_train_plan_equals_plain_transformers_without_importing_it(
    layout: Layout, launched: bool, workers: Workers, tmp_path: Path
) -> None:
    """Loss and gradient norm of 20 steps. launched: by `shardc run`, with `import transformers` blocked in it and in
    all ranks; else on ranks that run already."""
    trial = prepare(small("Qwen3-4B", layout, vocab_size=256), tmp_path, layout)
    log, weights = tmp_path / "log.jsonl", str(tmp_path / "weights")
    sizes = ["--steps", str(STEPS), "--batch-size", str(ROWS), "--seq-length", str(LENGTH), "--lr", str(LR)]
    script = str(EXAMPLES / "train_plan.py")
    arguments = [str(tmp_path / "plan"), "--weights", weights, "--log", str(log), *sizes]
    if launched:
        (tmp_path / "sitecustomize.py").write_text(BLOCKED)
        blocked = {"PYTHONPATH": str(tmp_path)}
        done = shardc_run("--nproc_per_node", "4", script, *arguments, cwd=tmp_path, env=blocked)
        assert done.returncode == 0, done.stderr[-3000:]
        printed = done.stdout
    else:
        printed = workers.run(4, "tests.end_to_end.scripts:run_script", script, arguments)[0]
    assert f"step {STEPS:4d}  loss" in printed
    found = [json.loads(line) for line in log.read_text().splitlines()]
    expected = plain_loop(trial.model)
    assert len(found) == STEPS
    for one, other in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert relative_error(one[key], other[key]) <= RELATIVE, (key, one, other)
    assert expected[-1]["loss"] < expected[0]["loss"]


def test_transformers_is_really_blocked(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    command = [sys.executable, "-c", "import transformers"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert "transformers is blocked in this process" in done.stderr


def test_train_tiny_goes_the_whole_way(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which starts those of the compiler and of the ranks."""
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--steps", "3", "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "train_tiny.py"), run_name="__main__")
    printed = capfd.readouterr().out
    assert "step    3  loss" in printed
    assert "opened by transformers, continues:" in printed
    assert "The class statement " in printed
    assert (tmp_path / "tiny-qwen3-trained" / "model.safetensors").is_file()


# -- the Booster's examples, by the commands of the README -------------------------------------------------------------
def readme_command(script: str) -> list[str]:
    """What follows `shardc run` where the README starts examples/SCRIPT on four ranks."""
    return ["--nproc_per_node", "4", f"examples/{script}", *readme_arguments(script)]


def readme_arguments(script: str) -> list[str]:
    """What follows the script there."""
    command = rf"^shardc run --nproc_per_node 4 examples/{script}([^#\n]*)"
    return re.search(command, (ROOT / "README.md").read_text(), re.M).group(1).split()


@dataclass(frozen=True)
class Place:
    """A folder with the examples and, as tiny_model.py makes it, tiny/."""

    folder: Path

    def loss_of(self, model: str) -> float:
        """Of a saved model on some texts."""
        loaded = AutoModelForCausalLM.from_pretrained(self.folder / model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "tiny/model")
        lines = (self.folder / "tiny/data/train.jsonl").read_text().splitlines()[:32]
        batch = tokenizer([json.loads(line)["output"] for line in lines], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.no_grad():
            return loaded(**batch, labels=labels).loss.item()


@pytest.fixture
def place(tiny: Path, tmp_path: Path) -> Place:
    (tmp_path / "tiny").symlink_to(tiny)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for script in EXAMPLES.glob("*.py"):
        (tmp_path / script.name).symlink_to(script)
    return Place(tmp_path)


def test_the_quickstart_of_the_readme_trains_and_saves_a_model(place: Place) -> None:
    done = shardc_run(*readme_command("quickstart.py"), cwd=place.folder)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d+\.\d{4}) ", done.stdout, re.M)]  # step, loss, ...
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert place.loss_of("ckpt") < place.loss_of("tiny/model") - 0.5


SCRIPTS = [
    *(("quickstart.py", plugin, "ckpt") for plugin in ("ddp", "zero2", "gemini")),  # "3d" is the README's
    *(("finetune.py", plugin, "out") for plugin in ("gemini", "hybrid_parallel", "ddp")),
]


@pytest.mark.parametrize(("script", "plugin", "saved"), SCRIPTS)
def test_scripts_train_and_save_a_model_under_each_plugin(
    workers: Workers, place: Place, script: str, plugin: str, saved: str
) -> None:
    """With the README's arguments, on ranks that run already."""
    arguments = [*readme_arguments(script), "--plugin", plugin]  # the last one counts
    workers.run(4, "tests.end_to_end.scripts:run_script", str(place.folder / script), arguments)
    assert place.loss_of(saved) < place.loss_of("tiny/model") - 0.5


@pytest.mark.parametrize("script", ["quickstart.py", "finetune.py"])
def test_help_says_what_the_scripts_load_by_default_and_how_to_do_without(
    script: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    shown = capsys.readouterr().out
    for name in re.findall(r'default="([\w.-]+/[\w.-]+)"', (EXAMPLES / script).read_text()):
        assert f"default: {name}\n" in shown
    assert f"examples/{script} --model" in shown
    assert "python examples/tiny_model.py tiny" in shown


# -- compare_plugins.py ------------------------------------------------------------------------------------------------
PLUGINS = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "Gemini", "TP 2", "TP 2, PP 2, ZeRO-1", "PP 2, ZeRO-3")


def test_eight_plugins_train_as_one_process_of_transformers(workers: Workers, place: Place) -> None:
    script, arguments = str(place.folder / "compare_plugins.py"), [*readme_arguments("compare_plugins.py"), "--json"]
    printed = workers.run(4, "tests.end_to_end.scripts:run_script", script, arguments, timeout_s=240)[0]
    runs = {(run["plugin"], run["accumulation"]): run for run in json.loads(printed)["runs"]}
    assert set(runs) == {(plugin, calls) for plugin in ("one process", *PLUGINS) for calls in (1, 3)}
    for (_, calls), run in runs.items():
        expected = runs["one process", calls]
        assert len(run["loss"]) == len(run["grad_norm"]) == 10
        assert run["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=0)
        assert run["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4, abs=0)
        assert run["ok"]
        assert run["loss_difference"] <= 1e-4
        assert run["grad_norm_difference"] <= 1e-4
        assert run["loss"][-1] < run["loss"][0] - 0.2
        assert min(run["grad_norm"]) > 0.5  # each step is clipped


@pytest.fixture
def compare_plugins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_plugins", EXAMPLES / "compare_plugins.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compare_plugins_says_on_how_many_ranks_it_runs(
    compare_plugins: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_plugins.py"])
    with pytest.raises(SystemExit, match="2"):
        compare_plugins.main()
    said = capsys.readouterr().err
    assert said == "compare_plugins.py: started on 1 rank(s); use shardc run --nproc_per_node 4 compare_plugins.py\n"


@pytest.mark.parametrize(("moved", "code", "shown"), [(0.9e-4, 0, "equal"), (1.1e-4, 1, "DIFFERS")])
def test_compare_plugins_fails_where_one_step_differs(
    compare_plugins: ModuleType,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    moved: float,
    code: int,
    shown: str,
) -> None:
    """A run whose gradient norm, 0.5, is off in the third step alone by a share of it."""
    plain = {"loss": [2.0] * 10, "grad_norm": [0.5] * 10}
    found = {"loss": [2.0] * 10, "grad_norm": [0.5] * 2 + [0.5 * (1 + moved)] + [0.5] * 7}
    for name, value in {
        "RANKS": 1,
        "PLUGINS": {"Broken": lambda: None},
        "make_model": lambda name: None,
        "train_plain": lambda *args: plain,
        "train_boosted": lambda *args: found,
    }.items():
        monkeypatch.setattr(compare_plugins, name, value)
    monkeypatch.setattr(sys, "argv", ["compare_plugins.py"])
    with pytest.raises(SystemExit, match=str(code)):
        compare_plugins.main()
    assert shown in next(line for line in capsys.readouterr().out.splitlines() if "Broken" in line)


# -- the code in the documents -----------------------------------------------------------------------------------------
BEFORE = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import HybridParallelPlugin

folder = "tiny/model"
plugin = HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="bf16")
booster = Booster(plugin=plugin)
rows = torch.arange(32 * 16).view(32, 16)
dataset = [{"input_ids": row, "labels": row} for row in rows]
dataloader = DataLoader(dataset, batch_size=4)
model = AutoModelForCausalLM.from_pretrained(folder)
optimizer = AdamW(model.parameters(), lr=1e-3)
"""


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.mark.parametrize(
    ("page", "blocks", "written"),
    [
        ("README.md", [1], "ckpt/model.safetensors"),
        ("docs/booster.md", [0, 1], "ckpt/lr_scheduler"),  # one goes on after the other
        ("docs/booster.md", [2], ""),
        ("docs/booster.md", [3], "adapters/adapter_model.safetensors"),
        ("docs/booster.md", [4], ""),
    ],
)
def test_the_code_in_the_documents_runs(
    workers: Workers, place: Place, page: str, blocks: list[int], written: str
) -> None:
    text = "".join(python_blocks(page)[index] for index in blocks)
    (place.folder / "train.py").write_text(BEFORE + text)
    workers.run(4, "tests.end_to_end.scripts:run_script", str(place.folder / "train.py"), [])
    assert (place.folder / written).exists()
