"""The pipeline rows of the case table: stages together are the one-process model, step after step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardc.plan import compile_plan
from shardc.policy import parse_policy
from tests.end_to_end.exact import Batch, Layout, Trial, check, compare, prepare, small
from tests.end_to_end.ranks import Loop
from tests.workers import Workers

PP2, PP4 = Layout(pp=2), Layout(pp=4)


@dataclass(frozen=True)
class Case:
    """A preset made small: at least pp + 1 layers, so that no stage count divides them."""

    name: str
    preset: str
    layout: Layout
    padding: str = "none"
    fields: dict[str, Any] = field(default_factory=dict)


CASES = [
    # Each micro-batch has its own mask on every stage (TT 1723, Megatron-LM 752)
    Case("left-padded, 4 micro-batches, pp 4", "Llama-3.2-1B", Layout(pp=4, microbatches=4), "left"),
    Case("right-padded, 4 micro-batches, pp 4", "gpt2", Layout(pp=4, microbatches=4), "right"),
    # Fewer micro-batches than stages (TT 775)
    Case("2 micro-batches on 4 stages", "Qwen3-4B", Layout(pp=4, microbatches=2)),
    # Architectures that other compilers' stages break on (PT 145263, 184361)
    Case("Gemma-2: soft caps, alternating windows", "gemma-2-2b", Layout(pp=2, tp=2), "left"),
    Case("Phi-3", "Phi-3-mini-4k-instruct", Layout(pp=2, tp=2), "right"),
    Case("gpipe", "opt-125m", Layout(pp=2, schedule="gpipe"), "right"),
    # A layer count that the stages do not divide
    Case("5 layers on 4 stages", "gpt2", PP4, fields={"num_hidden_layers": 5}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact(case: Case, workers: Workers, tmp_path: Path) -> None:
    check(workers, tmp_path, small(case.preset, case.layout, **case.fields), case.layout, padding=case.padding)


# -- weights on two stages ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [PP4, Layout(tp=2, pp=2)], ids=str)
def test_tied_embedding_and_head_stay_equal_over_20_steps(layout: Layout, workers: Workers, tmp_path: Path) -> None:
    """Both copies bitwise equal after each step, losses those of one process (TT refuses it, Megatron-LM 656)."""
    trial = prepare(small("Qwen3-0.6B", layout, num_hidden_layers=layout.pp), tmp_path, layout)
    batches = [trial.batch(rows=8, length=length) for length in (9, 12)]
    loop = Loop(steps=[[step % 2] for step in range(20)], lr=1e-3)
    found = compare(workers, trial, batches, loop)
    found.assert_losses_and_norms()
    assert found.losses_ref[-1] < found.losses_ref[0]
    tied = "model.embed_tokens.weight"
    first, last = found.logs[0].ties, found.logs[-layout.tp].ties  # tp coord 0 of the first and of the last stage
    assert len(first) == 20
    assert [step[tied] for step in first] == [step[tied] for step in last]
    assert len({step[tied] for step in first}) == 20


# -- what changes from call to call ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Llama on two stages, four micro-batches."""
    return prepare(small("Llama-3.2-1B", PP2), tmp_path_factory.mktemp("llama"), PP2)


def test_sequence_lengths_change_from_step_to_step(llama: Trial, workers: Workers) -> None:
    """No re-initialisation (PT 159942, CAI 5940, DS 3195)."""
    batches = [llama.batch(rows=4, length=length) for length in (16, 17, 9)]
    compare(workers, llama, batches).assert_exact()


def test_padding_comes_and_goes(llama: Trial, workers: Workers) -> None:
    batches = [llama.batch(rows=5, padding=padding) for padding in ("left", "none", "right")]
    compare(workers, llama, batches).assert_exact()


def test_fewer_rows_than_micro_batches(llama: Trial, workers: Workers) -> None:
    compare(workers, llama, [llama.batch(rows=3), llama.batch(rows=1), llama.batch(rows=6)]).assert_exact()


def test_three_calls_accumulate_as_in_one_process(llama: Trial, workers: Workers) -> None:
    """TT 2972, 1732, HF 34191: each call is the mean over its own labels."""
    batches = [llama.batch(rows=4, length=length) for length in (7, 12, 10)]
    _ignore_most_of_the_first_micro_batch(batches[1])
    compare(workers, llama, batches, Loop(steps=[[0, 1, 2]])).assert_exact()


def _ignore_most_of_the_first_micro_batch(batch: Batch) -> None:
    batch["labels"][: len(batch["labels"]) // 4, 2:] = -100


def test_unequal_labels_per_micro_batch_and_dp_rank(workers: Workers, tmp_path: Path) -> None:
    def change(batch: Batch) -> None:
        _ignore_most_of_the_first_micro_batch(batch)
        batch["labels"][len(batch["labels"]) // 2 :, :6] = -100

    check(workers, tmp_path, "Qwen3-0.6B", Layout(pp=2, dp=2, microbatches=4), padding="left", change=change)


# -- the user's own cuts -----------------------------------------------------------------------------------------------
def test_the_users_own_cuts(workers: Workers, tmp_path: Path) -> None:
    policy = parse_policy('rules: {}\npipeline: {blocks: "model.layers.*", cuts: [1, 2, 4]}\n', "mine.yaml")
    source = small("Llama-3.2-1B", PP4, num_hidden_layers=5)
    assert compile_plan(source, pp=4, policy=policy, dtype="float32").first_blocks == [
        "model.layers.1", "model.layers.2", "model.layers.4",
    ]  # fmt: skip
    check(workers, tmp_path, source, PP4, policy=policy)
