"""A plan trains as one process does: loss, every gradient, norm and logits of the toy model, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.runtime import PlanModule, ShardcError, load_plan
from tests.runtime import toy
from tests.workers import Workers

HERE = "tests.runtime.test_training"


@dataclass(frozen=True)
class Case:
    """One layout, and the (rows, length, padding) of the calls that are made with it."""

    name: str
    ranks: int
    plan: dict[str, Any]
    calls: list[tuple[int, int, str]] = field(default_factory=lambda: [(4, 8, "none"), (4, 9, "left"), (3, 5, "right")])


CASES = [
    Case("one process", 1, {"microbatches": 1}),
    Case("one process with micro-batches", 1, {"microbatches": 3}),
    Case("dp 2", 2, {"microbatches": 1}),
    Case("dp 2 with micro-batches", 2, {"microbatches": 2}),
    Case("tp 2", 2, {"tp": 2, "microbatches": 1}),
    Case("tp 4 with two kv heads, each on two replicas", 4, {"tp": 4, "sub_axes": {"kv": 2, "replica": 2}}),
    Case("sequence parallel, lengths that tp does not divide", 2, {"tp": 2, "sequence_parallel": True}),
    Case("pp 2", 2, {"pp": 2}),
    Case("pp 2, gpipe", 2, {"pp": 2, "ranks": toy.gpipe(2, 4)}),
    Case("pp 2, two stages a rank", 2, {"pp": 2, "stages": 4, "ranks": toy.interleaved(2, 4, 2)}),
    Case("four stages on one rank", 1, {"pp": 1, "stages": 4, "ranks": toy.interleaved(1, 4, 4)}),
    Case("pp 3", 3, {"pp": 3}),
    Case("pp 4, fewer micro-batches than stages", 4, {"pp": 4, "microbatches": 2}),
    Case("pp 4", 4, {"pp": 4}),
    Case("pp 2 with dp 2", 4, {"pp": 2}),
    Case("tp 2 with pp 2", 4, {"tp": 2, "pp": 2}),
    Case("tp 2 with pp 2, sequence parallel", 4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    Case("frozen first stage", 4, {"pp": 4, "frozen": ("embed", "blocks.0")}),
    Case("frozen but for the first stage", 2, {"pp": 2, "frozen": ("embed", "blocks.2", "blocks.3")}),
]


def dense_gradients(dense: toy.Dense, frozen: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in dense.values.items() if not name.startswith(frozen or ("-",))}


def dp_part(module: PlanModule, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    dp = module.mesh.dp
    return {name: tensor.tensor_split(dp.size)[dp.coord] for name, tensor in batch.items()}


def check_gradients(module: PlanModule, dense: toy.Dense, frozen: tuple[str, ...] = ()) -> None:
    expected = dense_gradients(dense, frozen)
    found = module.gather_gradients()
    if module.mesh.rank == 0:
        assert sorted(found) == sorted(expected)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-11, msg=lambda t, n=name: f"{n}: {t}")
    else:
        assert found == {}
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(module.grad_norm().double().cpu(), norm, rtol=1e-6, atol=0)


def train(
    folder: str,
    calls: list[tuple[int, int, str]],
    frozen: tuple[str, ...] = (),
    device: str = "cpu",
    placement: str | None = None,
) -> None:
    """Each call: one backward, scaled; then, without zeroing, a second one with a loss that is dropped between."""
    plan = load_plan(folder)
    module = plan.build(seed=3, dtype=torch.float64, device=device, placement=placement)
    dense = toy.dense_model(plan, seed=3, device=device)
    for number, (rows, length, padding) in enumerate(calls):
        batch = toy.batch_of(rows * module.mesh.dp.size, length, seed=number, padding=padding)
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        loss = module(**dp_part(module, batch)).loss
        expected = dense.loss(**batch)
        torch.testing.assert_close(loss.detach().cpu(), expected.detach())
        (3 * loss).backward()
        (3 * expected).backward()
        module(**dp_part(module, batch))  # never given to backward
        again = toy.batch_of(rows * module.mesh.dp.size, length, seed=50 + number, padding=padding)
        module(**dp_part(module, again), num_items_in_batch=40).loss.backward()
        dense.loss(**again, num_targets=40).backward()
        module.reduce_gradients()
        check_gradients(module, dense, frozen)
        module.zero_grad()
        for parameter in dense.values.values():
            parameter.grad = None
        with torch.no_grad():
            output = module(**dp_part(module, batch))
        torch.testing.assert_close(output.loss.cpu(), expected.detach())
        logits = dense(**inputs).detach().tensor_split(module.mesh.dp.size)[module.mesh.dp.coord]
        torch.testing.assert_close(output.logits.cpu(), logits)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_equals_one_process(workers: Workers, tmp_path: Path, case: Case) -> None:
    folder = toy.write_plan(tmp_path / "plan", **case.plan)
    workers.run(case.ranks, f"{HERE}:train", str(folder), case.calls, case.plan.get("frozen", ()))


def steps(folder: str) -> tuple[Tensor, Tensor]:
    """Twenty optimizer steps; returns this rank's copy of the tied weight and the losses."""
    plan = load_plan(folder)
    module = plan.build(seed=1, dtype=torch.float64, device="cpu")
    dense = toy.dense_model(plan, seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(dense.values.values(), lr=1e-2, fused=True)
    losses = []
    for step in range(20):
        batch = toy.batch_of(4, 6, seed=step)
        loss, expected = module(**batch).loss, dense.loss(**batch)
        loss.backward()
        expected.backward()
        module.reduce_gradients()
        norm = module.clip_grad_norm_(0.5)
        expected_norm = torch.nn.utils.clip_grad_norm_(dense.values.values(), 0.5)
        torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-5, atol=0)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)
        losses.append(loss.detach())
    return module.local_parameters["embed.weight"].detach(), torch.stack(losses)


def test_tied_copies_stay_bitwise_equal_over_twenty_steps(workers: Workers, tmp_path: Path) -> None:
    """Both copies see the same gradient and the same clipping (Megatron-LM 656)."""
    folder = toy.write_plan(tmp_path / "plan", pp=2)
    (first, losses), (last, other_losses) = workers.run(2, f"{HERE}:steps", str(folder))
    assert torch.equal(first, last)
    assert torch.equal(losses, other_losses)
    assert losses[-1] < losses[0]


def misuse(folder: str) -> None:
    module = load_plan(folder).build(seed=1, device="cpu")
    batch = toy.batch_of(4, 6, seed=0)
    output = module(**batch)
    assert "logits" not in repr(output)
    with pytest.raises(ShardcError, match=r"under torch\.no_grad"):
        _ = output.logits
    output.loss.backward(retain_graph=True)
    with pytest.raises(ShardcError, match="backward was called twice"):
        output.loss.backward()
    with pytest.raises(ShardcError, match=r"no labels, so no loss; 2 stages keep no graph of logits"):
        module(input_ids=batch["input_ids"])
    with pytest.raises(ShardcError, match=r"cannot take use_cache=False; the plan takes tensors \['input_ids'"):
        module(**batch, use_cache=False)
    with torch.no_grad():
        assert module(input_ids=batch["input_ids"]).loss is None


def test_misuse_is_refused_on_every_rank(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:misuse", str(toy.write_plan(tmp_path / "plan", pp=2)))


def different_batches(folder: str) -> str:
    module = load_plan(folder).build(seed=1, device="cpu")
    batch = toy.batch_of(4, 6, seed=0)
    batch["input_ids"] = batch["input_ids"] + (module.mesh.rank == 3)
    with pytest.raises(ShardcError) as error:
        module(**batch)
    return str(error.value)


def test_ranks_of_a_replica_with_different_batches_are_told_so(workers: Workers, tmp_path: Path) -> None:
    """On the first call, on every rank (CAI 5110, DS 7199)."""
    folder = str(toy.write_plan(tmp_path / "plan", tp=2, pp=2))
    assert (
        workers.run(4, f"{HERE}:different_batches", folder)
        == [
            "toy: the tp=2 * pp=2 ranks of dp coord 0 were given different input_ids\n"
            "  shard the data over dp only: mesh.dp.coord of mesh.dp.size, not the global rank"
        ]
        * 4
    )


def ignored_on_one_rank(folder: str) -> None:
    plan = load_plan(folder)
    module = plan.build(seed=1, dtype=torch.float64, device="cpu")
    dense = toy.dense_model(plan, seed=1)
    batch = toy.batch_of(4, 6, seed=0)
    batch["labels"][:2] = -100
    loss, expected = module(**dp_part(module, batch)).loss, dense.loss(**batch)
    torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    module.reduce_gradients()
    check_gradients(module, dense)


def test_labels_ignored_everywhere_on_one_rank(workers: Workers, tmp_path: Path) -> None:
    """The mean is over the targets of the global batch, not a mean of means (TT 2972)."""
    workers.run(2, f"{HERE}:ignored_on_one_rank", str(toy.write_plan(tmp_path / "plan", microbatches=2)))


def test_one_process_has_plain_autograd_and_logits(tmp_path: Path) -> None:
    module = load_plan(toy.write_plan(tmp_path / "plan", microbatches=1)).build(seed=1, device="cpu")
    output = module(**toy.batch_of(2, 6, seed=0))
    output.logits.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
