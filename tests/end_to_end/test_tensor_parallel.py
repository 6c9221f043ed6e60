"""The tensor-parallel rows of the case table: loss and every gradient are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardc.errors import ShardcError
from shardc.plan import compile_plan
from tests.end_to_end.exact import RANKS, Batch, Layout, check, compare, prepare, small
from tests.workers import Workers

TP2, TP4 = Layout(tp=2), Layout(tp=4)


@dataclass(frozen=True)
class Case:
    """A preset made small, with some of its fields changed."""

    name: str
    preset: str
    layout: Layout
    fields: dict[str, Any] = field(default_factory=dict)
    padding: str = "none"


HEADS = {"num_attention_heads": 8, "num_hidden_layers": 2}
CASES = [
    # KV heads fewer than tp: replicated, their gradient summed over the replicas (HF 48307, DS 7259, CAI 4565)
    Case("two KV heads at tp 4", "Qwen2.5-3B", TP4, HEADS | {"num_key_value_heads": 2}, "left"),
    Case("two KV heads at tp 4, with sp", "Qwen3-0.6B", Layout(tp=4, sp=True), HEADS | {"num_key_value_heads": 2}),
    Case("one KV head at tp 2", "gemma-3-1b", TP2, HEADS | {"num_key_value_heads": 1}),
    # Vocabularies that tp does not divide, or of few rows (CAI 6167, Megatron-LM 1754)
    Case("vocabulary 50257 at tp 2", "gpt2", TP2, {"vocab_size": 50257, "num_hidden_layers": 1}),
    Case("vocabulary 50257 at tp 4", "Llama-3.2-1B", TP4, {"vocab_size": 50257, "num_hidden_layers": 1}),
    Case("vocabulary 101 at tp 4, untied", "Qwen3-8B", TP4, {"num_hidden_layers": 2}),
    Case("vocabulary 7 at tp 4", "Llama-3.2-1B", TP4, {"vocab_size": 7, "num_hidden_layers": 2, "bos_token_id": 1,
                                                     "eos_token_id": 2}),
    # Fused projections, without a gather of the fused output
    Case("one Conv1D [q | k | v]", "gpt2", TP2, padding="right"),
    Case("one Linear [q | k | v], one [gate | up]", "Phi-3-mini-4k-instruct", TP2),
    Case("interleaved [head, q k v]", "pythia-70m", TP4),
    # A norm between column and row: its gradient is reduced (HF plans of 5.24 forget it)
    Case("q_norm and k_norm at tp 4", "Qwen3-4B", TP4, padding="left"),
    # A bias added once, its gradient whole under sequence parallelism (a rival gives a quarter of it)
    Case("row bias with sp at tp 4, GPT-2", "gpt2", Layout(tp=4, sp=True), padding="right"),
    Case("row bias with sp at tp 4, OPT", "opt-125m", Layout(tp=4, sp=True)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact(case: Case, workers: Workers, tmp_path: Path) -> None:
    check(workers, tmp_path, small(case.preset, case.layout, **case.fields), case.layout, padding=case.padding)


def test_a_fused_output_is_never_gathered() -> None:
    for preset in ("gpt2", "Phi-3-mini-4k-instruct", "pythia-70m"):
        text = compile_plan(small(preset, TP2), tp=2, dtype="float32").text
        assert "all_gather" not in text, preset


def test_a_saved_checkpoint_has_the_true_vocabulary(workers: Workers, tmp_path: Path) -> None:
    """Vocabulary 101 at tp 4: shards of 26 and 25 rows, and no padding row in what is saved (CAI PR 6124)."""
    trial = prepare(small("Qwen3-4B", TP4, num_hidden_layers=1), tmp_path, TP4)
    workers.run(4, f"{RANKS}:save", tmp_path)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = dict(trial.model.named_parameters())
    assert sorted(saved) == sorted(expected)
    assert saved["model.embed_tokens.weight"].shape[0] == 101
    for name, parameter in expected.items():
        assert torch.equal(saved[name], parameter), name


REFUSED = [
    ("query heads", "Qwen3-4B", {}, 3, "model.layers.0.self_attn.q_proj: tp=3 does not divide 16 query heads"),
    ("FFN width", "Llama-3.2-1B", {"intermediate_size": 129}, 2, "mlp.gate_proj: tp=2 does not divide 129"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "preset", "fields", "tp", "problem"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_size_that_tp_does_not_divide_is_refused(
    name: str, preset: str, fields: dict[str, Any], tp: int, problem: str
) -> None:
    """CAI 116, 3043: module, size, tp, and the tp that are valid."""
    with pytest.raises(ShardcError) as error:
        compile_plan(small(preset, TP2, **fields), tp=tp)
    assert problem in error.value.problem
    assert "valid: 1" in error.value.problem


# -- losses over the whole batch ---------------------------------------------------------------------------------------
def _nothing_to_predict_on_dp_rank_1(batch: Batch) -> None:
    batch["labels"][len(batch["labels"]) // 2 :] = -100


def _unequal_counts(batch: Batch) -> None:
    batch["labels"][: len(batch["labels"]) // 2, 3:] = -100


BATCHES: list[tuple[str, Callable[[Batch], None], Layout]] = [
    ("ignore_index everywhere on one dp rank", _nothing_to_predict_on_dp_rank_1, Layout(tp=2, dp=2)),
    ("ignore_index everywhere on one dp rank, pp 2", _nothing_to_predict_on_dp_rank_1, Layout(pp=2, dp=2)),
    ("unequal numbers of labels over dp", _unequal_counts, Layout(tp=2, dp=2)),
]


@pytest.mark.parametrize(("name", "change", "layout"), BATCHES, ids=[row[0] for row in BATCHES])
def test_the_loss_is_the_mean_over_the_global_batch(
    name: str, change: Callable[[Batch], None], layout: Layout, workers: Workers, tmp_path: Path
) -> None:
    """No division by a wrong count (CAI, TT)."""
    check(workers, tmp_path, "Llama-3.2-1B", layout, change=change)


def test_a_token_whose_loss_is_exactly_0_counts(workers: Workers, tmp_path: Path) -> None:
    """Its gradient is 0 and it still divides the sum (TT)."""
    layout = Layout(tp=2, dp=2)
    trial = prepare(small("Qwen3-8B", layout, num_hidden_layers=1), tmp_path, layout, adjust=_sure_of_itself)
    batch = trial.batch(rows=4)
    with torch.no_grad():
        logits = trial.model(input_ids=batch["input_ids"]).logits
    batch["labels"][:, 5:] = logits.argmax(-1)[:, 4:-1]
    losses = torch.nn.functional.cross_entropy(
        logits[:, 4:-1].flatten(0, 1), batch["labels"][:, 5:].flatten(), reduction="none"
    )
    assert (losses == 0).any()
    compare(workers, trial, [batch]).assert_exact()


def _sure_of_itself(model: torch.nn.Module) -> None:
    """A head whose first choice is far above the others."""
    model.lm_head.weight *= 60


# -- logits ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2), Layout(pp=2)], ids=str)
def test_logits_read_on_rank_0_alone_do_not_hang(layout: Layout, workers: Workers, tmp_path: Path) -> None:
    """DESIGN 4.1: gathered inside the call under no_grad; refused in training, without a collective."""
    trial = prepare(small("gpt2", layout, num_hidden_layers=2), tmp_path, layout)
    batch = trial.batch(rows=3, padding="left")
    trial.write_batches([batch])
    found = workers.run(layout.ranks, f"{RANKS}:read_logits_on_rank_0", tmp_path)
    assert len({each["loss"] for each in found}) == 1
    assert found[0]["printed"].startswith("Output(loss=")
    assert found[0]["in training"].startswith("logits are not gathered while gradients are on")
    with torch.no_grad():
        expected = trial.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_attention_that_sees_added_positions_refuses_lengths_that_tp_does_not_divide(
    workers: Workers, tmp_path: Path
) -> None:
    """Gemma-2 predicts a left-padded row's first token from the mean over all keys, however many there are."""
    layout = Layout(tp=2, sp=True)
    trial = check(workers, tmp_path, "gemma-2-2b", layout, padding="left")
    assert trial.length == 14
    batch = trial.batch(3, length=13, padding="left")
    trial.write_batches([batch])
    refusals = workers.run(layout.ranks, f"{RANKS}:expect_refusal", trial.folder)
    assert all("13 tokens over tp=2 leave a remainder" in refusal for refusal in refusals)
