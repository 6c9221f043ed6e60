"""boost(criterion=...): a loss of the user's own, under every layout as one process has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.booster import Booster
from shardc.booster.model import BoostedModel
from shardc.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardc.errors import ShardcError
from shardc.plan.verification import RELATIVE, compare_gradients
from tests.booster.small import LENGTH, VOCABULARY, make_model, make_rows
from tests.workers import Workers

HERE = "tests.booster.test_criterion"


def hybrid(**arguments: Any) -> Plugin:
    return HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | arguments)


# name -> (ranks, plugin)
LAYOUTS: dict[str, tuple[int, Callable[[], Plugin]]] = {
    "tp 2": (2, lambda: hybrid(tp_size=2)),
    "tp 2 with sequences split": (
        2,
        lambda: hybrid(tp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"),
    ),
    "pp 2, micro-batches of 3 and 2 rows": (2, lambda: hybrid(pp_size=2, num_microbatches=2)),
    "tp 2 with pp 2": (4, lambda: hybrid(tp_size=2, pp_size=2, num_microbatches=2, zero_stage=1)),
    "pp 2 with dp 2": (4, lambda: hybrid(pp_size=2, num_microbatches=2, zero_stage=3)),
    "ddp": (2, TorchDDPPlugin),
    "zero 2": (2, lambda: LowLevelZeroPlugin(stage=2, precision="fp32")),
    "gemini": (2, lambda: GeminiPlugin(precision="fp32")),
    "fsdp": (2, TorchFSDPPlugin),
}


def make_batch(rows: int, padding: str) -> dict[str, Tensor]:
    """Ragged labels; padded rows of unequal lengths; an odd number of tokens."""
    made = make_rows(rows)
    batch = {name: torch.stack([row[name] for row in made])[:, : LENGTH - 1] for name in made[0]}
    if padding != "none":
        positions, missing = torch.arange(LENGTH - 1), torch.arange(rows).unsqueeze(1) % 4
        visible = positions >= missing if padding == "left" else positions < LENGTH - 1 - missing
        batch["attention_mask"] = visible.long()
        batch["labels"] = batch["labels"].masked_fill(~visible, -100)
        batch["labels"][:, 4] = batch["input_ids"][:, 4]  # a target is left
    return batch


def smoothed(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A user's function, which must not know how the model is split."""
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    assert logits.shape == (*labels.shape, VOCABULARY)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)


def own_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return outputs["loss"]


def next_token(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Makes labels of its own."""
    return F.cross_entropy(outputs[0][:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


CRITERIA = {"smoothed": smoothed, "own_loss": own_loss, "next_token": next_token}


def rows_of(plugin: Plugin, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This dp rank's part of a global batch."""
    return {name: tensor.tensor_split(plugin.dp_size)[plugin.dp_coord] for name, tensor in batch.items()}


def check_gradients(model: BoostedModel, reference: torch.nn.Module) -> None:
    model.module.reduce_gradients()
    found = model.module.gather_gradients()
    if model.module.mesh.rank == 0:
        worst = compare_gradients(found, {key: p.grad for key, p in reference.named_parameters()})[0]
        assert worst.error <= worst.bound, worst


def trained(name: str, rows: int) -> None:
    """Loss and every gradient of each criterion, on padded batches too; the loss without gradients."""
    _, make_plugin = LAYOUTS[name]
    for criterion_name, criterion in CRITERIA.items():
        plugin, fresh, reference = make_plugin(), make_model(), make_model()
        optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
        booster = Booster(plugin=plugin)
        model, optimizer, boosted_criterion, *_ = booster.boost(fresh, optimizer, criterion)
        for padding in ("none", "left", "right"):
            batch = make_batch(rows, padding)
            if criterion_name == "next_token":
                del batch["labels"]
            own = rows_of(plugin, batch)
            outputs = model(**own)
            loss = boosted_criterion(outputs, own)
            expected = criterion(reference(**batch), batch)
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=RELATIVE, atol=0)
            booster.backward(loss / 2, optimizer)
            (expected / 2).backward()
            check_gradients(model, reference)
            optimizer.zero_grad()
            reference.zero_grad()
            with torch.no_grad():
                outputs = model(**own)
            torch.testing.assert_close(outputs.loss, expected.detach(), rtol=RELATIVE, atol=0)
            assert outputs.logits.shape == (*own["input_ids"].shape, VOCABULARY)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_criterion_has_the_loss_and_gradients_of_one_process(workers: Workers, name: str) -> None:
    workers.run(LAYOUTS[name][0], f"{HERE}:trained", name, 5 if LAYOUTS[name][0] == 2 else 10)


def pipelined() -> None:
    """execute_pipeline, and a loop that gives the model's outputs to the criterion, are the same."""
    batch, reference = make_batch(5, "right"), make_model()
    expected = smoothed(reference(**batch), batch)
    expected.backward()
    booster, fresh = Booster(plugin=hybrid(pp_size=2, num_microbatches=2)), make_model()
    model, optimizer, criterion, *_ = booster.boost(
        fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), smoothed, dataloader=None
    )
    result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_outputs=True)
    torch.testing.assert_close(result["loss"], expected.detach(), rtol=RELATIVE, atol=0)
    expected_logits = make_model()(**batch).logits
    if model.module.mesh.rank == 0:
        torch.testing.assert_close(result["outputs"].logits.detach(), expected_logits.detach(), rtol=1e-4, atol=1e-4)
    check_gradients(model, reference)
    with pytest.raises(ShardcError, match="criterion: given Tensor"):
        criterion(torch.zeros(()), batch)


def test_execute_pipeline_takes_the_criterion_that_boost_returned(workers: Workers) -> None:
    workers.run(2, f"{HERE}:pipelined")


def gathered() -> None:
    """parallel_output=False: logits beside gradients, on every rank."""
    plugin, fresh = hybrid(tp_size=2, pp_size=2, num_microbatches=2, parallel_output=False), make_model()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    batch, reference = make_batch(5, "left"), make_model()
    outputs, expected = model(**batch), reference(**batch)
    torch.testing.assert_close(outputs.logits.detach(), expected.logits.detach(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ShardcError, match=r"boost\(criterion="):
        smoothed(outputs, batch).backward()
    booster.backward(outputs.loss, optimizer)
    expected.loss.backward()
    check_gradients(model, reference)


def test_parallel_output_false_gathers_the_logits_of_a_training_call(workers: Workers) -> None:
    workers.run(4, f"{HERE}:gathered")


def test_force_outputs_fp32_holds_inside_the_criterion_too() -> None:
    seen = []

    def criterion(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        seen.append((outputs.loss.dtype, outputs.logits.dtype))
        return outputs.loss

    for is_forced, expected in ((False, torch.bfloat16), (True, torch.float32)):
        booster = Booster(plugin=GeminiPlugin(precision="bf16", force_outputs_fp32=is_forced))
        model, *_ = booster.boost(make_model(), None, criterion)
        outputs = model(**make_batch(2, "none"))
        assert seen.pop() == (torch.float32, expected)
        assert (outputs.loss.dtype, outputs.logits.dtype) == (torch.float32, expected)


def random_after(model: BoostedModel, **inputs: Tensor) -> Tensor:
    torch.manual_seed(5)
    model(**inputs)
    return torch.rand(1)


def test_a_call_that_is_dropped_draws_what_its_forward_draws() -> None:
    """Backward inside the call draws nothing, so what comes after has the numbers that one process has there."""
    model = make_model(attention_dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = Booster(plugin=hybrid(num_microbatches=2)).boost(model, optimizer)
    boosted.train()
    batch = make_batch(4, "none")
    with torch.no_grad():
        drawn = random_after(boosted, **batch)
    torch.manual_seed(5)
    assert not torch.equal(drawn, torch.rand(1))  # dropout drew something
    assert torch.equal(random_after(boosted, **batch), drawn)
    boosted.gradient_checkpointing_enable()
    assert torch.equal(random_after(boosted, **batch), drawn)
