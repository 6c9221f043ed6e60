"""Compile a small model, run its plan on rank processes, and hold loss and gradients to those of one process.

"Exact" is the bound of DESIGN section 6, as `shardc verify` applies it: shardc/plan/verification.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardc.models import ModelSource, reduced_config, resolve, source_from_config
from shardc.plan import CompiledPlan, compile_plan, write_plan
from shardc.plan.verification import (
    RELATIVE,
    GradientError,
    compare_gradients,
    length_for,
    make_batch,
    perturbed_model,
    reference_step,
    relative_error,
    vocabulary_of,
)
from shardc.policy import Policy
from tests.end_to_end.ranks import Loop, RankLog
from tests.workers import Workers

RANKS = "tests.end_to_end.ranks"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes: the options of compile_plan, and dp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    microbatches: int | None = None
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        words = [f"{name} {size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1]
        return ", ".join([*words, *(["sequence parallel"] if self.sp else [])]) or "one process"


def small(preset: str, layout: Layout, **fields: Any) -> ModelSource:
    """The preset at the sizes that `shardc verify` takes for this layout, with config fields changed."""
    config = copy.deepcopy(reduced_config(resolve(preset).config, layout.pp, layout.tp))
    for name, value in fields.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return source_from_config(config, preset)


@dataclass
class Trial:
    """A plan, weights and the model that has them, in a folder that ranks read."""

    folder: Path
    layout: Layout
    source: ModelSource
    model: nn.Module
    microbatches: int
    length: int  # tokens of a row: odd, unless the plan refuses that for some padding

    def batch(self, rows: int, length: int | None = None, padding: str = "none") -> Batch:
        """Rows with ragged ignored labels, and padding on one side."""
        length = length or self.length
        vocabulary = vocabulary_of(self.source)
        return make_batch(self.model, rows=rows, vocabulary=vocabulary, padding=padding, length=length)

    def write_batches(self, batches: Sequence[Batch]) -> None:
        for number, batch in enumerate(batches):
            save_file({k: v.contiguous() for k, v in batch.items()}, self.folder / f"batch_{number}.safetensors")


def compile_layout(source: ModelSource, layout: Layout, policy: str | Policy | None = None) -> CompiledPlan:
    """The plan of a layout, in float32."""
    return compile_plan(
        source,
        tp=layout.tp,
        pp=layout.pp,
        sp=layout.sp,
        microbatches=layout.microbatches,
        schedule=layout.schedule,
        policy=policy,
        dtype="float32",
    )


def prepare(
    source: ModelSource,
    folder: Path,
    layout: Layout,
    policy: str | Policy | None = None,
    adjust: Callable[[nn.Module], None] | None = None,
) -> Trial:
    """Compile and write the plan; every weight is moved off its initial value. adjust: changes the weights further."""
    plan = compile_layout(source, layout, policy)
    write_plan(plan, folder / "plan")
    model = perturbed_model(source)
    if adjust:
        with torch.no_grad():
            adjust(model)
    (folder / "weights").mkdir()
    parameters = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(parameters, folder / "weights" / "model.safetensors")
    return Trial(folder, layout, source, model, plan.settings.microbatches, length_for(plan))


@dataclass
class Comparison:
    """A loop on ranks beside the same loop in one process."""

    logs: list[RankLog]
    losses_ref: list[float]
    norms_ref: list[float]
    gradients: list[list[GradientError]]  # of each step, the worst first

    def assert_exact(self) -> None:
        """Loss of every call on every rank, and every gradient of every step."""
        self.assert_losses_and_norms()
        for step, rows in enumerate(self.gradients):
            assert rows
            assert rows[0].ratio <= 1, f"step {step}: {rows[:4]}"

    def assert_losses_and_norms(self) -> None:
        for rank, log in enumerate(self.logs):
            assert log.losses == self.logs[0].losses, f"rank {rank} has other losses"
            assert log.norms == self.logs[0].norms, f"rank {rank} has other norms"
        for found, reference in ((self.logs[0].losses, self.losses_ref), (self.logs[0].norms, self.norms_ref)):
            errors = [relative_error(a, b) for a, b in zip(found, reference, strict=True)]
            assert max(errors) <= RELATIVE, f"{found} is not {reference}: {errors}"


def compare(workers: Workers, trial: Trial, batches: Sequence[Batch], loop: Loop | None = None) -> Comparison:
    """Run the loop on ranks and in this process. loop: one step a batch, without an optimizer, if left out."""
    loop = loop or Loop(steps=[[number] for number in range(len(batches))])
    trial.write_batches(batches)
    logs = workers.run(trial.layout.ranks, f"{RANKS}:train", trial.folder, loop)
    losses, norms, gradients = [], [], []
    for step, gradients_ref in enumerate(_reference_loop(trial.model, batches, loop, losses)):
        norms.append(torch.stack([g.norm() for g in gradients_ref.values()]).norm().item())
        found = load_file(trial.folder / f"gradients_{step}.safetensors")
        gradients.append(compare_gradients(found, gradients_ref))
    return Comparison(logs, losses, norms, gradients)


def _reference_loop(model: nn.Module, batches: Sequence[Batch], loop: Loop, losses: list[float]) -> Any:
    """Yields the gradients of each step, before the optimizer changes anything."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.lr or 0.0)
    for calls in loop.steps:
        for call in calls:
            loss, gradients = reference_step(model, batches[call])
            losses.append(loss)
        yield {name: gradient.clone() for name, gradient in gradients.items()}
        if loop.lr is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()


def check(
    workers: Workers,
    folder: Path,
    source: ModelSource | str,
    layout: Layout,
    *,
    padding: str = "none",
    policy: str | Policy | None = None,
    change: Callable[[Batch], None] | None = None,
) -> Trial:
    """One step of a source, or of a preset made small, is exact. change: edits the batch."""
    source = small(source, layout) if isinstance(source, str) else source
    trial = prepare(source, folder, layout, policy)
    rows = layout.dp * (2 * trial.microbatches + 1)
    batch = trial.batch(rows, padding=padding)
    if change:
        change(batch)
    compare(workers, trial, [batch]).assert_exact()
    return trial
