"""The monitor's figures, held to what is counted by hand."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.plan import compile_plan, write_plan
from shardc.runtime import PlanModule, ShardcError, load_plan
from shardc.runtime.monitor import Monitor, device
from shardc.runtime.monitor.outputs import RankMemory, memory_table
from tests.end_to_end.exact import Layout, small
from tests.runtime import toy
from tests.workers import Workers

HERE = "tests.runtime.test_monitor"
QWEN3 = small("Qwen3-4B", Layout())


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> PlanModule:
    """A small Qwen3 in one process; only its plan matters here."""
    plan = compile_plan(QWEN3, dtype="float32")
    return load_plan(write_plan(plan, tmp_path_factory.mktemp("qwen3") / "plan")).build(seed=0, device="cpu")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until a test moves `now.s`."""
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: clock.s))
    return clock


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flops_by_hand(length: int) -> float:
    """Forward and backward of one token of the small Qwen3, in a row of `length` tokens."""
    config = QWEN3.config
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (heads + 2 * kv_heads) + heads * config.hidden_size
    weights += 3 * config.hidden_size * config.intermediate_size
    attention = 2 * 2 * length * heads / 2  # two products with the keys of `length` tokens, half of them masked
    head = 2 * config.hidden_size * config.vocab_size
    embedding = config.hidden_size
    return 3 * (config.num_hidden_layers * (2 * weights + attention) + head + embedding)


def test_figures_of_a_logged_step(module: PlanModule, now: SimpleNamespace, tmp_path: Path) -> None:
    """Two calls a step, of rows of 8 and of 32 tokens; a step lasts 2 s, the first 60 s."""
    path = tmp_path / "logs" / "train.jsonl"
    monitor = Monitor(module, log_every=3, json_path=path, peak_tflops=1e-6, console=False)
    losses = iter(range(1, 100))
    for number in range(1, 7):
        monitor.call(4 * 8, 4, torch.tensor(float(next(losses))))
        now.s += 59 if number == 1 else 1
        monitor.call(1 * 32, 1, torch.tensor(float(next(losses))))
        now.s += 1
        monitor.step(1e-3 / number, torch.tensor(0.5 * number), skipped=number == 2, loss_scale=2.0**number)
    first, second = records(path)
    flops = 32 * flops_by_hand(8) + 32 * flops_by_hand(32)
    tflops = pytest.approx(flops / 2 / 1e12, rel=1e-12)
    peak = device.memory_of(torch.device("cpu"))[1]
    assert first.pop("peak_memory_gib") == pytest.approx(peak, rel=0.5)
    assert first == {
        "step": 3,
        "tokens": 192,
        "loss": 5.5,
        "lr": 1e-3 / 3,
        "grad_norm": 1.5,
        "loss_scale": 8.0,
        "skipped_steps": 1,
        "batch_rows": 5,
        "tokens_per_step": 64,
        "step_s": 2.0,
        "tokens_per_s": 32.0,
        "tokens_per_s_per_rank": 32.0,
        "tflops_per_rank": tflops,
        "mfu": pytest.approx(flops / 2 / 1e12 / 1e-6, rel=1e-12),
    }
    assert (second["step"], second["tokens"], second["loss"], second["step_s"]) == (6, 384, 11.5, 2.0)
    assert second["tflops_per_rank"] == tflops
    monitor.close()
    assert len(records(path)) == 2


def test_flops_of_a_token_grow_with_the_length_of_its_row(module: PlanModule) -> None:
    estimates = module.spec.estimates
    assert estimates.sequence == 4096
    for length in (1, 512, 4096, 131072):
        assert estimates.flops_per_token(length) == flops_by_hand(length)


def test_flops_of_qwen3_4b_over_its_ranks(tmp_path: Path) -> None:
    """Of all tp ranks and stages together they are the model's: 27.76 GFLOPs a token at 4,096 tokens."""
    plan = load_plan(write_plan(compile_plan("Qwen3-4B", tp=2, pp=2), tmp_path / "plan"))
    weights = 36 * (2560 * (4096 + 1024 + 1024) + 4096 * 2560 + 3 * 2560 * 9728) + 2560 * 151936
    for length, attention in ((4096, 36 * 2 * 4096 * 4096), (1024, 36 * 2 * 4096 * 1024)):
        expected = 3 * (2 * weights + attention + 2560)
        assert plan.spec.tp * plan.spec.estimates.flops_per_token(length) == pytest.approx(expected, rel=1e-6)
    assert [stage.num_blocks for stage in plan.spec.stages] == [20, 16]


def test_evaluation_in_a_pause_does_not_count(module: PlanModule, now: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    monitor = Monitor(module, log_every=4, json_path=path, console=False)
    for number in range(4):
        monitor.call(10, 1, torch.tensor(1.0))
        now.s += 3
        monitor.step(0.1)
        if number == 1:
            with monitor.paused():
                now.s += 1000
    assert records(path)[0]["step_s"] == 3


def test_the_last_step_is_logged_at_the_end(module: PlanModule, now: SimpleNamespace, tmp_path: Path) -> None:
    """Its time ends with the step; what comes between it and close does not count."""
    path = tmp_path / "train.jsonl"
    monitor = Monitor(module, log_every=4, json_path=path, console=False)
    for _ in range(6):
        monitor.call(10, 1, torch.tensor(1.0))
        now.s += 3
        monitor.step(0.1)
    now.s += 1000
    monitor.close()
    monitor.close()
    assert [(r["step"], r["step_s"]) for r in records(path)] == [(4, 3), (6, 3)]


def test_a_resumed_job_appends_and_counts_on(module: PlanModule, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    for start in (0, 20):
        monitor = Monitor(module, json_path=path, console=False)
        monitor.steps = start
        for _ in range(20):
            monitor.step(0.1)
        monitor.close()
    assert [record["step"] for record in records(path)] == [10, 20, 30, 40]
    assert "loss" not in records(path)[0]


def test_every_step_can_be_logged_and_the_first_has_no_speed(
    module: PlanModule, now: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    monitor = Monitor(module, log_every=1, json_path=path, console=False)
    for _ in range(2):
        monitor.call(10, 1, torch.tensor(1.0))
        now.s += 5
        monitor.step(0.1)
    first, second = records(path)
    assert "tokens_per_s" not in first and "tflops_per_rank" not in first
    assert second["tokens_per_s"] == 2


def test_what_is_not_finite_is_null(module: PlanModule, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    monitor = Monitor(module, log_every=1, json_path=path, console=False)
    monitor.call(10, 1, torch.tensor(math.nan))
    monitor.step(0.1, torch.tensor(math.inf), skipped=True)
    found = records(path)[0]
    assert (found["loss"], found["grad_norm"], found["skipped_steps"]) == (None, None, 1)


def test_a_loss_that_is_changed_in_place_later_was_noted_before(module: PlanModule, tmp_path: Path) -> None:
    """`loss /= 2` for accumulation; and the losses keep no graph alive."""
    path = tmp_path / "train.jsonl"
    monitor = Monitor(module, log_every=1, json_path=path, console=False)
    for value in (4.0, 8.0):
        loss = torch.tensor(value, requires_grad=True) * 1
        monitor.call(10, 1, loss)
        with torch.no_grad():
            loss /= 2
    monitor.step(0.1)
    assert records(path)[0]["loss"] == 6.0


class Watched(torch.Tensor):
    """Counts what makes the host wait: reading the value."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        Watched.reads += function in (Tensor.item, Tensor.__float__, Tensor.tolist, Tensor.__bool__, Tensor.cpu)
        return super().__torch_function__(function, types, args, kwargs)


def test_tensors_are_read_at_logged_steps_alone(module: PlanModule) -> None:
    monitor = Monitor(module, log_every=5, console=False)
    reads = []
    for _ in range(10):
        monitor.call(10, 1, torch.tensor(1.0).as_subclass(Watched))
        monitor.step(0.1, torch.tensor(1.0).as_subclass(Watched))
        reads.append(Watched.reads)
    assert reads == [0, 0, 0, 0, 2, 2, 2, 2, 2, 4]


def test_lines_of_the_console(
    module: PlanModule, now: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.runtime.monitor.monitor.memory_of", lambda _: (0.0, 1.25))
    monitor = Monitor(module, log_every=1, peak_tflops=0.25)
    for number in range(1, 25):
        monitor.call(4 * 4096, 4, torch.tensor(10.0 - number / 10))
        now.s += 0.5
        monitor.step(3e-4, torch.tensor(1.2345678), skipped=number == 23)
    flops = 2 * 4 * 4096 * flops_by_hand(4096)
    assert (round(flops / 1e12, 1), round(flops / 1e12 / 0.25, 3)) == (0.2, 0.917)
    header = "   step     loss        lr grad norm  s/step   tokens/s  per rank  TFLOPS    MFU peak GiB"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "Qwen3-4B on cpu: one process; MFU is of 0.25 TFLOPS",
        header,
        "      1   9.9000 3.000e-04     1.235       -          -         -       -      -     1.25",
        "      2   9.8000 3.000e-04     1.235   0.500     32,768    32,768     0.2  91.7%     1.25",
    ]
    assert [number for number, line in enumerate(lines) if line == header] == [1, 22]
    assert lines[-3:] == [
        "   step     loss        lr grad norm skipped  s/step   tokens/s  per rank  TFLOPS    MFU peak GiB",
        "     23   7.7000 3.000e-04     1.235       1   0.500     32,768    32,768     0.2  91.7%     1.25",
        "     24   7.6000 3.000e-04     1.235       1   0.500     32,768    32,768     0.2  91.7%     1.25",
    ]


def train(folder: str, logs: str, log_every: int) -> list[float]:
    """Six steps of two calls on ranks; returns the mean loss of each step."""
    module = load_plan(folder).build(seed=3, device="cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    name = f"{logs}/rank{module.mesh.rank}"
    monitor = Monitor(module, log_every=log_every, json_path=f"{name}.jsonl", tensorboard_dir=f"{name}_board")
    dp, means = module.mesh.dp, []
    for number in range(6):
        losses = []
        for rows in (5, 2):  # over dp 2: 3 and 2 rows, 1 and 1
            batch = toy.batch_of(rows, 8, seed=number)
            own = {key: value.tensor_split(dp.size)[dp.coord] for key, value in batch.items()}
            loss = module(**own).loss
            monitor.call(own["input_ids"].numel(), len(own["input_ids"]), loss)
            loss.backward()
            losses.append(loss.item())
        module.reduce_gradients()
        norm = module.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(0.1, norm)
        means.append(sum(losses) / 2)
    monitor.close()
    return means


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=["dp 2", "tp 2", "pp 2"])
def test_two_ranks_log_as_one_job(layout: dict[str, int], workers: Workers, tmp_path: Path) -> None:
    """Rank 0 alone writes, of the whole job."""
    folder = toy.write_plan(tmp_path / "plan", **layout)
    means, same = workers.run(2, f"{HERE}:train", str(folder), str(tmp_path / "logs"), 4)
    assert means == same
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank0.jsonl", "rank0_board"]
    found = records(tmp_path / "logs" / "rank0.jsonl")
    assert [record["step"] for record in found] == [4, 6]
    assert [record["loss"] for record in found] == pytest.approx([means[3], means[5]], rel=1e-6)
    assert [record["tokens"] for record in found] == [4 * 56, 6 * 56]
    for record in found:
        assert (record["batch_rows"], record["tokens_per_step"]) == (7, 56)
        assert record["tokens_per_s"] == pytest.approx(56 / record["step_s"], rel=1e-9)
        assert record["tokens_per_s_per_rank"] == record["tokens_per_s"] / 2
        assert record["grad_norm"] > 0 and record["peak_memory_gib"] > 0.05
        assert "tflops_per_rank" not in record and "mfu" not in record  # a plan by hand has no estimates
    assert_board_is(tmp_path / "logs" / "rank0_board", found)


def assert_board_is(folder: Path, found: list[dict[str, Any]]) -> None:
    """TensorBoard reads the same figures."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    tags = board.Tags()["scalars"]
    assert {tag.partition("/")[2] for tag in tags} | {"step"} == set(found[0])
    for tag in tags:
        values = [(event.step, event.value) for event in board.Scalars(tag)]
        key = tag.partition("/")[2]
        assert values == [(record["step"], pytest.approx(record[key], rel=1e-6)) for record in found]
    assert {"train/loss", "speed/tokens_per_s", "memory/peak_memory_gib", "batch/batch_rows"} <= set(tags)


def estimates_on_ranks(folder: str, logs: str) -> None:
    """Three steps that count and do not compute."""
    module = load_plan(folder).build(seed=3, device="cpu")
    monitor = Monitor(module, log_every=3, json_path=f"{logs}/train.jsonl", peak_tflops=1.0)
    for _ in range(3):
        monitor.call(64, 2, torch.tensor(1.0))
        monitor.step(0.1)
    monitor.close()


def test_flops_are_shared_among_the_ranks_of_a_pipeline(workers: Workers, tmp_path: Path) -> None:
    plan = compile_plan(QWEN3, pp=2, dtype="float32")
    folder = write_plan(plan, tmp_path / "plan")
    workers.run(2, f"{HERE}:estimates_on_ranks", str(folder), str(tmp_path))
    (found,) = records(tmp_path / "train.jsonl")
    expected = 64 * flops_by_hand(32) / found["step_s"] / 2 / 1e12
    assert found["tflops_per_rank"] == pytest.approx(expected, rel=1e-9)
    assert found["mfu"] == found["tflops_per_rank"]
    assert found["bubble_planned"] == load_plan(folder).spec.estimates.bubble > 0.1


def test_peak_memory_of_each_rank_is_printed_once(
    module: PlanModule, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.runtime.monitor.monitor.memory_of", lambda _: (0.0, 1.25))
    monitor = Monitor(module)
    monitor.step(0.1)
    capsys.readouterr()
    monitor.close()
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "peak memory of each rank, GiB",
        "  rank   stage      peak   parameters by the plan",
        "     0       0      1.25                     0.00",
    ]
    monitor.close()
    assert capsys.readouterr().out == ""


def test_of_many_ranks_the_highest_of_each_stage_is_printed() -> None:
    ranks = [RankMemory(rank, (rank // 2 % 2,), float(rank % 7), None) for rank in range(40)]
    assert memory_table(ranks).splitlines() == [
        "peak memory, GiB: the highest of 40 ranks for each stage",
        "  rank   stage      peak",
        "    13       0      6.00",
        "     6       1      6.00",
    ]


NAMES = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA B200": 2250,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce GTX 1080": None,
    "cpu": None,
}


@pytest.mark.parametrize(("name", "peak"), NAMES.items())
def test_peak_of_a_device(name: str, peak: float | None) -> None:
    assert device.peak_tflops_of(name) == peak


def test_the_table_of_peaks_is_of_16_bit_products(module: PlanModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.runtime.monitor.monitor.name_of", lambda _: "NVIDIA H200")
    assert Monitor(module, console=False).peak_tflops is None
    monkeypatch.setattr(module, "spec", replace(module.spec, dtype=torch.bfloat16))
    assert Monitor(module, console=False).peak_tflops == 989
    assert Monitor(module, console=False, peak_tflops=500).peak_tflops == 500


REFUSED = [
    ({"log_every": 0}, "Monitor: log_every=0; valid: a number of steps, from 1 on", "10 is the default"),
    (
        {"peak_tflops": 0},
        "Monitor: peak_tflops=0; valid: a number above 0, or None",
        "give the dense peak of one device in TFLOPS, such as 989 for an H100 SXM",
    ),
    (
        {"json_path": "/"},
        "Monitor: json_path='/' cannot be written: Is a directory",
        "give the path of a file",
    ),
    (
        {"tensorboard_dir": "board"},
        "Monitor: tensorboard_dir='board', but tensorboard is not installed",
        "pip install 'shardc[train]'",
    ),
]


@pytest.mark.parametrize(("options", "problem", "advice"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_options_that_are_refused(
    options: dict[str, Any], problem: str, advice: str, module: PlanModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ShardcError) as error:
        Monitor(module, **options)
    assert str(error.value) == f"{problem}\n  {advice}"
