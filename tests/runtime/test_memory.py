"""Chunks: under every placement a plan trains as one process does, and holds what the placement says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardc.runtime import ShardcError, load_plan
from shardc.runtime.memory import PLACEMENTS
from tests.runtime import toy
from tests.runtime.test_training import CASES, Case, check_gradients, dp_part
from tests.workers import Workers

HERE = "tests.runtime.test_memory"
TRAINING = "tests.runtime.test_training"


def layouts_and_placements() -> Iterator[Any]:
    """All; where no other rank has the same parameters, ddp and zero3 stand for what is between them."""
    for case in CASES:
        dp = case.ranks // (case.plan.get("tp", 1) * case.plan.get("pp", 1))
        for placement in PLACEMENTS:
            marks = [pytest.mark.grid] if dp == 1 and placement in ("zero1", "zero2") else []
            yield pytest.param(case, placement, marks=marks, id=f"{case.name}-{placement}")


@pytest.mark.parametrize(("case", "placement"), list(layouts_and_placements()))
def test_training_equals_one_process(workers: Workers, tmp_path: Path, case: Case, placement: str) -> None:
    folder = toy.write_plan(tmp_path / "plan", **case.plan)
    frozen = case.plan.get("frozen", ())
    workers.run(case.ranks, f"{TRAINING}:train", str(folder), case.calls, frozen, "cpu", placement)


def steps(folder: str, placement: str) -> None:
    """Five clipped steps beside one process: losses, norms, parameters; then what each rank holds."""
    plan = load_plan(folder)
    module = plan.build(seed=1, dtype=torch.float64, device="cpu", placement=placement)
    memory, dp = module.state, module.mesh.dp
    dense = toy.dense_model(plan, seed=1)
    optimizer = torch.optim.AdamW(memory.masters(0), lr=1e-2)
    reference = torch.optim.AdamW(dense.values.values(), lr=1e-2)
    for step in range(5):
        batch = toy.batch_of(4, 6, seed=step)
        loss, expected = module(**dp_part(module, batch)).loss, dense.loss(**batch)
        loss.backward()
        expected.backward()
        module.reduce_gradients()
        norm = module.clip_grad_norm_(0.5)
        expected_norm = torch.nn.utils.clip_grad_norm_(dense.values.values(), 0.5)
        torch.testing.assert_close(loss.detach(), expected.detach())
        torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-5, atol=0)
        memory.step(optimizer)
        reference.step()
        module.zero_grad()
        reference.zero_grad()
    found = module.gather_parameters()
    if module.mesh.rank == 0:
        for name, value in dense.values.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-8)
    place = PLACEMENTS[placement]
    for chunk in memory.chunks:
        part = chunk.layout.numel // dp.size
        assert chunk.master.numel() == (part if place.states else chunk.layout.numel)
        assert chunk.flat.untyped_storage().nbytes() == (0 if place.parameters else chunk.layout.numel * 8)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_steps_equal_one_process_and_state_lies_where_the_placement_says(
    workers: Workers, tmp_path: Path, placement: str
) -> None:
    workers.run(4, f"{HERE}:steps", str(toy.write_plan(tmp_path / "plan", pp=2)), placement)


def without_sync(folder: str, placement: str) -> None:
    """Two calls inside no_sync and one after it: the sum of all three, as one process adds them up."""
    plan = load_plan(folder)
    module = plan.build(seed=3, dtype=torch.float64, device="cpu", placement=placement)
    dense = toy.dense_model(plan, seed=3)
    batches = [toy.batch_of(4, 6, seed=step) for step in range(3)]
    with module.state.no_sync():
        for batch in batches[:2]:
            module(**dp_part(module, batch)).loss.backward()
    waits = not PLACEMENTS[placement].gradients  # sharded ones are reduced all the same
    assert {chunk.total is None for chunk in module.state.trained} == {waits}
    module(**dp_part(module, batches[2])).loss.backward()
    for batch in batches:
        dense.loss(**batch).backward()
    module.reduce_gradients()
    check_gradients(module, dense)
    module.zero_grad()
    with module.state.no_sync():
        module(**dp_part(module, batches[0])).loss.backward()
    module.reduce_gradients()  # nothing came after no_sync: the step reduces
    for parameter in dense.values.values():
        parameter.grad = None
    dense.loss(**batches[0]).backward()
    check_gradients(module, dense)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_that_wait_are_reduced_once(workers: Workers, tmp_path: Path, placement: str) -> None:
    folder = toy.write_plan(tmp_path / "plan", microbatches=1)
    workers.run(2, f"{HERE}:without_sync", str(folder), placement)


def uneven(folder: str, placement: str) -> None:
    """One dp rank has two micro-batches, the other a single row: both gather and reduce alike."""
    plan = load_plan(folder)
    module = plan.build(seed=3, dtype=torch.float64, device="cpu", placement=placement)
    dense = toy.dense_model(plan, seed=3)
    batch = toy.batch_of(3, 6, seed=0)
    loss, expected = module(**dp_part(module, batch)).loss, dense.loss(**batch)
    torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    module.reduce_gradients()
    check_gradients(module, dense)
    with torch.no_grad():
        torch.testing.assert_close(module(**dp_part(module, batch)).loss, expected.detach())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("pp", [1, 2])
def test_dp_ranks_with_unequal_numbers_of_micro_batches(
    workers: Workers, tmp_path: Path, pp: int, placement: str
) -> None:
    folder = toy.write_plan(tmp_path / "plan", pp=pp, microbatches=2)
    workers.run(2 * pp, f"{HERE}:uneven", str(folder), placement)


def low_precision(folder: str, placement: str) -> None:
    """Sums over calls are float32, and are gathered as the parameters are, across ranks of tp and pp."""
    module = load_plan(folder).build(seed=3, dtype=torch.bfloat16, device="cpu", placement=placement)
    batch = dp_part(module, toy.batch_of(4, 6, seed=0))
    once = None
    for _ in range(2):
        module(**batch).loss.backward()
        module.reduce_gradients()
        once = module.gather_gradients() if once is None else once
    assert {chunk.total.dtype for chunk in module.state.trained} == {torch.float32}
    assert {chunk.master.dtype for chunk in module.state.trained} == {torch.float32}
    twice = module.gather_gradients()
    for name, grad in once.items():
        assert twice[name].dtype == grad.dtype == torch.bfloat16
        torch.testing.assert_close(twice[name], 2 * grad)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_low_precision_adds_up_in_float32(workers: Workers, tmp_path: Path, placement: str) -> None:
    folder = toy.write_plan(tmp_path / "plan", pp=2)
    workers.run(4, f"{HERE}:low_precision", str(folder), placement)


def test_an_unknown_placement_is_refused(tmp_path: Path) -> None:
    plan = load_plan(toy.write_plan(tmp_path / "plan"))
    with pytest.raises(ShardcError, match="placement 'zero4' is unknown; valid: ddp, zero1, zero2, zero3"):
        plan.build(seed=0, placement="zero4")
