"""What each dp coord reads of a dataloader, and where it continues. A row is a number: input_ids hold it."""

from __future__ import annotations

import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as HFDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from transformers import BatchEncoding

from shardc import ShardcError
from shardc.booster.data import ShardedLoader, shard_dataloader
from shardc.booster.plugin import TorchDDPPlugin


class Rows(Dataset):
    """Row i is {"input_ids": [i], "labels": [i]}; reads holds every row that was read."""

    def __init__(self, num_rows: int):
        self.num_rows, self.reads = num_rows, []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads.append(index)
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([index])}


class Stream(IterableDataset):
    """The same rows as a stream, in order, or shuffled by the `random` module."""

    def __init__(self, num_rows: int, *, shuffled: bool = False):
        self.num_rows, self.shuffled = num_rows, shuffled

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = list(range(self.num_rows))
        if self.shuffled:
            random.shuffle(rows)
        for row in rows:
            yield {"input_ids": torch.tensor([row]), "labels": torch.tensor([row])}


class SizedBatches:
    """A batch sampler of the user's own: batches of unequal sizes, in an order drawn by numpy."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(self.num_rows).tolist()
        sizes = itertools.cycle((1, 3, 2))
        while order:
            size = next(sizes)
            batch, order = order[:size], order[size:]
            yield batch


def ids(batch: Any) -> list[int]:
    return batch["input_ids"].flatten().tolist()


def counted(batch: Any) -> list[int]:
    """The rows whose labels enter a loss."""
    return [label for label in batch["labels"].flatten().tolist() if label != -100]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain(*lists))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def own_generator(num_rows: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(Rows(num_rows), batch_size, shuffle=True, generator=generator(5), **options)


def weighted(num_rows: int, batch_size: int) -> DataLoader:
    weights = [1.0 + row for row in range(num_rows)]
    return DataLoader(Rows(num_rows), batch_size, sampler=WeightedRandomSampler(weights, 11, generator=generator(3)))


EXACT: dict[str, Callable[[int, int], Any]] = {
    "in order": lambda n, b: DataLoader(Rows(n), b),
    "drop_last": lambda n, b: DataLoader(Rows(n), b, drop_last=True),
    "shuffled by a generator": own_generator,
    "shuffled, drop_last": lambda n, b: own_generator(n, b, drop_last=True),
    "weighted, with replacement": weighted,
    "a batch sampler": lambda n, b: DataLoader(
        Rows(n), batch_sampler=BatchSampler(RandomSampler(Rows(n), generator=generator(2)), b, drop_last=False)
    ),
    "a batch sampler that drops": lambda n, b: DataLoader(
        Rows(n), batch_sampler=BatchSampler(range(n), b, drop_last=True)
    ),
    "a stream": lambda n, b: DataLoader(Stream(n), b),
    "a stream, drop_last": lambda n, b: DataLoader(Stream(n), b, drop_last=True),
    "a list of batches": lambda n, b: list(DataLoader(Rows(n), b)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_rows", [24, 25, 22, 3])
@pytest.mark.parametrize("kind", EXACT)
def test_the_batches_of_a_step_are_those_of_one_process(kind: str, num_rows: int, size: int) -> None:
    make = EXACT[kind]
    one_process = make(num_rows, 2 * size)
    loaders = [shard_dataloader(make(num_rows, 2), coord=coord, size=size) for coord in range(size)]
    for _ in range(2):
        steps = list(zip(*loaders, strict=True))
        assert [flat(map(counted, step)) for step in steps] == [ids(batch) for batch in one_process]
    if hasattr(one_process, "batch_size") and one_process.batch_size is not None and "stream" not in kind:
        assert [len(loader) for loader in loaders] == [len(one_process)] * size


@pytest.mark.parametrize("kind", ["in order", "a stream"])
def test_workers_read_the_same(kind: str) -> None:
    make = {
        "in order": lambda b, **options: DataLoader(Rows(11), b, **options),
        "a stream": lambda b, **options: DataLoader(Stream(11), b, **options),
    }[kind]
    loaders = [
        shard_dataloader(
            make(2, num_workers=1, persistent_workers=True, in_order=False, prefetch_factor=4), coord=c, size=2
        )
        for c in range(2)
    ]
    next(iter(loaders[0]))  # left; its workers persist
    loaders[0].load_state_dict(loaders[1].state_dict())
    for _ in range(2):
        steps = list(zip(*loaders, strict=True))
        assert [counted(a) + counted(b) for a, b in steps] == [ids(batch) for batch in DataLoader(Rows(11), 4)]


UNSEEDED: dict[str, Callable[[], Any]] = {
    "RandomSampler": lambda: DataLoader(Rows(12), 2, shuffle=True),
    "SubsetRandomSampler": lambda: DataLoader(Rows(12), 2, sampler=SubsetRandomSampler(range(12))),
    "a batch sampler that draws by numpy": lambda: DataLoader(Rows(12), batch_sampler=SizedBatches(12)),
    "a stream that draws by random": lambda: DataLoader(Stream(12, shuffled=True), 2),
    "no batching by the loader": lambda: DataLoader(Rows(12), None, shuffle=True),
}


def start_rank(rank: int) -> None:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def read(loader: Any, rank: int, epochs: int) -> list[list[list[int]]]:
    """Rows of each batch of each epoch, on a rank whose default generators are its own."""
    start_rank(rank)
    return [[ids(batch) for batch in loader] for _ in range(epochs)]


@pytest.mark.parametrize("kind", UNSEEDED)
def test_all_ranks_draw_one_order_and_another_each_epoch(kind: str) -> None:
    make = UNSEEDED[kind]
    loaders = [shard_dataloader(make(), coord=coord, size=2) for coord in (0, 1)]
    ranks = [read(loader, rank, 3) for rank, loader in enumerate(loaders)]
    epochs = [flat(a + b for a, b in zip(*epoch, strict=True)) for epoch in zip(*ranks, strict=True)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert read(shard_dataloader(make(), coord=1, size=2), 7, 3) == ranks[1]  # a tp or pp neighbour
    assert read(shard_dataloader(make(), coord=1, size=2, seed=3), 1, 3) != ranks[1]


def test_tp_and_pp_ranks_read_alike_without_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    ranks = [read(shard_dataloader(UNSEEDED["RandomSampler"](), coord=0, size=1), rank, 1) for rank in (0, 1)]
    assert ranks[0] == ranks[1]


def test_reading_leaves_the_default_generators_alone() -> None:
    start_rank(1)
    expected = (torch.rand(()).item(), random.random(), np.random.rand())
    start_rank(1)
    for _ in shard_dataloader(DataLoader(Rows(12), batch_sampler=SizedBatches(12)), coord=0, size=2):
        pass
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("kind", [*UNSEEDED, "shuffled by a generator"])
def test_one_process_reads_as_without_shardc(kind: str) -> None:
    make = UNSEEDED.get(kind, lambda: own_generator(12, 2))
    expected = read(make(), 4, 2)
    assert read(shard_dataloader(make(), coord=0, size=1), 4, 2) == expected


def noisy(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Collates as a language model's random masking does: from the default generators."""
    return {**default_collate(rows), "noise": torch.rand(3), "more": torch.tensor([random.random(), np.random.rand()])}


def noise(loader: Any, rank: int) -> list[tuple[float, ...]]:
    start_rank(rank)
    return [(*batch["noise"].tolist(), *batch["more"].tolist()) for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_collation_is_equal_within_a_replica_and_distinct_between(workers: int) -> None:
    def loader(coord: int) -> ShardedLoader:
        mine = DataLoader(Rows(8), 2, collate_fn=noisy, num_workers=workers)
        return shard_dataloader(mine, coord=coord, size=2)

    first, neighbour, other = noise(loader(0), 0), noise(loader(0), 1), noise(loader(1), 2)
    assert first == neighbour
    assert len({*first, *other}) == 4


def test_a_users_worker_init_runs_after_the_seeds() -> None:
    mine = DataLoader(Rows(8), 2, collate_fn=noisy, num_workers=1, worker_init_fn=fixed_seed)
    drawn = [noise(shard_dataloader(mine, coord=coord, size=2), coord) for coord in (0, 1)]
    assert drawn[0] == drawn[1]


def fixed_seed(worker: int) -> None:
    start_rank(99)


def test_a_rank_without_rows_reads_a_row_that_weighs_nothing() -> None:
    for make in (EXACT["in order"], EXACT["a stream"]):
        loaders = [shard_dataloader(make(9, 2), coord=coord, size=4) for coord in range(4)]
        last = [list(loader)[-1] for loader in loaders]
        assert [(ids(batch), counted(batch)) for batch in last] == [([8], [8]), ([8], []), ([8], []), ([8], [])]
        assert all(batch["labels"].dtype == torch.int64 for batch in last)


def test_the_filler_keeps_the_class_and_cuts_every_entry() -> None:
    batch = BatchEncoding(
        {"input_ids": torch.arange(6).view(3, 2), "labels": torch.ones(3, 2).long(), "names": [*"abc"]}
    )
    other = shard_dataloader([batch], coord=1, size=2)
    (filler,) = other
    assert type(filler) is BatchEncoding
    assert filler["names"] == ["a"] and filler["input_ids"].tolist() == [[0, 1]]
    assert filler["labels"].tolist() == [[-100, -100]]
    assert batch["labels"].tolist() == [[1, 1]] * 3


NO_LABELS = {
    "a pair": lambda rows: (default_collate(rows)["input_ids"], torch.zeros(len(rows))),
    "no labels": lambda rows: {"input_ids": default_collate(rows)["input_ids"]},
    "labels of a regression": lambda rows: {**default_collate(rows), "labels": torch.zeros(len(rows))},
}


@pytest.mark.parametrize("kind", NO_LABELS)
def test_batches_without_labels_are_repeated_with_one_warning(kind: str) -> None:
    loader = shard_dataloader(DataLoader(Rows(3), 3, collate_fn=NO_LABELS[kind]), coord=1, size=2)
    with pytest.warns(UserWarning) as caught:
        batches = [batch for _ in range(2) for batch in loader]
    assert len(batches) == 2
    assert [str(warning.message) for warning in caught] == [
        "dataloader: the last step has no rows for dp coord 1 of 2, and its batches have no integer `labels` that a "
        "loss ignores: rows are repeated, and count twice in this step (drop_last=True leaves the step out)"
    ]
    assert caught[0].filename == __file__


# --- loaders that are split already


@pytest.mark.parametrize("inside", [False, True], ids=["sampler", "sampler in a batch sampler"])
def test_a_loader_with_the_right_distributed_sampler_is_read_as_it_is(inside: bool) -> None:
    def make() -> DataLoader:
        rows = Rows(10)
        sampler = DistributedSampler(rows, num_replicas=2, rank=1, seed=4)
        batches = (
            {"batch_sampler": BatchSampler(sampler, 2, False)} if inside else {"batch_size": 2, "sampler": sampler}
        )
        return DataLoader(rows, **batches)

    loader, theirs = shard_dataloader(make(), coord=1, size=2), make()
    for epoch in range(2):
        for one in (loader, theirs):
            one.sampler.set_epoch(epoch) if not inside else one.batch_sampler.sampler.set_epoch(epoch)
        assert [ids(batch) for batch in loader] == [ids(batch) for batch in theirs]
    assert len(loader) == len(theirs) == 3


@pytest.mark.parametrize(("replicas", "rank"), [(4, 1), (2, 0), (1, 0)])
def test_a_distributed_sampler_for_other_ranks_is_refused(replicas: int, rank: int) -> None:
    rows = Rows(10)
    loader = DataLoader(rows, sampler=DistributedSampler(rows, num_replicas=replicas, rank=rank))
    with pytest.raises(ShardcError) as error:
        shard_dataloader(loader, coord=1, size=2)
    assert str(error.value) == (
        f"dataloader: its DistributedSampler has num_replicas={replicas}, rank={rank}; the data is split over dp only, "
        "which needs num_replicas=2, rank=1\n"
        "  give it these numbers (plugin.dp_size, plugin.dp_coord), use plugin.prepare_dataloader, or leave the "
        "splitting to boost"
    )


def test_a_stream_of_datasets_that_is_split_by_node_is_kept_or_refused() -> None:
    stream = HFDataset.from_dict({"input_ids": [[row] for row in range(8)]}).to_iterable_dataset(num_shards=2)
    loader = DataLoader(split_dataset_by_node(stream.with_format("torch"), rank=1, world_size=2), 2)
    expected = [ids(batch) for batch in loader]
    assert [ids(batch) for batch in shard_dataloader(loader, coord=1, size=2)] == expected
    with pytest.raises(
        ShardcError, match=r"its split_dataset_by_node has world_size=2, rank=1; .* world_size=4, rank=1"
    ):
        shard_dataloader(loader, coord=1, size=4)


def test_a_sharded_loader_is_kept_and_belongs_to_its_coord() -> None:
    loader = shard_dataloader(DataLoader(Rows(4)), coord=0, size=2)
    assert shard_dataloader(loader, coord=0, size=2) is loader
    with pytest.raises(ShardcError) as error:
        shard_dataloader(loader, coord=1, size=4)
    assert str(error.value) == (
        "dataloader: it was prepared for dp coord 0 of 2; this rank is dp coord 1 of 4\n"
        "  prepare it with the plugin that Booster was given"
    )


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(ShardcError) as error:
        shard_dataloader(torch.nn.CrossEntropyLoss(), coord=0, size=2)
    assert str(error.value) == (
        "dataloader: CrossEntropyLoss cannot be iterated; valid: a DataLoader, or an iterable of batches\n"
        "  boost takes (model, optimizer, criterion, dataloader, lr_scheduler), in this order"
    )


# --- what a script does with a loader


class Doubling(DataLoader):
    """A loader of the user's own class."""

    factor = 2

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {**batch, "input_ids": batch["input_ids"] * self.factor}

    def describe(self) -> str:
        return f"times {self.factor}"


def test_it_is_a_dataloader_with_the_attributes_and_the_class_of_the_users() -> None:
    mine = Doubling(Rows(6), 2, pin_memory=False)
    loader = shard_dataloader(mine, coord=1, size=2)
    assert isinstance(loader, DataLoader) and isinstance(loader, torch.utils.data.DataLoader)
    assert loader.dataset is mine.dataset and loader.sampler is mine.sampler
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (2, False, 0)
    assert loader.batch_sampler.batch_size == 2 and len(loader.batch_sampler) == len(loader) == 2
    assert loader.describe() == "times 2"
    assert [ids(batch) for batch in loader] == [[4, 6], [8]]
    assert list(loader.batch_sampler) == [[2, 3], [4]]
    loader.collate_fn = lambda rows: {"input_ids": torch.tensor([7]), "labels": torch.tensor([7])}
    assert [ids(batch) for batch in loader] == [[14], [14]]
    assert [ids(batch) for batch in mine] == [[0, 2], [4, 6], [8, 10]]  # theirs is as it was
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = loader.nothing_of_this_name


def test_a_loader_without_length_has_none() -> None:
    loader = shard_dataloader(DataLoader(Stream(4), 2), coord=0, size=2)
    with pytest.raises(TypeError):
        len(loader)
    endless = shard_dataloader(({"input_ids": torch.tensor([n])} for n in itertools.count()), coord=1, size=2)
    assert [ids(batch) for batch in itertools.islice(endless, 3)] == [[1], [3], [5]]
    empty = shard_dataloader(DataLoader(Rows(0), 2), coord=1, size=2)
    assert len(empty) == 0 and list(empty) == []


# --- resuming


def prepared(**options: Any) -> ShardedLoader:
    return TorchDDPPlugin().prepare_dataloader(Rows(23), 2, shuffle=True, **options)


RESUMED: dict[str, Callable[[], ShardedLoader]] = {
    **{
        f"{kind}, size {size}": lambda make=make, size=size: shard_dataloader(make(23, 2), coord=size - 1, size=size)
        for kind, make in EXACT.items()
        for size in (1, 2)
    },
    **{
        f"{kind}, size {size}": lambda make=make, size=size: shard_dataloader(make(), coord=size - 1, size=size)
        for kind, make in UNSEEDED.items()
        for size in (1, 2)
    },
    "prepared": prepared,
    "with a worker": lambda: shard_dataloader(own_generator(23, 2, num_workers=1), coord=1, size=2),
}


def follow(loader: Any, epochs: int) -> list[list[int]]:
    return [ids(batch) for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_continues_with_the_next_batch(kind: str) -> None:
    """Saved after 0, some or all batches of the second epoch; the generators of the process are restored as well."""
    start_rank(5)
    loader, states, rest = RESUMED[kind](), [], []
    list(loader)
    for batch in loader:
        states.append((saved(loader.state_dict()), torch.get_rng_state(), random.getstate(), np.random.get_state()))
        rest.append(ids(batch))
    states.append((saved(loader.state_dict()), torch.get_rng_state(), random.getstate(), np.random.get_state()))
    rest += follow(loader, 1)
    for position in (0, 1, len(states) - 2, len(states) - 1):
        state, torch_state, python_state, numpy_state = states[position]
        start_rank(6)
        again = RESUMED[kind]()
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        again.load_state_dict(state)
        assert saved(again.state_dict()) is not None
        within = position < len(states) - 1  # the last state belongs to the next epoch
        assert follow(again, 2 if within else 1) == rest[position + 1 if within else position :]


def saved(state: dict) -> dict:
    """Through a file, as a checkpoint does it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_rows_that_were_read_are_not_read_again() -> None:
    loader = shard_dataloader(own_generator(40, 2), coord=0, size=2)
    batches = iter(loader)
    before = [ids(next(batches)) for _ in range(7)]
    again = shard_dataloader(own_generator(40, 2), coord=0, size=2)
    again.load_state_dict(loader.state_dict())
    after = follow(again, 1)
    assert again.dataset.reads == flat(after)
    assert before + after == follow(shard_dataloader(own_generator(40, 2), coord=0, size=2), 1)


@pytest.mark.parametrize(
    ("old", "new"), [((2, 4), (4, 2)), ((1, 4), (2, 4)), ((2, 4), (1, 8)), ((3, 2), (1, 3))], ids=str
)
def test_other_sizes_continue_after_the_rows_that_were_read(old: tuple, new: tuple) -> None:
    """(dp size, batch size); what is left is read whole and once."""

    def loaders(size: int, batch_size: int) -> list[ShardedLoader]:
        return [
            shard_dataloader(DataLoader(Rows(50), batch_size, shuffle=True), coord=coord, size=size, seeded=True)
            for coord in range(size)
        ]

    before = loaders(*old)
    iterators = [iter(loader) for loader in before]
    read_rows = [row for _ in range(2) for iterator in iterators for row in ids(next(iterator))]
    states = [loader.state_dict() for loader in before]
    assert all(str(state) == str(states[0]) for state in states)
    after = loaders(*new)
    for loader in after:
        loader.load_state_dict(states[-1])
    assert sorted(read_rows + [row for step in zip(*after, strict=True) for b in step for row in counted(b)]) == [
        *range(50)
    ]
    whole = [row for step in zip(*loaders(*old), strict=True) for batch in step for row in counted(batch)]
    for loader in after:
        loader.load_state_dict(states[-1])
    assert read_rows + [row for step in zip(*after, strict=True) for b in step for row in counted(b)] == whole


def test_a_distributed_sampler_is_resumed_too() -> None:
    def make(size: int, coord: int, batch_size: int) -> ShardedLoader:
        rows = Rows(32)
        sampler = DistributedSampler(rows, num_replicas=size, rank=coord, seed=4)
        return shard_dataloader(DataLoader(rows, batch_size, sampler=sampler), coord=coord, size=size)

    loader, again = make(2, 1, 2), make(2, 1, 2)
    loader.sampler.set_epoch(3)
    expected = follow(loader, 1)[4:]
    state = saved(state_after(loader, 4))
    again.load_state_dict(state)
    assert again.sampler.epoch == 3
    assert follow(again, 1) == expected
    wider = [make(4, coord, 1) for coord in range(4)]
    for loader in wider:
        loader.load_state_dict(state)
    assert sorted(row for loader in wider for batch in loader for row in ids(batch)) == sorted(
        row for coord in range(2) for batch in resumed(make(2, coord, 2), state) for row in ids(batch)
    )


def resumed(loader: ShardedLoader, state: dict) -> ShardedLoader:
    loader.load_state_dict(state)
    return loader


def state_after(loader: ShardedLoader, steps: int) -> dict:
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    return loader.state_dict()


REFUSED_STATES = [
    (
        lambda: {"epoch": 1},
        "dataloader: the saved state has no position, batch_size, order, generators, sampler_epochs; it has ['epoch']\n"
        "  give load_state_dict what state_dict of the loader that boost returned gave",
    ),
    (
        lambda: state_after(shard_dataloader(DataLoader(Rows(30), 3), coord=0, size=1), 3),
        "dataloader: 3 batches of batch_size=3 were read in mid-epoch, which are no whole number of steps of "
        "batch_size=2 on 2 dp ranks\n"
        "  use a batch_size and a dp size whose product divides that of the saved run",
    ),
    (
        lambda: state_after(shard_dataloader(DataLoader(Rows(30), batch_sampler=SizedBatches(30)), coord=0, size=2), 1),
        "dataloader: batch_size=2, but it was None when the state was saved in mid-epoch\n"
        "  use the batch_size, or the batch_sampler, of the saved run",
    ),
    (
        lambda: state_after(shard_dataloader(own_generator(30, 2), coord=0, size=2), 1),
        "dataloader: its samplers hold 0 generators, those of the saved state 1\n"
        "  build the dataloader with the samplers and generators that it had when it was saved",
    ),
]


@pytest.mark.parametrize(("state", "message"), REFUSED_STATES, ids=[row[1].splitlines()[0] for row in REFUSED_STATES])
def test_a_state_that_does_not_fit_is_refused(state: Callable[[], dict], message: str) -> None:
    loader = shard_dataloader(DataLoader(Rows(30), 2), coord=0, size=2)
    with pytest.raises(ShardcError) as error:
        loader.load_state_dict(state())
    assert str(error.value) == message


def test_an_epoch_that_was_read_whole_fits_any_batch_size() -> None:
    state = state_after(shard_dataloader(DataLoader(Rows(10), 4), coord=0, size=1), 3)  # 12 rows, as it were
    loader = shard_dataloader(DataLoader(Rows(10), 5), coord=0, size=1)
    loader.load_state_dict(state)
    assert list(loader) == []
    assert follow(loader, 1) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_pass_that_is_left_is_followed_by_the_next_epoch() -> None:
    loader = shard_dataloader(DataLoader(Rows(12), 2, shuffle=True), coord=0, size=2)
    first = follow(loader, 1)
    second = follow(loader, 1)
    again = shard_dataloader(DataLoader(Rows(12), 2, shuffle=True), coord=0, size=2)
    old = iter(again)
    assert ids(next(old)) == first[0]
    new = iter(again)
    assert ids(next(new)) == second[0]
    assert [ids(batch) for batch in old] == first[1:]  # the older one reads on, and counts no more
    assert (again.state_dict()["epoch"], again.state_dict()["position"]) == (1, 2)


# --- plugin.prepare_dataloader


def test_prepared_loaders_honour_seed_epoch_and_drop_last() -> None:
    plain = TorchDDPPlugin().prepare_dataloader(Rows(7), 2)
    assert follow(plain, 1) == [[0, 1], [2, 3], [4, 5], [6]]
    first = follow(prepared(), 2)
    start_rank(8)
    assert follow(prepared(), 2) == first
    assert first[:12] != first[12:] and sorted(flat(first[:12])) == list(range(23))
    assert follow(prepared(seed=1), 2) != first
    assert len(prepared(drop_last=True)) == 11 and len(prepared()) == 12
    loader = prepared()
    loader.sampler.set_epoch(1)
    assert follow(loader, 1) == first[12:]
    loader.sampler.set_epoch(0)
    assert follow(loader, 2) == first
    assert shard_dataloader(loader, coord=0, size=1) is loader


def test_set_epoch_beside_a_loaded_state() -> None:
    whole = follow(prepared(), 2)
    state = state_after(prepared(), 5)
    loader = prepared()
    loader.load_state_dict(state)
    loader.sampler.set_epoch(0)  # the epoch that was left: continue in it
    assert follow(loader, 1) == whole[5:12]
    loader.load_state_dict(state)
    loader.sampler.set_epoch(1)  # another one: from its start
    assert follow(loader, 1) == whole[12:]


def test_prepared_with_a_sampler_class_and_streams() -> None:
    class Plain(DistributedSampler):
        def __init__(self, dataset, num_replicas, rank, shuffle):
            super().__init__(dataset, num_replicas, rank, shuffle, seed=9)

    plugin = TorchDDPPlugin()
    loader = plugin.prepare_dataloader(Rows(6), 2, shuffle=True, seed=5, distributed_sampler_cls=DistributedSampler)
    assert (type(loader.sampler), loader.sampler.seed, loader.sampler.num_replicas) == (DistributedSampler, 5, 1)
    assert plugin.prepare_dataloader(Rows(6), 2, distributed_sampler_cls=Plain).sampler.seed == 9
    assert follow(plugin.prepare_dataloader(Stream(3), 2), 1) == [[0, 1], [2]]
    own = plugin.prepare_dataloader(Rows(12), 2, shuffle=True, generator=generator(5))
    assert follow(own, 1) == follow(own_generator(12, 2), 1)


REFUSED_PREPARED = [
    ({"batch_size": 0}, "batch_size should be a positive integer value, but got batch_size=0"),
    ({"num_workers": -1}, "num_workers option should be non-negative; use num_workers=0 to disable multiprocessing."),
    ({"sampler": [1]}, "torch.utils.data.dataloader.DataLoader() got multiple values for keyword argument 'sampler'"),
    ({"dataset": Rows(0), "shuffle": True}, "num_samples should be a positive integer value, but got num_samples=0"),
    (
        {"dataset": Stream(2), "shuffle": True},
        "an IterableDataset has an order of its own, shuffle=True cannot change it",
    ),
    ({"dataset": 3, "shuffle": True}, "object of type 'int' has no len()"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_PREPARED, ids=[row[1] for row in REFUSED_PREPARED])
def test_what_a_dataloader_refuses_is_a_users_mistake(arguments: dict, message: str) -> None:
    with pytest.raises(ShardcError) as error:
        TorchDDPPlugin().prepare_dataloader(**{"dataset": Rows(4), "batch_size": 2, **arguments})
    assert str(error.value) == (
        f"TorchDDPPlugin.prepare_dataloader: {message}\n  its arguments are those of DataLoader"
    )


def test_reading_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in EXACT:
            list(shard_dataloader(EXACT[kind](9, 2), coord=1, size=2))
