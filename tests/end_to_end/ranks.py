"""What one rank of an end-to-end test runs: a plan built from weights, trained on the batches that lie in a folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardc
from shardc.runtime import PlanModule, ShardcError
from shardc.runtime.blocks import blocks_of
from shardc.runtime.recompute import Recompute, enable_recompute
from tests.end_to_end.masks import Record


@dataclass(frozen=True)
class Loop:
    """A training loop. steps: of each step, the batches of its calls, by number; gradients add up over the calls.

    lr: of AdamW after a clip to norm 1; None leaves the parameters as they are.
    """

    steps: Sequence[Sequence[int]]
    lr: float | None = None


@dataclass
class RankLog:
    """What one rank saw. losses: of each call. norms: of each step. ties: of each step, digest of each tied copy."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ties: list[dict[str, str]] = field(default_factory=list)


def build(folder: Path, seed: int = 7) -> PlanModule:
    torch.manual_seed(seed)
    return shardc.load_plan(folder / "plan").build(folder / "weights", device="cpu")


def own_rows(module: PlanModule, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This dp rank's part of the global batch."""
    dp = module.mesh.dp
    return {name: rows.tensor_split(dp.size)[dp.coord] for name, rows in batch.items()}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train(folder: Path, loop: Loop) -> RankLog:
    """Run the loop in float32 with dropout off; rank 0 writes the gathered gradients of each step."""
    module = build(folder).eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=loop.lr or 0.0)
    log = RankLog()
    for step, calls in enumerate(loop.steps):
        for call in calls:
            loss = module(**own_rows(module, load_file(folder / f"batch_{call}.safetensors"))).loss
            loss.backward()
            log.losses.append(loss.item())
        module.reduce_gradients()
        log.norms.append(module.grad_norm().item())
        gradients = module.gather_gradients()
        if module.mesh.rank == 0:
            save_file({n: g.contiguous() for n, g in gradients.items()}, folder / f"gradients_{step}.safetensors")
        if loop.lr is not None:
            module.clip_grad_norm_(1.0)
            optimizer.step()
            tied = [tie.parameter for tie in module.spec.ties if tie.parameter in module.local_parameters]
            log.ties.append({name: digest(module.local_parameters[name]) for name in tied})
        optimizer.zero_grad()
    return log


def save(folder: Path) -> None:
    """Build and save at once: what a checkpoint of the plan holds."""
    build(folder).save_pretrained(folder / "saved")


def read_logits_on_rank_0(folder: Path) -> dict[str, Any]:
    """Print the output and read .logits on rank 0 alone, while gradients are on and while they are off."""
    module = build(folder).eval()
    batch = own_rows(module, load_file(folder / "batch_0.safetensors"))
    out = module(**batch)
    found: dict[str, Any] = {"loss": out.loss.item()}
    if module.mesh.rank == 0:
        found["printed"] = repr(out)
        try:
            found["in training"] = tuple(out.logits.shape)
        except ShardcError as error:
            found["in training"] = error.problem
    out.loss.backward()
    with torch.no_grad():
        out = module(**batch)
        if module.mesh.rank == 0:
            save_file({"logits": out.logits.contiguous()}, folder / "logits.safetensors")
    module.reduce_gradients()
    return found


def expect_refusal(folder: Path, batch: int = 0) -> str:
    """The problem that this rank's call is refused with."""
    module = build(folder).eval()
    try:
        module(**own_rows(module, load_file(folder / f"batch_{batch}.safetensors")))
    except ShardcError as error:
        return error.problem
    return "not refused"


def train_with_dropout(folder: Path, seed: int = 7, recompute: bool = False) -> float:
    """One step in training mode; masks go to masks_RANK.pt, the gathered gradients to gradients_0.safetensors."""
    module = build(folder, seed).train()
    recomputing: list[Record] = []
    if recompute:
        for stage in module.pipeline.modules.values():
            for block in blocks_of(stage).values():
                block.forward = functools.partial(_recorded_again, block.forward, recomputing)
        enable_recompute(module, Recompute())
    record = Record()
    with record:
        loss = module(**own_rows(module, load_file(folder / "batch_0.safetensors"))).loss
    recomputing.append(record)
    loss.backward()
    torch.save(record.masks, folder / f"masks_{module.mesh.rank}.pt")
    module.reduce_gradients()
    gradients = module.gather_gradients()
    if module.mesh.rank == 0:
        save_file({n: g.contiguous() for n, g in gradients.items()}, folder / "gradients_0.safetensors")
    return loss.item()


def _recorded_again(forward: Callable, recomputing: list[Record], *args: Any) -> Any:
    """A block's forward: in the backward pass, where modes are off, it is recorded too."""
    with recomputing[0] if recomputing else contextlib.nullcontext():
        return forward(*args)
