"""What a compile writes, and what it refuses."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.pipeline.schedule import Schedule
from shardc.plan import CompiledPlan, compile_plan, write_plan
from shardc.plan.folder import plan_files
from shardc.plan.summary import summarize
from shardc.policy import parse_policy
from shardc.runtime.spec import parse_plan
from tests.plan.conftest import SMALL, compile_small

FILES = ["certificate.json", "config.json", "constants.safetensors", "model.py", "plan.json", "schedule.json"]


def test_the_same_model_gives_the_same_bytes(compiled: CompiledPlan) -> None:
    assert plan_files(compile_small()) == plan_files(compiled)


def test_a_folder_holds_the_files_of_the_contract_and_their_hashes(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == FILES
    data = json.loads((written / "plan.json").read_text())
    assert sorted(data["sha256"]) == [name for name in FILES if name != "plan.json"]
    for name, digest in data["sha256"].items():
        assert hashlib.sha256((written / name).read_bytes()).hexdigest() == digest
    assert data["model"]["config_sha256"] == data["sha256"]["config.json"]
    assert Schedule.from_json((written / "schedule.json").read_text()).num_microbatches == 4
    assert json.loads((written / "certificate.json").read_text())["proved"] is True


def test_the_runtime_reads_what_was_written(written: Path) -> None:
    spec = parse_plan(json.loads((written / "plan.json").read_text()))
    assert (spec.tp, spec.pp, spec.dtype, spec.pad_sequence) == (2, 2, torch.bfloat16, False)
    first, last = spec.stages
    assert first.batch == ("input_ids", "attention_mask", "position_ids")
    assert last.batch == ("attention_mask", "position_ids", "labels")
    assert first.sends == last.receives
    assert [(sent.name, sent.shape, sent.dtype) for sent in last.receives] == [
        ("hidden_states", ("B", "S", 32), torch.bfloat16)
    ]
    assert first.logits is None
    assert (last.logits.shape, last.logits.shard) == (("B", "S", 98), (2, "tp"))
    embedding = spec.parameters["model.embed_tokens.weight"]
    assert (embedding.stages, embedding.aliases, embedding.shape) == ((0, 1), ("lm_head.weight",), (98, 32))
    assert [(tie.parameter, tie.stages) for tie in spec.ties] == [("model.embed_tokens.weight", (0, 1))]
    norms = {name: p.grad_reduce for name, p in spec.parameters.items() if "q_norm" in name}
    assert norms == {f"model.layers.{i}.self_attn.q_norm.weight": ("tp",) for i in range(3)}
    assert spec.buffers == {"model.rotary_emb.inv_freq": torch.float32}


def test_a_later_plan_takes_the_place_of_the_earlier_one(compiled: CompiledPlan, folder: Path) -> None:
    (folder / "leftover.txt").write_text("of the earlier plan")
    write_plan(compiled, folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def test_a_folder_that_is_no_plan_is_not_replaced(compiled: CompiledPlan, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ShardcError) as error:
        write_plan(compiled, tmp_path)
    assert str(error.value) == f"{tmp_path} exists and is no plan folder\n  give another folder by -o"


def test_the_passes_are_named_in_their_order(compiled: CompiledPlan) -> None:
    assert [*compiled.seconds] == [
        "schedule", "resolve", "policy", "capture", "match", "balance", "shard and prove", "keep graphs", "localise",
        "cut", "emit",
    ]  # fmt: skip


def test_a_summary_lists_every_attention_call(written: Path) -> None:
    summary = summarize(written)
    plain = [call for call in summary["attention"] if call["variant"] == "plain"]
    assert [call["module"] for call in plain] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert all(call["is_causal"] and call["enable_gqa"] for call in plain)
    masked = [call for call in summary["attention"] if call["variant"] == "masked"]
    assert len(masked) == 3
    assert not any(call["is_causal"] for call in masked)
    assert [stage["blocks"] for stage in summary["stages"]] == [2, 1]
    assert [stage["microbatches_alive"] for stage in summary["stages"]] == [2, 1]


@pytest.mark.parametrize("options", [["--isolated"], []], ids=["as a user has it", "as this repository has it"])
def test_ruff_has_nothing_to_say_about_the_source(written: Path, options: list[str]) -> None:
    """With its own line length, and where shardc is the project's own package: imports are sorted in both."""
    path = written / "model.py"
    assert "from shardc.runtime import (" in path.read_text()
    command = [sys.executable, "-m", "ruff", "check", "--extend-select", "I", *options, path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_cuts_are_kept() -> None:
    text = 'rules: {"*.embed_tokens": vocab}\npipeline: {blocks: "model.layers.*", cuts: [1]}\n'
    plan = compile_plan("Qwen3-4B", pp=2, tp=2, overrides=SMALL, policy=parse_policy(text, "mine.yaml"))
    assert plan.first_blocks == ["model.layers.1"]


class Tower(nn.Module):
    """A model that is not from transformers, with a parameter that nothing reads where `unread`."""

    def __init__(self, unread: bool = False):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.unread = nn.Parameter(torch.zeros(3)) if unread else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        logits = hidden @ self.embed.weight.T
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 12), labels.view(-1)), "logits": logits}


REFUSED = [
    ({"tp": 0}, "--tp 0: not a positive number"),
    ({"microbatches": 0}, "--microbatches 0: not a positive number"),
    ({"sp": True}, "--sp shards the sequence over the tp ranks, and --tp is 1"),
    ({"dtype": "int8"}, "--dtype int8: unknown; valid: bf16, fp16, fp32, bfloat16, float16, float32"),
    ({"pp": 2, "schedule": "zigzag"}, "schedule 'zigzag' is unknown; valid: 1f1b, gpipe"),
    ({"tp": 2, "pp": 4}, "--pp 4: the model has 3 blocks and a stage needs at least one"),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_setting_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ShardcError) as error:
        compile_plan("Qwen3-4B", overrides=SMALL, **options)
    assert error.value.problem == problem


def test_a_parameter_that_nothing_reads_is_refused() -> None:
    policy = parse_policy('rules: {"embed": replicate}\npipeline: {blocks: "blocks.*"}\n', "tower.yaml")
    plan = compile_plan(lambda: Tower(unread=True), tp=2, pp=2, policy=policy)
    with pytest.raises(ShardcError, match="unread: neither the loss nor the logits are computed from this parameter"):
        plan_files(plan)
