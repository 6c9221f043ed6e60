"""Counts what the calls and steps of a training loop do, and logs a step now and then."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.runtime.errors import ShardcError
from shardc.runtime.module import PlanModule
from shardc.runtime.monitor.device import GIB, Clock, Mark, memory_of, name_of, peak_tflops_of
from shardc.runtime.monitor.outputs import Console, JsonLines, Output, RankMemory, TensorBoard, memory_table
from shardc.runtime.spec import Estimates


class Monitor:
    """Loss, speed, memory of a training job. Every rank makes one and calls it alike; rank 0 alone writes.

        monitor.call(tokens, rows, loss)     after each call of the model in training
        monitor.step(lr, grad_norm)          at each optimizer step
        monitor.close()

    Every `log_every`-th step is logged, and at the end the last one. Only then are tensors read, which waits for the
    device, and 7 numbers a rank added over all ranks: a collective, so that a rank that leaves out a step makes the
    others wait. The collectives run on the default process group.

    A logged step's keys (JSON lines; console and TensorBoard show the same; what is not known is left out):
        step, loss (mean over the step's calls), lr, grad_norm, loss_scale
        tokens, skipped_steps: since the monitor was made, of the whole job
        batch_rows, tokens_per_step: of the step, over all replicas and calls
        step_s, tokens_per_s, tokens_per_s_per_rank: means over the steps since the one that was logged before, the
        first step of all left out, as it warms up
        tflops_per_rank: model FLOPs by the plan's estimates at the length of the rows, forward and backward of every
        parameter, recomputation not counted; mfu: its share of the device's dense bfloat16 peak
        bubble_planned: share of a call in which ranks wait, by the schedule; left out without a pipeline
        memory_gib, peak_memory_gib: allocated on a GPU, the highest of all ranks; on CPUs peak resident memory alone

    steps: optimizer steps so far. Set it after a checkpoint was loaded, and the job counts on from there.
    """

    def __init__(
        self,
        module: PlanModule,
        *,
        log_every: int = 10,
        json_path: str | Path | None = None,
        tensorboard_dir: str | Path | None = None,
        peak_tflops: float | None = None,
        console: bool = True,
    ):
        """log_every: steps. json_path: lines are appended. peak_tflops: of one rank's device, in place of the table's.

        Raises ShardcError for values that are not valid, and where tensorboard is asked for and not installed."""
        _check(log_every, peak_tflops, tensorboard_dir)
        self.steps = 0
        self.spec, self.mesh, self.log_every = module.spec, module.mesh, log_every
        self.coord_of_stage = module.pipeline.schedule.coord_of_stage
        self.ranks = self.mesh.dp.size * self.mesh.pp.size * self.mesh.tp.size
        self.peak_tflops = peak_tflops
        if peak_tflops is None and self.spec.dtype.itemsize == 2:  # the table's peaks are of 16-bit products
            self.peak_tflops = peak_tflops_of(name_of(self.mesh.device))
        self.clock = Clock(self.mesh.device)
        self.tokens = self.skipped = 0
        self.batch = _Batch()
        self.last: _Step | None = None  # not logged yet
        self.window: _Window | None = None
        self.closed = False
        self.prints = console and self.mesh.rank == 0
        self.outputs: list[Output] = []
        if self.mesh.rank == 0:
            if console:
                self.outputs.append(Console(self._title(), self._speed_keys()))
            if json_path is not None:
                self.outputs.append(JsonLines(json_path))
            if tensorboard_dir is not None:
                self.outputs.append(TensorBoard(tensorboard_dir))

    def call(self, tokens: int, rows: int, loss: Tensor) -> None:
        """One call of the model. tokens, rows: of this dp rank's batch, padding included. loss: 0-d, of all ranks."""
        batch = self.batch
        batch.calls += 1
        batch.rows += rows
        batch.tokens += tokens
        if self.spec.estimates is not None and rows:
            batch.flops += tokens * self.spec.tp * self.spec.estimates.flops_per_token(tokens / rows)
        # A copy, added up on the device: the caller may go on to divide its loss in place.
        loss = loss.detach()
        batch.loss = loss.clone() if batch.loss is None else batch.loss + loss

    def step(
        self,
        lr: float,
        grad_norm: Tensor | float | None = None,
        skipped: bool = False,
        loss_scale: Tensor | float | None = None,
    ) -> None:
        """One optimizer step, which ends the calls since the last one. grad_norm: before clipping, 0-d.

        skipped: the parameters were left as they are, because of an overflow. loss_scale: of the precision fp16."""
        self.steps += 1
        self.skipped += skipped
        self.tokens += self.batch.tokens
        here = self.clock.mark()
        if self.window is None:
            self.window = _Window(here)
        else:
            self.window.add(self.batch)
        self.last = _Step(self.batch, lr, grad_norm, loss_scale, here)
        self.batch = _Batch()
        if self.steps % self.log_every == 0:
            self._log(self.last)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside, of an evaluation or a save, does not count as training."""
        begin = self.clock.mark()
        yield
        if self.window is not None:
            self.window.pauses.append((begin, self.clock.mark()))

    def close(self) -> None:
        """Log the last step if it was not, and print the peak memory of each rank. Every rank calls it; once counts."""
        if self.closed:
            return
        self.closed = True
        if self.last is not None:
            self._log(self.last)
        if self.steps:
            rows = self._gather(_Row(0, 0, 0, 0, 0, *memory_of(self.mesh.device)))
            if self.prints:
                print(memory_table(self._memory(rows)), flush=True)
        for output in self.outputs:
            output.close()

    def _log(self, step: _Step) -> None:
        """Every rank: give what it counted. Rank 0: work out the figures and write them."""
        window = self.window
        assert window is not None
        batch, memory = step.batch, memory_of(self.mesh.device)
        rows = self._gather(_Row(batch.rows, batch.tokens, self.tokens, window.tokens, window.flops, *memory))
        self.last, self.window = None, _Window(step.end)
        if rows is None:
            return
        # The batch of a dp rank is counted where pp and tp coords are 0.
        replicas = rows[:: self.mesh.pp.size * self.mesh.tp.size]
        record: dict[str, float] = {
            "step": self.steps,
            "tokens": int(sum(row.tokens for row in replicas)),
            "lr": float(step.lr),
            "skipped_steps": self.skipped,
            "batch_rows": int(sum(row.rows_of_step for row in replicas)),
            "tokens_per_step": int(sum(row.tokens_of_step for row in replicas)),
            "peak_memory_gib": max(row.peak_gib for row in rows),
        }
        for key, value in (("grad_norm", step.grad_norm), ("loss_scale", step.loss_scale)):
            if value is not None:
                record[key] = float(value)
        if batch.loss is not None:
            record["loss"] = float(batch.loss) / batch.calls
        if self.mesh.device.type == "cuda":
            record["memory_gib"] = max(row.memory_gib for row in rows)
        estimates = self.spec.estimates
        if estimates is not None and self.mesh.pp.size > 1:
            record["bubble_planned"] = estimates.bubble
        record |= self._speeds(window, step.end, replicas, estimates)
        for output in self.outputs:
            output.write(record)

    def _speed_keys(self) -> list[str]:
        """What _speeds gives where a window has steps."""
        keys = ["step_s", "tokens_per_s", "tokens_per_s_per_rank"]
        if self.spec.estimates is not None:
            keys += ["tflops_per_rank"] if self.peak_tflops is None else ["tflops_per_rank", "mfu"]
        return keys

    def _speeds(
        self, window: _Window, end: Mark, replicas: list[_Row], estimates: Estimates | None
    ) -> dict[str, float]:
        """Means over the window's steps; nothing where it has none."""
        seconds = self.clock.seconds(window.begin, end)
        seconds -= sum(self.clock.seconds(*pause) for pause in window.pauses)
        if not window.steps or seconds <= 0:
            return {}
        tokens_per_s = sum(row.tokens_of_window for row in replicas) / seconds
        found = {
            "step_s": seconds / window.steps,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_rank": tokens_per_s / self.ranks,
        }
        if estimates is not None:
            tflops = sum(row.flops_of_window for row in replicas) / seconds / self.ranks / 1e12
            found["tflops_per_rank"] = tflops
            if self.peak_tflops is not None:
                found["mfu"] = tflops / self.peak_tflops
        return found

    def _gather(self, row: _Row) -> list[_Row] | None:
        """The rows of all ranks, by rank, on rank 0. One sum of a table in which each rank fills its own row."""
        if self.ranks == 1:
            return [row]
        table = torch.zeros(self.ranks, len(row), dtype=torch.float64, device=self.mesh.device)
        table[self.mesh.rank] = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(table)
        return [_Row(*numbers) for numbers in table.tolist()] if self.mesh.rank == 0 else None

    def _memory(self, rows: list[_Row] | None) -> list[RankMemory]:
        """Rank by rank: its stages, its peak, and the parameters that the plan gives it."""
        found = []
        for rank, row in enumerate(rows or []):
            coord = rank // self.mesh.tp.size % self.mesh.pp.size
            stages = tuple(sorted(stage for stage, at in self.coord_of_stage.items() if at == coord))
            parameters = None
            if self.spec.estimates is not None:
                count = sum(self.spec.estimates.stages[stage].parameters for stage in stages)
                parameters = count * self.spec.dtype.itemsize / GIB
            found.append(RankMemory(rank, stages, row.peak_gib, parameters))
        return found

    def _title(self) -> str:
        axes = (self.mesh.dp, self.mesh.pp, self.mesh.tp)
        sizes = ", ".join(f"{axis.name} {axis.size}" for axis in axes if axis.size > 1)
        parts = [f"{self.spec.model} on {name_of(self.mesh.device)}: {sizes or 'one process'}"]
        if self.spec.estimates is not None and self.mesh.pp.size > 1:
            parts.append(f"planned bubble {self.spec.estimates.bubble:.0%}")
        if self.peak_tflops is not None:
            parts.append(f"MFU is of {self.peak_tflops:g} TFLOPS")
        return "; ".join(parts)


@dataclass(slots=True)
class _Batch:
    """The calls of one step on this dp rank. loss: their sum, on the device. flops: of all tp ranks and stages."""

    calls: int = 0
    rows: int = 0
    tokens: int = 0
    flops: float = 0.0
    loss: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    batch: _Batch
    lr: float
    grad_norm: Tensor | float | None
    loss_scale: Tensor | float | None
    end: Mark


@dataclass(slots=True)
class _Window:
    """The steps since the one that was logged before, or since the first."""

    begin: Mark
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    pauses: list[tuple[Mark, Mark]] = field(default_factory=list)

    def add(self, batch: _Batch) -> None:
        self.steps += 1
        self.tokens += batch.tokens
        self.flops += batch.flops


class _Row(NamedTuple):
    """What a rank tells the others."""

    rows_of_step: float
    tokens_of_step: float
    tokens: float
    tokens_of_window: float
    flops_of_window: float
    memory_gib: float
    peak_gib: float


def _check(log_every: int, peak_tflops: float | None, tensorboard_dir: str | Path | None) -> None:
    if type(log_every) is not int or log_every < 1:
        raise ShardcError(f"Monitor: log_every={log_every!r}; valid: a number of steps, from 1 on", "10 is the default")
    if peak_tflops is not None and not (peak_tflops > 0 and math.isfinite(peak_tflops)):
        raise ShardcError(
            f"Monitor: peak_tflops={peak_tflops!r}; valid: a number above 0, or None",
            "give the dense peak of one device in TFLOPS, such as 989 for an H100 SXM",
        )
    # On every rank, so that none waits for a rank 0 that failed alone.
    if tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise ShardcError(
            f"Monitor: tensorboard_dir={str(tensorboard_dir)!r}, but tensorboard is not installed",
            "pip install 'shardc[train]'",
        )
