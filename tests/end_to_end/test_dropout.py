"""Dropout: which ranks draw the same masks, and that these masks in one process give the same gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardc.plan.verification import RELATIVE, compare_gradients, reference_step, relative_error
from tests.end_to_end.exact import RANKS, Layout, Trial, prepare, small
from tests.end_to_end.masks import Inject, Record, join
from tests.workers import Workers

GPT2 = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "num_hidden_layers": 2}
MODELS = {
    "GPT-2, attention by SDPA": ("gpt2", GPT2),
    "Gemma-2, eager attention": ("gemma-2-2b", {"attention_dropout": 0.1}),
    "Qwen3, grouped SDPA": ("Qwen3-4B", {"attention_dropout": 0.1, "num_hidden_layers": 2}),
}
LAYOUTS = [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(tp=2, pp=2)]


@dataclass
class Run:
    """What one step in training mode gave. masks: by rank, in the order of the calls."""

    loss: float
    masks: list[list[Tensor]]
    gradients: dict[str, Tensor]


def run(workers: Workers, trial: Trial, *, seed: int = 7, recompute: bool = False) -> Run:
    losses = workers.run(trial.layout.ranks, f"{RANKS}:train_with_dropout", trial.folder, seed, recompute)
    assert len({*losses}) == 1
    masks = [torch.load(trial.folder / f"masks_{rank}.pt") for rank in range(trial.layout.ranks)]
    return Run(losses[0], masks, load_file(trial.folder / "gradients_0.safetensors"))


def trial_of(model: str, folder: Path, layout: Layout, *, rows: int = 8, padding: str = "none") -> Trial:
    preset, fields = MODELS[model]
    if layout.pp > 1:
        fields = fields | {"num_hidden_layers": layout.pp}
    trial = prepare(small(preset, layout, **fields), folder, layout)
    trial.write_batches([trial.batch(rows, padding=padding)])
    return trial


def masks_of_one_process(trial: Trial, masks: list[list[Tensor]]) -> list[Tensor]:
    """What the ranks (dp 1) drew, put together: micro-batches over rows, tp ranks over their shards, stage by stage."""
    model = copy.deepcopy(trial.model).train()
    with Record() as record:
        reference_step(model, load_file(trial.folder / "batch_0.safetensors"))
    shapes = [mask.shape for mask in record.masks]
    tp, joined = trial.layout.tp, []
    for first in range(0, len(masks), tp):
        stage = [_join_microbatches(one, trial.microbatches) for one in masks[first : first + tp]]
        joined += join(stage, shapes[len(joined) : len(joined) + len(stage[0])])
    assert len(joined) == len(shapes)
    return joined


def _join_microbatches(masks: list[Tensor], count: int) -> list[Tensor]:
    calls = len(masks) // count
    return [torch.cat(masks[call::calls]) for call in range(calls)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_the_masks_that_ranks_drew_give_exact_gradients_in_one_process(
    model: str, layout: Layout, workers: Workers, tmp_path: Path
) -> None:
    """Residual masks equal over tp, attention masks and those of sequence shards distinct: `join` asserts both."""
    trial = trial_of(model, tmp_path, layout, padding="left" if layout.pp > 1 else "none")
    found = run(workers, trial)
    masks = masks_of_one_process(trial, found.masks)
    reference = copy.deepcopy(trial.model).train()
    with Inject(masks):
        loss, gradients = reference_step(reference, load_file(trial.folder / "batch_0.safetensors"))
    assert relative_error(found.loss, loss) <= RELATIVE
    worst = compare_gradients(found.gradients, gradients)[0]
    assert worst.ratio <= 1, worst
    without, _ = reference_step(copy.deepcopy(trial.model).eval(), load_file(trial.folder / "batch_0.safetensors"))
    assert relative_error(loss, without) > 10 * RELATIVE, "dropout had no effect"


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sp=True)], ids=str)
def test_recomputation_draws_the_same_masks(layout: Layout, workers: Workers, tmp_path: Path) -> None:
    """CAI, PT 168058."""
    trial = trial_of("GPT-2, attention by SDPA", tmp_path, layout, rows=3)
    plain, recomputed = run(workers, trial), run(workers, trial, recompute=True)
    for before, after in zip(plain.masks, recomputed.masks, strict=True):
        again = after[len(before) :]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))
        assert len(again) == len(before) - 1, "all calls but that of the embedding, which is in no block"
        assert all(any(torch.equal(mask, one) for one in before[1:]) for mask in again)
    assert recomputed.loss == plain.loss
    assert all(torch.equal(recomputed.gradients[name], gradient) for name, gradient in plain.gradients.items())


def test_replicas_draw_distinct_masks_and_a_seed_draws_them_again(workers: Workers, tmp_path: Path) -> None:
    trial = trial_of("GPT-2, attention by SDPA", tmp_path, Layout(tp=2, dp=2))
    first, again, other = run(workers, trial), run(workers, trial), run(workers, trial, seed=8)
    for rank in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first.masks[rank], again.masks[rank], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first.masks[rank], other.masks[rank], strict=True))
    for tp in range(2):  # ranks tp and 2 + tp: the same shard on two replicas
        assert not any(torch.equal(a, b) for a, b in zip(first.masks[tp], first.masks[2 + tp], strict=True))
    assert again.loss == first.loss
