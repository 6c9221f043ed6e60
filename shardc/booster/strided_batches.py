"""Which batches of a map-style dataset one dp coord reads: chosen by their indices, before any data is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shardc.booster.data_random import Stream
from shardc.booster.passes import Pass


class StridedBatches:
    """The index batches of one coord: each stride-th of a batch sampler, or of a sampler whose entries are batches."""

    def __init__(self, batches: Iterable[Any], *, coord: int, stride: int, drop_last: bool, batched: bool):
        """batched: an entry is an iterable of indices."""
        self.batches, self.coord, self.stride = batches, coord, stride
        self.drop_last, self.batched = drop_last, batched
        self.current: tuple[Pass | None, int] = None, 0

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)  # batch_size, set_epoch and what else the user's has

    def __len__(self) -> int:
        return num_steps(len(self.batches), self.stride, self.drop_last)

    def prepare(self, reading: Pass | None, skip: int) -> None:
        """Iterators made from now on belong to `reading`, whose first `skip` entries were read before.

        DataLoader makes two where it has workers, and uses the second."""
        self.current = reading, skip

    def __iter__(self) -> Iterator[Any]:
        return self._chosen(*self.current)

    def _chosen(self, reading: Pass | None, skip: int) -> Iterator[Any]:
        """Reads a step ahead, so that all coords know whether it is complete; never the data."""
        order = Stream(None) if reading is None else reading.order
        with order:
            batches = iter(self.batches)
            skipped = sum(1 for _ in itertools.islice(batches, skip))
        for number in itertools.count():
            with order:
                step = list(itertools.islice(batches, self.stride)) if skipped == skip else []
            if not step or (len(step) < self.stride and self.drop_last):
                return
            if self.coord < len(step):
                yield step[self.coord]
                continue
            if reading is not None:
                reading.filler_at = number
            yield list(itertools.islice(step[0], 1)) if self.batched else step[0]


def install_strided_batches(loader: DataLoader, coord: int, stride: int) -> StridedBatches:
    """Put StridedBatches in the place of what a map-style loader takes its indices from."""
    batched = loader.batch_sampler is not None
    name = "batch_sampler" if batched else "sampler"
    theirs = getattr(loader, name)
    drop_last = bool(getattr(theirs, "drop_last", loader.drop_last))
    strided = StridedBatches(theirs, coord=coord, stride=stride, drop_last=drop_last, batched=batched)
    vars(loader)[name] = strided  # DataLoader refuses to set it, for loaders that are in use
    return strided


def num_steps(num_batches: int, size: int, drop_last: bool) -> int:
    """Steps of an epoch: each coord of `size` reads one batch in a step."""
    return num_batches // size if drop_last else -(-num_batches // size)
