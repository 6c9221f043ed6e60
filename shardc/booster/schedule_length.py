"""Whether a learning rate schedule was built for the length of the loader before it was divided over the ranks."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterator
from typing import Any

from shardc.errors import ShardcError

_LENGTHS = ("T_max", "total_steps", "total_iters")  # CosineAnnealingLR, OneCycleLR, LinearLR and its kind
_WSD = ("num_warmup_steps", "num_stable_steps", "num_decay_steps")  # transformers' get_wsd_schedule keeps only these


def check_schedule_length(lr_scheduler: Any, undivided: int, divided: int) -> None:
    """Raises ShardcError where a schedule's length is a number of epochs of the undivided loader.

    undivided, divided: batches of an epoch of the loader given to boost, and of this rank. Equal ones, as of a loader
    that plugin.prepare_dataloader made, refuse nothing. A schedule whose length cannot be seen passes."""
    if undivided == divided or undivided < 1:
        return
    for name, length in _lengths(lr_scheduler):
        # Where dp divides `undivided`, k epochs of it are k * dp epochs of the divided loader, and the number alone
        # cannot tell which was meant. It is refused all the same: `epochs * len(dataloader)` before boost is what
        # every script for one process says, and would silently train at the first 1/dp of the schedule; the other
        # meaning needs a number that knows dp, and then costs its author one error and one line.
        if length < 1 or length % undivided:
            continue
        epochs = int(length) // undivided
        raise ShardcError(
            f"lr_scheduler: {name}={int(length)} is {epochs} epoch(s) of the dataloader before it is divided "
            f"({undivided} batches); divided over the ranks an epoch has {divided} steps, so it should be "
            f"{epochs * divided}",
            f"build it for {epochs * divided} steps; if {int(length)} is meant, make the dataloader with "
            "plugin.prepare_dataloader, which is divided already, and never refused",
        )


def _lengths(scheduler: Any) -> Iterator[tuple[str, float]]:
    """Name and value of the lengths, in steps, that a scheduler was built for."""
    parts = getattr(scheduler, "_schedulers", None)  # of SequentialLR and ChainedScheduler
    if parts is not None:
        milestones = getattr(scheduler, "_milestones", None)
        if milestones:  # a warm-up, then a decay over what remains: only the sum is a number of epochs
            yield from ((f"{milestones[-1]} + {name}", milestones[-1] + n) for name, n in _lengths(parts[-1]))
        for part in parts:
            yield from _lengths(part)
        return
    for name in _LENGTHS:
        value = getattr(scheduler, name, None)
        if isinstance(value, numbers.Real):
            yield name, value
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, functools.partial):
            yield from _partial_lengths(function.keywords)


def _partial_lengths(keywords: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The same, of the keywords that transformers' get_scheduler binds."""
    if isinstance(keywords.get("num_training_steps"), numbers.Real):
        yield "num_training_steps", keywords["num_training_steps"]
    if all(isinstance(keywords.get(name), numbers.Real) for name in _WSD):
        yield " + ".join(_WSD), sum(keywords[name] for name in _WSD)
