"""A schedule that was built for the loader before it was divided: 12 batches, of which each of 4 ranks reads 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules
from torch.utils.data import DataLoader
from transformers import get_scheduler
from transformers.optimization import get_wsd_schedule

from shardc import ShardcError
from shardc.booster.data import check_schedule_length
from shardc.booster.plugin import TorchDDPPlugin

Make = Callable[[torch.optim.Optimizer, int], Any]

KINDS: dict[str, tuple[Make, str]] = {
    "linear of transformers": (lambda o, n: get_scheduler("linear", o, 2, n), "num_training_steps=24"),
    "cosine of transformers": (lambda o, n: get_scheduler("cosine", o, 2, n), "num_training_steps=24"),
    "warm-up, stable, decay of transformers": (
        lambda o, n: get_wsd_schedule(o, 3, 4, num_training_steps=n),
        "num_warmup_steps + num_stable_steps + num_decay_steps=24",
    ),
    "CosineAnnealingLR": (lambda o, n: torch_schedules.CosineAnnealingLR(o, n), "T_max=24"),
    "OneCycleLR": (lambda o, n: torch_schedules.OneCycleLR(o, 0.1, total_steps=n), "total_steps=24"),
    "OneCycleLR of epochs": (
        lambda o, n: torch_schedules.OneCycleLR(o, 0.1, epochs=2, steps_per_epoch=n // 2),
        "total_steps=24",
    ),
    "PolynomialLR": (lambda o, n: torch_schedules.PolynomialLR(o, n), "total_iters=24"),
    "a warm-up, then what remains": (
        lambda o, n: torch_schedules.SequentialLR(
            o,
            [torch_schedules.LinearLR(o, total_iters=5), torch_schedules.CosineAnnealingLR(o, n - 5)],
            milestones=[5],
        ),
        "5 + T_max=24",
    ),
    "a warm-up, then all": (
        lambda o, n: torch_schedules.SequentialLR(
            o, [torch_schedules.LinearLR(o, total_iters=5), torch_schedules.CosineAnnealingLR(o, n)], milestones=[5]
        ),
        "T_max=24",
    ),
    "ChainedScheduler": (
        lambda o, n: torch_schedules.ChainedScheduler(
            [torch_schedules.ConstantLR(o, total_iters=7), torch_schedules.PolynomialLR(o, n)]
        ),
        "total_iters=24",
    ),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_of_undivided_epochs_is_refused_with_the_right_number(kind: str) -> None:
    make, found = KINDS[kind]
    with pytest.raises(ShardcError) as error:
        check_schedule_length(make(optimizer(), 24), 12, 3)
    assert str(error.value) == (
        f"lr_scheduler: {found} is 2 epoch(s) of the dataloader before it is divided (12 batches); divided over the "
        "ranks an epoch has 3 steps, so it should be 6\n"
        "  build it for 6 steps; if 24 is meant, make the dataloader with plugin.prepare_dataloader, which is divided "
        "already, and never refused"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "undivided", "divided"), [(20, 12, 3), (24, 3, 3), (24, 0, 0)])
def test_other_lengths_pass(kind: str, steps: int, undivided: int, divided: int) -> None:
    check_schedule_length(KINDS[kind][0](optimizer(), steps), undivided, divided)


UNSEEN: dict[str, Make] = {
    "none": lambda o, n: None,
    "constant with warm-up": lambda o, n: get_scheduler("constant_with_warmup", o, n),
    "a function of the user's": lambda o, n: torch_schedules.LambdaLR(o, lambda step: 1 - step / n),
    "StepLR": lambda o, n: torch_schedules.StepLR(o, n),
    "ReduceLROnPlateau": lambda o, n: torch_schedules.ReduceLROnPlateau(o),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_schedule_without_a_length_passes(kind: str) -> None:
    check_schedule_length(UNSEEN[kind](optimizer(), 24), 12, 3)


def test_a_prepared_loader_has_one_length() -> None:
    loader = TorchDDPPlugin().prepare_dataloader(list(range(24)), 2)
    assert isinstance(loader, DataLoader)
    check_schedule_length(KINDS["CosineAnnealingLR"][0](optimizer(), 24), len(loader), len(loader))
