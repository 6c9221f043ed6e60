"""The examples as a user starts them: train_plan.py equals plain transformers, train_tiny.py runs through."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardc.plan.verification import RELATIVE, relative_error
from tests.end_to_end.exact import Layout, prepare, small

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def shardc_run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardc.cli.main", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | (env or {}))


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


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, dp=2, sp=True)], ids=str)
def test_train_plan_equals_plain_transformers_without_importing_it(layout: Layout, tmp_path: Path) -> None:
    """Loss and gradient norm of 20 steps, with `import transformers` blocked in the launcher and in all ranks."""
    trial = prepare(small("Qwen3-4B", layout, vocab_size=256), tmp_path, layout)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKED)
    log, weights = tmp_path / "log.jsonl", str(tmp_path / "weights")
    sizes = ["--steps", str(STEPS), "--batch-size", str(ROWS), "--seq-length", str(LENGTH), "--lr", str(LR)]
    script = [str(EXAMPLES / "train_plan.py"), str(tmp_path / "plan"), "--weights", weights, "--log", str(log), *sizes]
    done = shardc_run("--nproc_per_node", "4", *script, env={"PYTHONPATH": str(tmp_path / "blocked")})
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"step {STEPS:4d}  loss" in done.stdout
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


def test_train_tiny_goes_the_whole_way(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_tiny.py"), "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step    3  loss" in done.stdout
    assert "opened by transformers, continues:" in done.stdout
    assert "The class statement " in done.stdout
    assert (tmp_path / "tiny-qwen3-trained" / "model.safetensors").is_file()
