"""Where the figures of a logged step go."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardc.runtime.errors import ShardcError

Record = Mapping[str, float | int]
_HEADER_EVERY = 20  # lines


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure. title, width, form: its column on the console, None where it has none. group: in TensorBoard."""

    key: str
    group: str
    title: str | None = None
    width: int = 0
    form: str = ""


METRICS = (
    Metric("step", "progress", "step", 7, "d"),
    Metric("tokens", "progress"),
    Metric("loss", "train", "loss", 9, ".4f"),
    Metric("lr", "train", "lr", 10, ".3e"),
    Metric("grad_norm", "train", "grad norm", 10, ".4g"),
    Metric("loss_scale", "train", "loss scale", 11, "g"),
    Metric("skipped_steps", "train", "skipped", 8, "d"),
    Metric("batch_rows", "batch"),
    Metric("tokens_per_step", "batch"),
    Metric("step_s", "speed", "s/step", 8, ".3f"),
    Metric("tokens_per_s", "speed", "tokens/s", 11, ",.0f"),
    Metric("tokens_per_s_per_rank", "speed", "per rank", 10, ",.0f"),
    Metric("tflops_per_rank", "speed", "TFLOPS", 8, ".1f"),
    Metric("mfu", "speed", "MFU", 7, ".1%"),
    Metric("bubble_planned", "speed"),
    Metric("memory_gib", "memory", "GiB", 8, ".2f"),
    Metric("peak_memory_gib", "memory", "peak GiB", 9, ".2f"),
)


class Output(Protocol):
    """Takes the figures of each logged step; keys are those of METRICS, and what is not known is left out."""

    def write(self, record: Record) -> None:
        """One logged step."""

    def close(self) -> None:
        """No more will come."""


class Console:
    """Lines of aligned columns on standard output. title: printed once, before the first. later: keys that get a
    column though the first record lacks them. Any other column begins with a header of its own."""

    def __init__(self, title: str, later: Collection[str]):
        self.title, self.later = title, later
        self.columns: list[Metric] = []
        self.lines = 0

    def write(self, record: Record) -> None:
        # Precisions that never skip a step need no column of zeros.
        shown = {key for key, value in record.items() if value or key != "skipped_steps"}
        columns = [m for m in METRICS if m.title and (m.key in shown or m.key in self.later or m in self.columns)]
        if columns != self.columns or self.lines % _HEADER_EVERY == 0:
            if not self.columns:
                print(self.title)
            print("".join(f"{column.title:>{column.width}}" for column in columns))
            self.columns, self.lines = columns, 0
        self.lines += 1
        print("".join(_cell(column, record.get(column.key)) for column in columns), flush=True)

    def close(self) -> None:
        pass


def _cell(column: Metric, value: float | None) -> str:
    text = "-" if value is None else f"{value:{column.form}}"
    return f" {text:>{column.width - 1}}"  # a space even where the value is too wide


class JsonLines:
    """One JSON object a logged step, appended to a file; what is not finite is null. Raises ShardcError at OSError."""

    def __init__(self, path: str | Path):
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a")  # noqa: SIM115  it is open as long as the monitor
        except OSError as error:
            raise ShardcError(
                f"Monitor: json_path={str(path)!r} cannot be written: {error.strerror}", "give the path of a file"
            ) from None

    def write(self, record: Record) -> None:
        values = {m.key: record[m.key] for m in METRICS if m.key in record}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self.file.write(json.dumps(finite, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Scalars "group/key" by step."""

    def __init__(self, folder: str | Path):
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        self.writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        for metric in METRICS:
            if metric.key in record and metric.key != "step":
                name = f"{metric.group}/{metric.key}"
                self.writer.add_scalar(name, record[metric.key], global_step=record["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak of one rank, in GiB, beside what the plan says of its parameters, None where the plan has no estimates."""

    rank: int
    stages: tuple[int, ...]
    peak_gib: float
    parameters_gib: float | None


def memory_table(ranks: Sequence[RankMemory], *, most: int = 32) -> str:
    """One line a rank; where there are more than `most`, the rank of each set of stages with the highest peak."""
    title = "peak memory of each rank, GiB"
    if len(ranks) > most:
        title = f"peak memory, GiB: the highest of {len(ranks)} ranks for each stage"
        highest: dict[tuple[int, ...], RankMemory] = {}
        for row in ranks:
            if row.stages not in highest or row.peak_gib > highest[row.stages].peak_gib:
                highest[row.stages] = row
        ranks = list(highest.values())
    planned = all(row.parameters_gib is not None for row in ranks)
    lines = [title, f"{'rank':>6}{'stage':>8}{'peak':>10}" + ("   parameters by the plan" if planned else "")]
    for row in ranks:
        stages = ",".join(map(str, row.stages))
        plan = f"{row.parameters_gib:>25.2f}" if planned else ""
        lines.append(f"{row.rank:>6}{stages:>8}{row.peak_gib:>10.2f}{plan}")
    return "\n".join(lines)
