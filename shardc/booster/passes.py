"""Where a loader stands: which pass over the data, how far, and from which random state it can be read again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardc.booster.data_random import State, Stream, from_plain, snapshot, to_plain
from shardc.booster.epoch_sampler import EpochSampler
from shardc.errors import ShardcError

KEYS = ("epoch", "position", "batch_size", "order", "generators", "sampler_epochs")


@dataclass(slots=True)
class Pass:
    """One pass over the data: `for batch in loader`.

    start: batches of all dp ranks that were read before it was resumed. steps: batches that this rank yielded since.
    order: what samplers, and datasets that read in a row, draw from. filler_at: the step, counted as steps, whose
    batch has no rows of this rank.
    """

    epoch: int
    start: int
    order: Stream
    order_start: State
    generators_start: list[torch.Tensor]
    steps: int = 0
    filler_at: int | None = None


class Passes:
    """Numbers the passes of a loader; its state is equal on all ranks, and independent of tp, pp and dp sizes.

    A pass that ends or is left (break) is followed by the next epoch. A state that is loaded continues its pass.
    """

    def __init__(self, *, seed: int, seeded: bool, size: int, samplers: Sequence[Any], generators: Sequence[Any]):
        """seeded: the order comes from (seed, epoch); otherwise from the default generators of this process, as
        torch has it. samplers, generators: those of the user's loader, whose state belongs to the loader's."""
        self.seed, self.seeded, self.size = seed, seeded, size
        self.samplers, self.generators = samplers, generators
        self.epoch = 0
        self.current: Pass | None = None
        self.loaded: dict[str, Any] | None = None

    def begin(self) -> Pass:
        """The pass that the next iterator reads."""
        if self.current is not None:
            self.epoch = self.current.epoch + 1
        told = [sampler.take_epoch() for sampler in self.samplers if isinstance(sampler, EpochSampler)]
        wanted = next((epoch for epoch in told if epoch is not None), self.epoch)
        loaded, self.loaded = self.loaded, None
        start = 0
        if loaded is not None and wanted == loaded["epoch"]:
            start, order = loaded["position"], Stream(from_plain(loaded["order"]))
        else:
            order = Stream.of(self.seed, wanted, "order") if self.seeded else Stream(None)
        self.epoch = wanted
        began = snapshot() if order.state is None else order.state
        self.current = Pass(wanted, start, order, began, [generator.get_state() for generator in self.generators])
        return self.current

    def end(self, reading: Pass) -> None:
        """The iterator of `reading` has no more batches."""
        if self.current is reading:  # otherwise a later iterator was made, and counts
            self.epoch, self.current = reading.epoch + 1, None

    def state_dict(self, batch_size: int | None) -> dict[str, Any]:
        """epoch; position, in batches of all dp ranks; and what the order is drawn from."""
        if self.loaded is not None:
            return copy.copy(self.loaded)
        reading = self.current
        state = {
            "epoch": self.epoch,
            "position": 0,
            "batch_size": batch_size,
            "order": None,  # drawn when the pass begins
            "generators": [generator.get_state() for generator in self.generators],
            "sampler_epochs": [sampler.epoch for sampler in self._with_epochs()],
        }
        if reading is not None:
            position = reading.start + reading.steps * self.size
            state |= {"position": position, "order": to_plain(reading.order_start)}
            state["generators"] = reading.generators_start
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator continues there. Raises ShardcError for a state of a loader that was built otherwise."""
        for name, mine in (("generators", self.generators), ("sampler_epochs", self._with_epochs())):
            if len(state[name]) != len(mine):
                raise ShardcError(
                    f"dataloader: its samplers hold {len(mine)} {name}, those of the saved state {len(state[name])}",
                    "build the dataloader with the samplers and generators that it had when it was saved",
                )
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved.cpu())
        for sampler, epoch in zip(self._with_epochs(), state["sampler_epochs"], strict=True):
            sampler.set_epoch(epoch)
        self.epoch, self.current = state["epoch"], None
        self.loaded = None if state["order"] is None else dict(state)

    def _with_epochs(self) -> list[Any]:
        """Samplers that the user counts epochs for, as torch's DistributedSampler."""
        return [s for s in self.samplers if hasattr(s, "set_epoch") and isinstance(getattr(s, "epoch", None), int)]
