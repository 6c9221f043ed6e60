"""Parameters and states on the host: training is that of one process, bit by bit that of the same placement without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardc.runtime import PlanModule, ShardcError, load_plan
from shardc.runtime.memory.homes import HOST
from shardc.runtime.offload import Offload
from shardc.runtime.state import StateOptions
from tests.runtime import toy
from tests.runtime.test_training import check_gradients, dp_part
from tests.workers import Workers

HERE = "tests.runtime.test_offload"
MAX_ELEMENTS = 200  # several chunks a block


def build(folder: str, placement: str, **offload: Any) -> PlanModule:
    options = StateOptions(max_elements=MAX_ELEMENTS, offload=Offload(**offload) if offload else None)
    return load_plan(folder).build(seed=1, dtype=torch.float64, device="cpu", placement=placement, options=options)


def steps(folder: str, placement: str, shares: list[dict[str, Any]]) -> None:
    """Clipped steps of several calls, with evaluation between, beside one process and without offload."""
    plain = build(folder, placement)
    modules = [plain, *(build(folder, placement, **share) for share in shares)]
    optimizers = [torch.optim.AdamW(module.state.masters(0), lr=1e-2) for module in modules]
    dense = toy.dense_model(load_plan(folder), seed=1)
    reference = torch.optim.AdamW(dense.values.values(), lr=1e-2)
    for step in range(4):
        batch = toy.batch_of(4, 6 + step % 2, seed=step)
        expected = dense.loss(**batch)
        expected.backward()
        norms = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            with torch.no_grad():
                evaluated = module(**dp_part(module, batch)).loss
            loss = module(**dp_part(module, batch)).loss
            torch.testing.assert_close(loss.detach(), expected.detach())
            torch.testing.assert_close(evaluated, expected.detach())
            loss.backward()
            module.reduce_gradients()
            if step % 2:
                check_gradients(module, dense)
            norms.append(module.grad_norm())
            module.state.step(optimizer, (0.5 / norms[-1]).clamp(max=1.0))
            module.zero_grad()
        for value in dense.values.values():  # by the same factor, which is float32
            value.grad.mul_((0.5 / norms[0]).clamp(max=1.0))
        reference.step()
        reference.zero_grad()
    found = [module.gather_parameters() for module in modules]
    if plain.mesh.rank == 0:
        for name, value in dense.values.items():
            torch.testing.assert_close(found[0][name], value.detach(), rtol=1e-6, atol=1e-8)
            for other in found[1:]:
                assert torch.equal(other[name], found[0][name]), name


FRACTIONS = [{"host_states": s, "host_parameters": p} for s in (0.0, 0.5, 1.0) for p in (0.0, 0.5, 1.0)]


@pytest.mark.parametrize(
    ("ranks", "placement", "plan"),
    [
        (1, "zero3", {"microbatches": 1}),
        (2, "zero3", {"microbatches": 1}),
        (2, "zero2", {"microbatches": 1}),
        (2, "zero1", {"microbatches": 2}),
        (2, "ddp", {"microbatches": 1}),
        (2, "zero3", {"tp": 2, "microbatches": 1}),
        (2, "zero3", {"pp": 2}),
        (4, "zero3", {"pp": 2}),
    ],
    ids=lambda value: str(value),
)
def test_steps_are_those_without_offload(
    workers: Workers, tmp_path: Path, ranks: int, placement: str, plan: dict[str, Any]
) -> None:
    shares = FRACTIONS[::3] if placement != "zero3" else FRACTIONS if ranks == 1 else FRACTIONS[4:]
    shares = [*shares, {**shares[-1], "accumulates": True}, {**shares[-1], "sharded_parameters": 0.5}]
    workers.run(ranks, f"{HERE}:steps", str(toy.write_plan(tmp_path / "plan", **plan)), placement, shares)


def accumulates(folder: str) -> None:
    """Two backward passes, and a loss that is thrown away, before a step."""
    module = build(folder, "zero3", host_states=1.0, host_parameters=1.0, accumulates=True)
    dense = toy.dense_model(load_plan(folder), seed=1)
    for seed in range(2):
        batch = toy.batch_of(4, 6, seed=seed)
        module(**dp_part(module, batch)).loss.backward()
        module(**dp_part(module, batch))
        dense.loss(**batch).backward()
    module.reduce_gradients()
    check_gradients(module, dense)


@pytest.mark.parametrize("plan", [{"microbatches": 1}, {"pp": 2}], ids=str)
def test_gradients_accumulate_where_it_is_asked_for(workers: Workers, tmp_path: Path, plan: dict[str, Any]) -> None:
    workers.run(2, f"{HERE}:accumulates", str(toy.write_plan(tmp_path / "plan", **plan)))


def reuse(folder: str) -> None:
    """What gradients in the parameters' place forbid, and what brings the parameters back."""
    module = build(folder, "zero3", host_states=1.0)
    batch = dp_part(module, toy.batch_of(4, 6, seed=0))
    before = module.gather_parameters()
    optimizer = torch.optim.SGD(module.state.masters(0), lr=0.1)
    loss, again = module(**batch).loss, module(**batch).loss
    loss.backward()
    with pytest.raises(ShardcError, match="enable_gradient_accumulation"):
        module(**batch)
    with torch.no_grad(), pytest.raises(ShardcError, match="enable_gradient_accumulation"):
        module(**batch)
    held = module.gather_parameters()
    assert all(torch.equal(held[name], value) for name, value in before.items())
    module.zero_grad()  # no step: parameters come from the masters
    torch.testing.assert_close(module(**batch).loss, again)
    module(**batch).loss.backward()
    module.reduce_gradients()
    module.state.step(optimizer)
    loss = module(**batch).loss
    with pytest.raises(ShardcError, match="zero_grad"):
        loss.backward()


def test_gradients_in_the_place_of_parameters_are_said(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:reuse", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


class SlowSGD(torch.optim.SGD):
    """Each chunk takes longer than a call of the model; where it has to, its thread fails."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if any(master.grad is not None for group in self.param_groups for master in group["params"]):
            time.sleep(0.05)
            if self.fails:
                raise MemoryError("no room for the states")
        super().step(closure)


def slow(folder: str) -> None:
    """A call begins while the thread is at work, and reads what it wrote; what it raised is raised."""
    module = build(folder, "zero3", host_states=1.0)
    dense = toy.dense_model(load_plan(folder), seed=1)
    optimizer = SlowSGD(module.state.masters(0), lr=0.1)
    reference = torch.optim.SGD(dense.values.values(), lr=0.1)
    for step in range(3):
        batch = toy.batch_of(4, 6, seed=step)
        loss, expected = module(**dp_part(module, batch)).loss, dense.loss(**batch)
        torch.testing.assert_close(loss.detach(), expected.detach())
        loss.backward()
        expected.backward()
        module.reduce_gradients()
        optimizer.fails = step == 2
        module.state.step(optimizer)
        reference.step()
        module.zero_grad()
        reference.zero_grad()
    with pytest.raises(MemoryError, match="no room"):
        module(**dp_part(module, batch))


def test_a_call_waits_for_the_steps_of_the_thread(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:slow", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def shares(folder: str) -> list[list[str]]:
    """Each share is honoured to within one chunk; returns the homes, which are the same on every rank."""
    found = []
    for share in (0.05, 0.2, 0.5):
        module = build(folder, "zero3", host_states=share, host_parameters=share, sharded_parameters=share)
        chunks = module.state.trained
        total, largest = (reduce(chunk.layout.numel for chunk in chunks) for reduce in (sum, max))
        for of in (
            lambda chunk: chunk.home.states == HOST,
            lambda chunk: chunk.home.parameters == HOST,
            lambda chunk: chunk.home.sharded,
        ):
            held = sum(chunk.layout.numel for chunk in chunks if of(chunk))
            assert abs(held - share * total) <= largest
        found.append([str(chunk.home) for chunk in chunks])
    return found


def test_shares_are_honoured_to_within_a_chunk(workers: Workers, tmp_path: Path) -> None:
    first, *others = workers.run(2, f"{HERE}:shares", str(toy.write_plan(tmp_path / "plan", microbatches=1)))
    assert all(other == first for other in others)
