"""Run a plan on CPU ranks beside the single-process model: the loss and every gradient, compared."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.models import ModelSource, reduced_config, resolve, source_from_config
from shardc.plan.check import check_folder
from shardc.plan.compile import CompiledPlan, choose_policy, compile_plan
from shardc.plan.describe import masked_rows_see_padding
from shardc.plan.folder import PLAN, read_folder, write_plan
from shardc.plan.refuted import Refuted
from shardc.plan.small import compile_small, is_function, small_plan
from shardc.policy import AUTO, Policy

RELATIVE = 1e-5  # a gradient's error, against the largest element of its reference
FLOOR = 1e-3  # of the model's largest gradient: a gradient smaller than this is held to this scale
LENGTH = 13  # tokens a row; odd, so that sequence parallelism pads, and longer than the reduced window
PADDINGS = ("none", "left", "right")
_NOISE = 0.03  # standard deviation of what is added to each parameter: as large as weights are, and so small that the
# reference's own rounding, measured against float64, stays below a third of every bound. A gradient that is 0 (OPT's
# key bias moves all scores of a query alike) rounds to 0.16 of its bound; at a deviation of 0.1 to 2.3 of it
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GradientError:
    """One parameter: the largest difference to its reference, and what it may be."""

    name: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """Error over bound: exact up to 1."""
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


@dataclass(slots=True)
class VerifyResult:
    """`ok` where loss and every gradient are exact (DESIGN section 6); gradients are sorted, the worst first.

    ran: what the ranks executed. edited: the lines of the folder's model.py that were not written by a compile."""

    loss: float
    loss_ref: float
    loss_error: float
    grad_norm: float
    grad_norm_ref: float
    gradients: list[GradientError]
    settings: dict[str, Any]
    config: dict[str, Any]
    ran: str
    edited: list[int]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.loss_error <= RELATIVE and all(gradient.ratio <= 1 for gradient in self.gradients)

    @property
    def worst(self) -> GradientError:
        return self.gradients[0]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints. max_grad_error is relative: 1e-5 is the limit."""
        return {
            "ok": self.ok,
            "loss": self.loss,
            "loss_ref": self.loss_ref,
            "max_grad_error": self.worst.ratio * RELATIVE,
            "worst_param": self.worst.name,
            "grad_norm": self.grad_norm,
            "grad_norm_ref": self.grad_norm_ref,
            "settings": self.settings,
            "config": self.config,
            "ran": self.ran,
            "edited_lines": self.edited,
        }


@dataclass(frozen=True, slots=True)
class _Task:
    """What is verified: a small model, its plan, where that comes from. prove: the plan's source is an edited one."""

    source: ModelSource
    plan: CompiledPlan
    ran: str
    edited: list[int] = field(default_factory=list)
    prove: Callable[[Path], None] | None = None


def verify(
    target: str | Path | Callable[..., Any],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    sp: bool = False,
    padding: str = "none",
    schedule: str = "1f1b",
    microbatches: int | None = None,
    policy: str | Policy | None = None,
    overrides: dict[str, Any] | None = None,
    keep: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Train one step of a plan on dp * pp * tp CPU ranks and compare with the model in one process.

    target: a plan folder, whose layout and source are then used, or a model as `compile_plan` takes it. The model is
    made small and computes in float32, dropout off. padding: which side of the rows holds padding. The labels of each
    row are ignored up to another point. keep: a folder that gets the plan that ran. Raises ShardcError where the plan
    is refused, or cannot be made small, or a rank fails.
    """
    start = time.perf_counter()
    if padding not in PADDINGS:
        raise ShardcError(f"--padding {padding}: unknown; valid: {', '.join(PADDINGS)}", "use --padding left")
    if type(dp) is not int or dp < 1:
        raise ShardcError(f"--dp {dp}: not a positive number", "for example --dp 2")
    note = progress or (lambda name: None)
    options = {"tp": tp, "pp": pp, "sp": sp, "schedule": schedule, "microbatches": microbatches}
    if not callable(target) and (Path(target) / PLAN).is_file():
        task = _of_folder(Path(target), note)
    else:
        task = _of_model(target, policy, overrides, options, note)
    if keep is not None:
        write_plan(task.plan, keep)
    with tempfile.TemporaryDirectory(prefix="shardc-verify-") as name:
        result = _run(task, Path(name), dp, padding, note)
    result.seconds = time.perf_counter() - start
    return result


def _of_folder(folder: Path, note: Progress) -> _Task:
    """The task of a plan: proved first, then its model and its model.py made small, with its policy and layout."""
    certificate = check_folder(folder, note)
    if certificate.findings:
        raise Refuted(certificate, f"nothing was run; see shardc check {folder}")
    small = small_plan(read_folder(folder), note)
    return _Task(small.plan.source, small.plan, small.says, small.edited, small.prove)


def _of_model(
    target: Any, policy: str | Policy | None, overrides: dict | None, options: dict[str, Any], note: Progress
) -> _Task:
    source = resolve(target if callable(target) else str(target), overrides)
    policy = replace(choose_policy(source, policy, options["tp"]), cuts=AUTO)  # the small one has other blocks
    if callable(target) or is_function(str(target)):
        large = compile_plan(source, policy=policy, progress=note, **options)
        plan = compile_small(large, True, note)
    else:
        config = reduced_config(source.config, options["pp"], options["tp"])
        small = source_from_config(config, source.name)
        plan = compile_plan(small, policy=policy, dtype="float32", progress=note, **options)
    sizes = "at its own sizes" if plan.source is source else "with the sizes of the config below"
    return _Task(plan.source, plan, f"the plan that `shardc compile` makes of {source.name} {sizes}")


def _run(task: _Task, folder: Path, dp: int, padding: str, note: Progress) -> VerifyResult:
    plan = task.plan
    write_plan(plan, folder / "plan")
    if task.prove:
        note("prove the edited source")
        task.prove(folder / "plan")
    note("reference")
    model = perturbed_model(task.source)
    (folder / "weights").mkdir()
    parameters = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(parameters, folder / "weights" / "model.safetensors")
    microbatches = plan.schedule.num_microbatches
    vocabulary, length = vocabulary_of(task.source), length_for(plan)
    batch = make_batch(model, rows=dp * (2 * microbatches + 1), vocabulary=vocabulary, padding=padding, length=length)
    save_file(batch, folder / "batch.safetensors")
    loss_ref, gradients_ref = reference_step(model, batch)
    world = dp * plan.settings.tp * plan.settings.pp
    note(f"{world} ranks" if world > 1 else "one rank")
    losses = _run_ranks(folder, world)
    gradients = load_file(folder / "gradients.safetensors")
    worst_loss = max((each["loss"] for each in losses), key=lambda loss: relative_error(loss, loss_ref))
    norm_ref = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients_ref.values()])).item()
    return VerifyResult(
        loss=worst_loss,
        loss_ref=loss_ref,
        loss_error=relative_error(worst_loss, loss_ref),
        grad_norm=losses[0]["grad_norm"],
        grad_norm_ref=norm_ref,
        gradients=compare_gradients(gradients, gradients_ref),
        settings=_layout(plan) | {"dp": dp, "padding": padding},
        config=_config(task.source),
        ran=task.ran,
        edited=task.edited,
    )


def _layout(plan: CompiledPlan) -> dict[str, Any]:
    settings, schedule = plan.settings, plan.schedule
    return {
        "tp": settings.tp,
        "pp": settings.pp,
        "sp": settings.sp,
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
    }


def relative_error(value: float, reference: float) -> float:
    error = abs(value - reference) / max(abs(reference), 1e-30)
    return error if math.isfinite(error) else math.inf


def compare_gradients(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[GradientError]:
    """Each parameter's largest error and its bound, the worst first; a gradient missing on one side is infinite."""
    largest = max((float(g.abs().max()) for g in reference.values()), default=0.0)
    rows = []
    for name in sorted({*found, *reference}):
        error, bound = math.inf, 0.0
        if name in reference:
            bound = RELATIVE * max(float(reference[name].abs().max()), FLOOR * largest)
        if name in found and name in reference and found[name].shape == reference[name].shape:
            error = float((found[name] - reference[name]).abs().max())
        rows.append(GradientError(name, error if math.isfinite(error) else math.inf, bound))
    return sorted(rows, key=lambda row: (-row.ratio, row.name))


# -- the reference -----------------------------------------------------------------------------------------------------
def perturbed_model(source: ModelSource) -> nn.Module:
    """The model in float32, every parameter moved, so that no norm is 1 and no bias 0."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = source.make().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * _NOISE)
    finally:
        torch.set_default_dtype(before)
    return model


def vocabulary_of(source: ModelSource) -> int:
    return getattr(source.config, "vocab_size", None) or 2


def length_for(plan: CompiledPlan) -> int:
    """Tokens of a row that the plan takes with any padding: LENGTH, or the next that tp divides where it must."""
    return -(-LENGTH // plan.settings.tp) * plan.settings.tp if masked_rows_see_padding(plan) else LENGTH


def make_batch(
    model: nn.Module, *, rows: int, vocabulary: int, padding: str, length: int = LENGTH
) -> dict[str, Tensor]:
    """Rows of tokens; row i ignores its first i % 5 labels, and with padding lacks i % 4 tokens on that side."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for i in range(rows):
        labels[i, : i % 5] = -100
        missing = i % 4
        if missing and padding != "none":
            side = slice(0, missing) if padding == "left" else slice(length - missing, length)
            mask[i, side], labels[i, side], ids[i, side] = 0, -100, 0
    batch = {"input_ids": ids, "labels": labels}
    if padding != "none":
        if "attention_mask" not in inspect.signature(model.forward).parameters:
            raise ShardcError(
                f"--padding {padding}: {type(model).__name__}.forward takes no attention_mask", "use --padding none"
            )
        batch["attention_mask"] = mask
    return batch


def reference_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model in this process, by canonical name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(**batch)
    loss = out["loss"] if isinstance(out, Mapping) else out[0] if isinstance(out, tuple) else getattr(out, "loss", out)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _config(source: ModelSource) -> dict[str, Any]:
    return {} if source.config is None else json.loads(source.config.to_json_string())


# -- the ranks ---------------------------------------------------------------------------------------------------------
def _run_ranks(folder: Path, world: int) -> list[dict[str, float]]:
    """Start the rank processes and wait; returns what each measured. Raises ShardcError with the first failure."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "shardc.plan.verify_rank", str(folder)]
    logs = [folder / f"rank_{rank}.log" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            arguments = [*command, str(rank), str(world)]
            processes.append(subprocess.Popen(arguments, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        failed = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        tail = "\n".join(logs[failed].read_text().splitlines()[-15:])
        raise ShardcError(f"rank {failed} of {world} failed:\n{tail}", "the other ranks were ended")
    return [json.loads((folder / f"loss_{rank}.json").read_text()) for rank in range(world)]


def _wait(processes: list[subprocess.Popen]) -> int | None:
    """The first rank that failed, or None once all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or all(code == 0 for code in codes):
            return failed
        time.sleep(0.05)
