"""The sampler of a prepared loader, whose set_epoch scripts for torch's DistributedSampler call."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler


class EpochSampler(Sampler[int]):
    """All indices of the dataset, in order or shuffled; the loader that uses it takes every size-th batch."""

    def __init__(self, dataset: Sized, *, shuffle: bool, generator: torch.Generator | None = None):
        """generator: of the shuffled order; None leaves it to the loader, which seeds each epoch."""
        self.sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
        self.next_epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Number of the epoch that the next `for batch in loader` reads; without it, they count from 0."""
        self.next_epoch = epoch

    def take_epoch(self) -> int | None:
        """The number that was set since the last call."""
        epoch, self.next_epoch = self.next_epoch, None
        return epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)
