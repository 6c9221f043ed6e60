"""What a call of the module means, on the toy model in float64: criterion, loss scale, guards, logits, outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.runtime import Output, PlanModule, ShardcError, load_plan
from tests.runtime import toy
from tests.runtime.test_training import check_gradients, dp_part
from tests.workers import Workers

HERE = "tests.runtime.test_calls"


def build(folder: str, placement: str | None = None) -> tuple[PlanModule, toy.Dense]:
    """The module of this rank in float64, and the model in one process."""
    plan = load_plan(folder)
    module = plan.build(seed=3, dtype=torch.float64, device="cpu", placement=placement)
    return module, toy.dense_model(plan, seed=3)


# -- criterion ---------------------------------------------------------------------------------------------------------
def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with label smoothing, the mean over the targets."""
    assert logits.shape == (*labels.shape, toy.VOCAB)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.2)


def smoothed_criterion(outputs: Output, batch: Mapping[str, Any]) -> Tensor:
    assert (batch["labels"][:, 1:] != -100).any()
    return smoothed(outputs.logits, batch["labels"])


def plain_criterion(outputs: Output, batch: Mapping[str, Any]) -> Tensor:
    return outputs.loss


def mixed_criterion(outputs: Output, batch: Mapping[str, Any]) -> Tensor:
    return outputs.loss + 0.3 * smoothed(outputs.logits, batch["labels"])


def of_inputs(outputs: Output, batch: Mapping[str, Any]) -> Tensor:
    """For a batch without labels."""
    assert outputs.loss is None and "labels" not in batch
    return smoothed(outputs.logits, batch["input_ids"])


@dataclass(frozen=True)
class Case:
    """A layout, and the (rows of the global batch, length, padding) of its calls."""

    name: str
    ranks: int
    plan: dict[str, Any]
    placement: str | None = None
    calls: list[tuple[int, int, str]] = field(default_factory=lambda: [(5, 8, "left"), (3, 9, "right")])


TP2, PP2, ONE, TWO = {"tp": 2}, {"pp": 2}, {"microbatches": 1}, {"microbatches": 2}
CASES = [
    Case("one process", 1, {"microbatches": 1}),
    Case("one process with micro-batches of 3 and 2 rows", 1, TWO),
    Case("dp 2, of 3 and 2 rows", 2, {"microbatches": 1}),
    Case("dp 2, chunks", 2, {"microbatches": 1}, "ddp"),
    Case("dp 2 with micro-batches, sharded parameters", 2, TWO, "zero3"),
    Case("tp 2", 2, TP2 | {"microbatches": 1}),
    Case("tp 2, sequence parallel, lengths that tp does not divide", 2, TP2 | TWO | {"sequence_parallel": True}),
    Case("pp 2", 2, PP2 | TWO, "zero1"),
    Case("pp 2, two stages a rank", 2, PP2 | {"stages": 4, "ranks": toy.interleaved(2, 4, 2)}),
    Case("tp 2 with pp 2", 4, TP2 | PP2 | TWO),
    Case("dp 2 with tp 2", 4, TP2 | TWO, "zero2"),
    Case("dp 2 with pp 2", 4, PP2 | TWO, "zero3"),
]


def expected_loss(name: str, dense: toy.Dense, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if name == "of_inputs":
        return smoothed(dense(**inputs), batch["input_ids"])
    losses = {"plain": dense.loss(**batch), "smoothed": smoothed(dense(**inputs), batch["labels"])}
    losses["mixed"] = losses["plain"] + 0.3 * losses["smoothed"]
    return losses[name.removesuffix("_criterion")]


def train_with_criteria(folder: str, placement: str | None, calls: list[tuple[int, int, str]]) -> None:
    """Each criterion: loss and every gradient of the second of two calls, the first of which is dropped."""
    module, dense = build(folder, placement)
    for name in ("smoothed_criterion", "plain_criterion", "mixed_criterion", "of_inputs"):
        for number, (rows, length, padding) in enumerate(calls):
            batch = toy.batch_of(rows, length, seed=number, padding=padding)
            batch["labels"][:, -1] = batch["input_ids"][:, -1]  # each row has a target
            expected = expected_loss(name, dense, batch)
            if name == "of_inputs":
                del batch["labels"]
            call = {**dp_part(module, batch), "criterion": globals()[name]}
            module(**call)
            loss = module(**call).loss
            torch.testing.assert_close(loss.detach(), expected.detach())
            (3 * loss).backward()
            (3 * expected).backward()
            module.reduce_gradients()
            check_gradients(module, dense)
            module.zero_grad()
            for parameter in dense.values.values():
                parameter.grad = None
            with torch.no_grad():
                torch.testing.assert_close(module(**call).loss, expected.detach())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_criterion_over_micro_batches_and_ranks_is_that_of_one_process(
    workers: Workers, tmp_path: Path, case: Case
) -> None:
    folder = toy.write_plan(tmp_path / "plan", **case.plan)
    workers.run(case.ranks, f"{HERE}:train_with_criteria", str(folder), case.placement, case.calls)


def without_targets(folder: str, placement: str | None) -> None:
    """Rows 2 to 5 of 6 have no target: of dp coord 1 none, of coord 0 one micro-batch."""
    module, dense = build(folder, placement)
    batch = toy.batch_of(6, 8, seed=0)
    batch["labels"][2:] = -100
    loss = module(**dp_part(module, batch), criterion=smoothed_criterion).loss
    expected = expected_loss("smoothed", dense, batch)
    torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    module.reduce_gradients()
    check_gradients(module, dense)
    batch["labels"][:] = -100
    assert module(**dp_part(module, batch), criterion=smoothed_criterion).loss.isnan()  # as one process has it


@pytest.mark.parametrize("placement", [None, "ddp", "zero3"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_without_targets_do_not_reach_the_criterion(
    workers: Workers, tmp_path: Path, microbatches: int, placement: str | None
) -> None:
    """Its mean over nothing would be NaN, and so would be every gradient."""
    folder = toy.write_plan(tmp_path / "plan", microbatches=microbatches)
    workers.run(2, f"{HERE}:without_targets", str(folder), placement)


def criterion_arguments(folder: str) -> list[tuple[int, list[int]]]:
    """What the criterion is given; num_items_in_batch divides."""
    module, dense = build(folder)
    batch = toy.batch_of(3, 7, seed=0, padding="right")
    batch["attention_mask"][:] = 1  # a mask that the plan drops
    seen = []

    def criterion(outputs: Output, part: dict[str, Any]) -> Tensor:
        seen.append(part)
        assert list(part) == [*batch, "position_ids"]
        assert part["position_ids"] is None
        return outputs.loss

    call = {**batch, "position_ids": None, "criterion": criterion}
    loss = module(**call, num_items_in_batch=20).loss
    torch.testing.assert_close(loss.detach(), dense.loss(**batch, num_targets=20).detach())
    rows = 0
    for part in seen:
        for name, tensor in batch.items():
            assert torch.equal(part[name], tensor[rows : rows + len(part[name])]), name
        rows += len(part["input_ids"])
    del call["labels"]
    with pytest.raises(ShardcError, match="num_items_in_batch=20 counts targets, and the batch has no labels"):
        module(**call, num_items_in_batch=20)
    return [len(part["input_ids"]) for part in seen]


def test_a_criterion_is_given_the_rows_of_its_micro_batch_as_the_caller_gave_them(
    workers: Workers, tmp_path: Path
) -> None:
    """Not padded, with a mask of ones that the plan drops, on the last stage alone."""
    folder = toy.write_plan(tmp_path / "plan", tp=2, pp=2, microbatches=2, sequence_parallel=True)
    assert workers.run(4, f"{HERE}:criterion_arguments", str(folder)) == [[], [], [2, 1], [2, 1]]


WRONG: dict[str, tuple[Callable[[Output, Any], Any], str]] = {
    "a vector": (
        lambda outputs, batch: outputs.logits[0, 0],
        "criterion: returned torch.float64 of shape [101]; valid:",
    ),
    "a number": (lambda outputs, batch: 1.0, "criterion: returned float; valid: a 0-d floating tensor"),
    "a count": (lambda outputs, batch: outputs.logits.argmax(), "criterion: returned torch.int64 of shape []; valid:"),
    "a constant": (lambda outputs, batch: torch.zeros(()), "returned a loss without a gradient"),
    "an error of its own": (lambda outputs, batch: batch["weights"], "'weights'"),
}


def wrong_criteria(folder: str, placement: str | None) -> list[list[str]]:
    """Messages by kind; the module goes on as before."""
    module, dense = build(folder, placement)
    batch = toy.batch_of(4, 6, seed=0)
    messages = []
    for function, _ in WRONG.values():
        with pytest.raises((ShardcError, KeyError)) as error:
            module(**dp_part(module, batch), criterion=function)
        messages.append(str(error.value).split("\n")[0])
    module(**dp_part(module, batch), criterion=smoothed_criterion).loss.backward()
    expected_loss("smoothed", dense, batch).backward()
    module.reduce_gradients()
    check_gradients(module, dense)
    return messages


@pytest.mark.parametrize(
    ("ranks", "plan", "placement", "alone"),
    [(2, PP2 | TWO, None, [0]), (2, TP2 | {"microbatches": 1}, None, []), (2, {"microbatches": 1}, "zero3", [])],
    ids=["pp 2", "tp 2", "dp 2"],
)
def test_a_criterion_that_fails_at_first_fails_on_every_rank(
    workers: Workers, tmp_path: Path, ranks: int, plan: dict[str, Any], placement: str | None, alone: list[int]
) -> None:
    """alone: ranks that do not run it, and say whose error it was."""
    folder = toy.write_plan(tmp_path / "plan", **plan)
    for rank, messages in enumerate(workers.run(ranks, f"{HERE}:wrong_criteria", str(folder), placement)):
        for found, (_, expected) in zip(messages, WRONG.values(), strict=True):
            assert ("criterion: failed on rank 1" if rank in alone else expected) in found


def fails_on_one_dp_rank(folder: str) -> str:
    module, _ = build(folder)

    def criterion(outputs: Output, batch: Any) -> Tensor:
        if module.mesh.dp.coord == 1:
            raise ValueError("a row of this rank")
        return outputs.loss

    with pytest.raises((ShardcError, ValueError)) as error, torch.no_grad():
        module(**toy.batch_of(2, 6, seed=0), criterion=criterion)
    return str(error.value).split("\n")[0]


def test_other_dp_ranks_learn_of_a_criterion_that_fails_on_one(workers: Workers, tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path / "plan", microbatches=1)
    found = workers.run(2, f"{HERE}:fails_on_one_dp_rank", str(folder))
    assert found == ["criterion: failed on rank 1", "a row of this rank"]


# -- loss scale and guard ----------------------------------------------------------------------------------------------
def scaled(folder: str, placement: str | None) -> None:
    """Backward inside a call begins with the scale; what is left of it in .grad is the upstream gradient's alone."""
    module, dense = build(folder, placement)
    batch = toy.batch_of(5, 6, seed=0)
    seen: list[Tensor] = []
    if placement is None:
        watched = module.local_parameters[min(n for n in module.local_parameters if n.endswith("norm"))]
        watched.register_hook(seen.append)
    grads = []
    for scale in (None, 1024.0, torch.inf):
        module.loss_scale = None if scale is None else torch.tensor(scale)
        seen.clear()
        loss = module(**dp_part(module, batch)).loss
        inside = [grad.clone() for grad in seen]
        if scale is not None:
            module.loss_scale.fill_(1.0)  # as a step may do before the backward
        (loss * 3 * (scale or 1)).backward()
        module.reduce_gradients()
        if scale == torch.inf:
            assert not module.grad_norm().isfinite()
        else:
            grads.append((inside, module.gather_gradients()))
        module.zero_grad()
    (inside, plain), (inside_scaled, scaled) = grads
    assert [torch.equal(1024 * a, b) for a, b in zip(inside, inside_scaled, strict=True)] == [True] * len(inside)
    (3 * dense.loss(**batch)).backward()
    for name, grad in plain.items():
        assert torch.equal(scaled[name], 1024 * grad), name
        torch.testing.assert_close(grad, dense.values[name].grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("placement", [None, "zero1", "zero3"])
@pytest.mark.parametrize("plan", [PP2, TWO, TP2 | PP2 | TWO], ids=["pp 2", "dp 2", "tp 2 with pp 2"])
def test_a_loss_scale_multiplies_gradients_inside_a_call_and_is_taken_out(
    workers: Workers, tmp_path: Path, plan: dict[str, Any], placement: str | None
) -> None:
    folder = toy.write_plan(tmp_path / "plan", **plan)
    workers.run(4 if len(plan) == 3 else 2, f"{HERE}:scaled", str(folder), placement)


def underflows(folder: str) -> None:
    """A sum over few targets divided by very many: in float16 every gradient is 0 without the scale."""
    module = load_plan(folder).build(seed=3, dtype=torch.float16, device="cpu", placement="zero1")
    norms = []
    for scale in (1.0, 2.0**14):
        module.loss_scale = torch.tensor(scale)
        loss = module(**toy.batch_of(4, 6, seed=0), num_items_in_batch=2**30).loss
        (loss * scale).backward()
        module.reduce_gradients()
        norms.append(module.grad_norm())
        module.zero_grad()
    assert norms[0] == 0 and norms[1] > 0


def test_gradients_of_float16_inside_a_call_do_not_underflow_with_a_scale(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:underflows", str(toy.write_plan(tmp_path / "plan", pp=2)))


def guarded(folder: str, placement: str | None) -> None:
    """Rank 0 alone begins a backward that the guard refuses; then all do one that it lets through."""
    module, dense = build(folder, placement)
    batch, is_open, calls = toy.batch_of(4, 6, seed=0), [], []

    def guard() -> None:
        calls.append(1)
        if not is_open:
            raise ShardcError("not here", "elsewhere")

    module.backward_guard = guard
    loss = module(**dp_part(module, batch)).loss
    assert not calls
    if module.mesh.rank == 0:
        with pytest.raises(ShardcError, match="not here"):
            loss /= 2
            loss.backward()
    is_open.append(1)
    module.zero_grad()
    module(**dp_part(module, batch)).loss.backward()
    assert len(calls) == 1 + (module.mesh.rank == 0)
    dense.loss(**batch).backward()
    module.reduce_gradients()
    check_gradients(module, dense)


@pytest.mark.parametrize("placement", [None, "ddp", "zero3"])
@pytest.mark.parametrize("plan", [{"microbatches": 1}, PP2], ids=["dp 2", "pp 2"])
def test_the_guard_is_asked_before_a_backward_sends_anything(
    workers: Workers, tmp_path: Path, plan: dict[str, Any], placement: str | None
) -> None:
    workers.run(2, f"{HERE}:guarded", str(toy.write_plan(tmp_path / "plan", **plan)), placement)


# -- logits ------------------------------------------------------------------------------------------------------------
def training_logits(folder: str, placement: str | None, gather: bool, is_there: bool) -> None:
    """Rank 0 alone reads the logits of a call with gradients, and tries a backward through them."""
    module, dense = build(folder, placement)
    module.gather_training_logits = gather
    batch = toy.batch_of(4, 7, seed=0)
    output = module(**dp_part(module, batch))
    assert ("logits" in output) == is_there
    if module.mesh.rank == 0 and is_there:
        expected = dense(batch["input_ids"]).tensor_split(module.mesh.dp.size)[0]
        torch.testing.assert_close(output.logits.detach(), expected.detach())
        for loss in (output.logits.logsumexp(-1).mean(), output.loss + 0 * output.logits.sum()):
            with pytest.raises(ShardcError, match=r"backward through \.logits.*\n.*boost\(criterion="):
                loss.backward()
    elif module.mesh.rank == 0:
        with pytest.raises(ShardcError, match=r"not gathered.*\n.*no_grad.*parallel_output=False.*criterion"):
            _ = output.logits
    assert module.gather_gradients() == {}
    module(**dp_part(module, batch)).loss.backward()
    dense.loss(**batch).backward()
    module.reduce_gradients()
    check_gradients(module, dense)


@pytest.mark.parametrize("gather", [False, True], ids=["not gathered", "gathered"])
@pytest.mark.parametrize(
    ("ranks", "plan", "placement", "is_there"),
    [
        (1, TWO, None, False),
        (2, ONE, None, True),
        (2, ONE, "ddp", True),
        (2, ONE, "zero3", True),
        (2, TP2 | ONE | {"sequence_parallel": True}, None, False),
        (2, PP2, "zero1", False),
        (4, TP2 | PP2, None, False),
        (4, TP2 | ONE, "zero3", False),
    ],
    ids=[
        "micro-batches",
        "dp 2",
        "dp 2, ddp",
        "dp 2, zero3",
        "tp 2, sequence parallel",
        "pp 2",
        "tp 2, pp 2",
        "dp, tp",
    ],
)
def test_logits_beside_gradients_are_read_on_one_rank_and_never_go_backward(
    workers: Workers,
    tmp_path: Path,
    ranks: int,
    plan: dict[str, Any],
    placement: str | None,
    is_there: bool,
    gather: bool,
) -> None:
    folder = toy.write_plan(tmp_path / "plan", **plan)
    workers.run(ranks, f"{HERE}:training_logits", str(folder), placement, gather, is_there or gather)


@pytest.mark.parametrize("placement", [None, "ddp", "zero3"])
def test_one_process_with_nothing_split_goes_backward_through_its_logits(tmp_path: Path, placement: str | None) -> None:
    module, dense = build(str(toy.write_plan(tmp_path / "plan", microbatches=1)), placement)
    asked: list[int] = []
    module.backward_guard = lambda: asked.append(1)
    batch = toy.batch_of(3, 7, seed=0)
    smoothed(module(**batch).logits, batch["labels"]).backward()
    smoothed(dense(batch["input_ids"]), batch["labels"]).backward()
    module.reduce_gradients()
    check_gradients(module, dense)


# -- outputs -----------------------------------------------------------------------------------------------------------
def test_outputs_are_read_as_those_of_transformers() -> None:
    loss, logits = torch.tensor(1.5), torch.zeros(2, 3, 4)
    output = Output(loss, logits)
    assert output.loss is output["loss"] is output[0] is output.get("loss")
    assert output.logits is output["logits"] is output[1] is output[-1]
    assert output.to_tuple() == output[:2] == (loss, logits)
    assert list(output) == list(output.keys()) == ["loss", "logits"]
    assert dict(**output) == {"loss": loss, "logits": logits}
    assert len(output) == 2 and output == output and output != Output(loss, logits)
    assert repr(output) == "Output(loss=1.5, logits=(2, 3, 4))"
    with pytest.raises(KeyError, match="hidden_states"):
        _ = output["hidden_states"]
    assert "hidden_states" not in output and output.get("hidden_states") is None


def test_outputs_have_what_is_there() -> None:
    logits = torch.zeros(2, 3, 4)
    output = Output(None, logits)
    assert list(output) == ["logits"] and output[0] is logits and "loss" not in output
    with pytest.raises(KeyError, match="loss"):
        _ = output["loss"]
    output = Output(torch.tensor(1.5), None)
    assert output.to_tuple() == (output.loss,) and "logits" not in output
    with pytest.raises(ShardcError, match="logits are not gathered"):
        _ = output["logits"]
    assert repr(output) == "Output(loss=1.5)"


def test_outputs_gather_logits_once_and_only_when_they_are_read() -> None:
    asked = []
    output = Output(None, lambda: asked.append(1) or torch.zeros(1))
    assert "logits" in output and repr(output) == "Output(loss=None)" and len(output) == 1
    output.to_float32()
    assert not asked
    assert output.logits is output[0]
    assert asked == [1]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_outputs_in_less_precision_become_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    output = Output(torch.tensor(1.5, dtype=dtype, requires_grad=True), torch.zeros(3, dtype=dtype))
    output.to_float32()
    assert output.loss.dtype == output.logits.dtype == output["logits"].dtype == expected
    assert output.loss.requires_grad


# -- a call that is not a step -----------------------------------------------------------------------------------------
def evaluation_with_gradients(folder: str, placement: str | None) -> None:
    """eval() without no_grad trains as before; a result that is dropped leaves no trace."""
    module, dense = build(folder, placement)
    module.eval()
    batch, other = toy.batch_of(4, 6, seed=0), toy.batch_of(4, 6, seed=1)
    module(**dp_part(module, batch)).loss.backward()
    random = torch.get_rng_state()
    for criterion in (None, smoothed_criterion):
        output = module(**dp_part(module, other), criterion=criterion)
        if module.mesh.rank == 0:
            assert "loss" in repr(output) and output["loss"].isfinite()
    assert torch.equal(torch.get_rng_state(), random)
    dense.loss(**batch).backward()
    module.reduce_gradients()
    check_gradients(module, dense)


@pytest.mark.parametrize("placement", [None, "ddp", "zero3"])
@pytest.mark.parametrize("plan", [ONE, TWO, PP2], ids=["dp 2", "dp 2 with micro-batches", "pp 2"])
def test_results_that_are_dropped_in_evaluation_mode_change_nothing(
    workers: Workers, tmp_path: Path, plan: dict[str, Any], placement: str | None
) -> None:
    folder = toy.write_plan(tmp_path / "plan", **plan)
    workers.run(2, f"{HERE}:evaluation_with_gradients", str(folder), placement)
