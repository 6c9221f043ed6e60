"""A dataloader as one data-parallel rank reads it: every size-th batch of the user's own order."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from shardc.booster.data_random import WorkerSeeds, draws_of
from shardc.booster.filler import ignored_batch
from shardc.booster.passes import KEYS, Pass, Passes
from shardc.booster.schedule_length import check_schedule_length
from shardc.booster.strided_batches import install_strided_batches, num_steps
from shardc.errors import ShardcError

__all__ = ["ShardedLoader", "check_schedule_length", "shard_dataloader"]

_END = object()


def shard_dataloader(
    loader: Iterable[Any], *, coord: int, size: int, seed: int = 1024, seeded: bool | None = None
) -> ShardedLoader:
    """The batches coord, coord + size, coord + 2 * size ... of a loader, and the position in it.

    The batches of one step, over all coords, are what one process with batch_size * size reads. A coord without rows in
    the last step gets a row again whose labels are ignored; with drop_last, an incomplete step is left out. A loader
    that is split over `size` replicas already is read as it is. The user's loader is not changed, its samplers and
    generators are used.

    seed: of the order where the loader's samplers have no generator, another order each epoch, and of the random
    draws of datasets that are read in this process. seeded: False leaves both to this process's default generators,
    as torch has it; None does so in a job of one process.
    Raises ShardcError for what cannot be iterated, and for a loader that is split over another number of replicas.
    """
    assert 0 <= coord < size
    if isinstance(loader, ShardedLoader):
        loader.check_is_for(coord, size)
        return loader
    if not isinstance(loader, Iterable):
        raise ShardcError(
            f"dataloader: {type(loader).__name__} cannot be iterated; valid: a DataLoader, or an iterable of batches",
            "boost takes (model, optimizer, criterion, dataloader, lr_scheduler), in this order",
        )
    if seeded is None:  # ranks of one replica have streams of their own too, so size alone does not tell
        seeded = size > 1 or (dist.is_initialized() and dist.get_world_size() > 1)
    return ShardedLoader(
        loader, coord=coord, size=size, seed=seed, seeded=seeded, divided=_is_divided(loader, coord, size)
    )


class ShardedLoader(DataLoader):
    """A DataLoader of one dp coord, which knows its position. Attributes are those of the user's loader."""

    # In slots, because the dict is the wrapped loader's own.
    __slots__ = ("_coord", "_divided", "_inner", "_passes", "_size", "_strided", "_warned")

    def __init__(self, loader: Iterable[Any], *, coord: int, size: int, seed: int, seeded: bool, divided: bool):
        """divided: the loader reads this coord's batches already. Otherwise as shard_dataloader."""
        samplers, generators = _samplers(loader), _generators(loader)
        inner, strided = loader, None
        if isinstance(loader, DataLoader):
            inner = copy.copy(loader)  # of the user's class, which may change how it iterates
            vars(inner)["_iterator"] = None  # workers that persist read for the loader that started them
            inner.in_order = True  # ranks that share a batch must read the same one
            if not isinstance(loader.dataset, IterableDataset):
                strided = install_strided_batches(inner, *((0, 1) if divided else (coord, size)))
                if seeded:
                    inner.worker_init_fn = WorkerSeeds(coord, loader.worker_init_fn)
            self.__dict__ = vars(inner)  # what is set on this loader later, such as collate_fn, is used
        self._inner, self._strided = inner, strided
        self._coord, self._size, self._divided = coord, size, divided
        self._warned = False
        self._passes = Passes(seed=seed, seeded=seeded, size=size, samplers=samplers, generators=generators)

    def __getattr__(self, name: str) -> Any:
        if name in ShardedLoader.__slots__:  # not set yet: while it is made or copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        """Batches of this coord in one epoch. Raises TypeError where the user's loader has no length."""
        num_batches = len(self._inner)
        if self._strided is not None or self._divided:
            return num_batches
        return num_steps(num_batches, self._size, self._drops_last())

    def __iter__(self) -> Iterator[Any]:
        reading = self._passes.begin()
        skip = reading.start // self._size if self._divided else reading.start
        if self._strided is not None:
            self._strided.prepare(reading, skip)
        with reading.order:  # here DataLoader draws the seed of its workers
            batches = iter(self._inner)
        if self._strided is not None:
            return self._read_indexed(reading, batches)
        return self._read_in_a_row(reading, batches, skip)

    def _read_indexed(self, reading: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches whose indices were chosen by StridedBatches."""
        passes, first = self._passes, reading.start + self._coord
        in_process = passes.seeded and getattr(self, "num_workers", 0) == 0
        while True:
            # Each batch has draws of its own: equal on the ranks that share it, and again when a run is resumed.
            number = first + reading.steps * self._size
            with draws_of(passes.seed, reading.epoch, number) if in_process else nullcontext():
                batch = next(batches, _END)
            if batch is _END:
                break
            if reading.steps == reading.filler_at:
                batch = self._filler(batch)
            reading.steps += 1
            yield batch
        passes.end(reading)
        if self._strided.current[0] is reading:
            self._strided.prepare(None, 0)

    def _read_in_a_row(self, reading: Pass, batches: Iterator[Any], skip: int) -> Iterator[Any]:
        """Batches of a stream, which every coord reads whole."""
        stride, coord = (1, 0) if self._divided else (self._size, self._coord)
        with reading.order:
            skipped = sum(1 for _ in itertools.islice(batches, skip))
        while skipped == skip:
            with reading.order:
                step = list(itertools.islice(batches, stride))
            if not step or (len(step) < stride and self._drops_last()):
                break
            batch = step[coord] if coord < len(step) else self._filler(step[0])
            del step
            reading.steps += 1
            yield batch
        self._passes.end(reading)

    def _filler(self, batch: Any) -> Any:
        ignored = ignored_batch(batch)
        if ignored is not None:
            return ignored
        if self._warned:
            return batch
        self._warned = True
        warnings.warn(
            f"dataloader: the last step has no rows for dp coord {self._coord} of {self._size}, and its batches have "
            "no integer `labels` that a loss ignores: rows are repeated, and count twice in this step "
            "(drop_last=True leaves the step out)",
            stacklevel=3,
        )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position and random state, equal on all ranks; a batch counts as read when it was yielded.

        Randomness inside worker processes is not part of it."""
        return self._passes.state_dict(getattr(self, "batch_size", None))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator yields the batch that was next when the state was saved, in the same order.

        Other dp sizes and batch sizes are allowed where the rows that were read are a whole number of batches; ones of
        a map-style dataset are not read again. Raises ShardcError where they are not, or where it is no such state."""
        missing = [name for name in KEYS if name not in state]
        if missing:
            raise ShardcError(
                f"dataloader: the saved state has no {', '.join(missing)}; it has {sorted(state)}",
                "give load_state_dict what state_dict of the loader that boost returned gave",
            )
        self._passes.load_state_dict(
            {**state, "position": self._position(state), "batch_size": getattr(self, "batch_size", None)}
        )

    def _position(self, state: dict[str, Any]) -> int:
        """The saved position, in batches of this loader."""
        position, saved, mine = state["position"], state["batch_size"], getattr(self, "batch_size", None)
        step = self._size if self._divided else 1
        if saved == mine or not position:
            rows, unit = position, step
        elif saved is None or mine is None:
            raise ShardcError(
                f"dataloader: batch_size={mine!r}, but it was {saved!r} when the state was saved in mid-epoch",
                "use the batch_size, or the batch_sampler, of the saved run",
            )
        else:
            rows, unit = position * saved, step * mine
        if rows % unit and position * (saved or 0) < self._rows_of_epoch():  # otherwise all were read
            raise ShardcError(
                f"dataloader: {position} batches of batch_size={saved} were read in mid-epoch, which are no whole "
                f"number of steps of batch_size={mine} on {self._size} dp ranks",
                "use a batch_size and a dp size whose product divides that of the saved run",
            )
        return -(-rows // unit) * step

    def _rows_of_epoch(self) -> float:
        try:
            return len(getattr(self, "sampler", None)) * (self._size if self._divided else 1)
        except TypeError:  # a stream has no length
            return float("inf")

    def check_is_for(self, coord: int, size: int) -> None:
        """Raises ShardcError where the loader was made for other ranks."""
        if (coord, size) != (self._coord, self._size):
            raise ShardcError(
                f"dataloader: it was prepared for dp coord {self._coord} of {self._size}; "
                f"this rank is dp coord {coord} of {size}",
                "prepare it with the plugin that Booster was given",
            )

    def _drops_last(self) -> bool:
        return bool(getattr(self, "drop_last", False))


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a loader, and those inside them."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        owner = waiting.pop(0)
        for sampler in (getattr(owner, "batch_sampler", None), getattr(owner, "sampler", None)):
            if sampler is not None and not any(sampler is known for known in found):
                found.append(sampler)
                waiting.append(sampler)
    return found


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that the user gave to a loader or to its samplers."""
    owners = (loader, *_samplers(loader))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(found): found for found in generators if isinstance(found, torch.Generator)}.values())


def _is_divided(loader: Any, coord: int, size: int) -> bool:
    """Whether a loader reads one replica's part already. Raises ShardcError where it is not this coord's of size."""
    parts = [
        (type(sampler).__name__, "num_replicas", sampler.num_replicas, sampler.rank)
        for sampler in _samplers(loader)
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
    ]
    node = getattr(getattr(loader, "dataset", None), "_distributed", None)  # datasets' split_dataset_by_node
    if hasattr(node, "world_size") and hasattr(node, "rank"):
        parts.append(("split_dataset_by_node", "world_size", node.world_size, node.rank))
    for name, count_name, count, rank in parts:
        if (count, rank) != (size, coord):
            raise ShardcError(
                f"dataloader: its {name} has {count_name}={count}, rank={rank}; the data is split over dp only, "
                f"which needs {count_name}={size}, rank={coord}",
                "give it these numbers (plugin.dp_size, plugin.dp_coord), use plugin.prepare_dataloader, or leave "
                "the splitting to boost",
            )
    return bool(parts)
