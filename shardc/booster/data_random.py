"""Randomness of data loading: streams apart from training's, equal on the ranks that read one order, and replayable.

Samplers and datasets draw from the default generators of torch (CPU), random and numpy, which differ between ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

State = tuple[torch.Tensor, tuple, tuple]


class Stream:
    """A stream of its own: inside `with stream:` the default generators draw from it, afterwards from theirs again.

    Stream(None) changes nothing. Entering it again while inside does nothing: a loader's iterator, made inside, may
    ask the sampler, which enters it too.
    """

    def __init__(self, state: State | None):
        self.state, self.outer, self.depth = state, None, 0

    @classmethod
    def of(cls, *key: Any) -> Stream:
        """The stream of a key, the same on every rank: Stream.of(seed, epoch)."""
        with draws_of(*key):
            return cls(snapshot())

    def __enter__(self) -> Stream:
        if self.state is not None and self.depth == 0:
            self.outer = snapshot()
            restore(self.state)
        self.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.state is not None and self.depth == 0:
            self.state = snapshot()
            restore(self.outer)


@contextmanager
def draws_of(*key: Any) -> Iterator[None]:
    """Inside, the default generators draw from the stream of a key, from its start."""
    outer = snapshot()
    seed_all(key_seed(*key))
    try:
        yield
    finally:
        restore(outer)


class WorkerSeeds:
    """worker_init_fn that gives the workers of each dp coord seeds of their own, those of coord 0 as torch made them.

    The loader's own seed is equal on all ranks, so that the ranks of one replica read alike."""

    def __init__(self, coord: int, then: Callable[[int], Any] | None):
        self.coord, self.then = coord, then

    def __call__(self, worker: int) -> None:
        if self.coord:
            seed_all(key_seed(get_worker_info().seed, self.coord))
        if self.then is not None:
            self.then(worker)


def snapshot() -> State:
    """The states of the default generators."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(state: State) -> None:
    """Set them to what snapshot returned."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def to_plain(state: State) -> dict[str, Any]:
    """A snapshot as a tensor, tuples, numbers and strings, which torch.load reads with weights_only."""
    name, keys, *rest = state[2]
    return {"torch": state[0], "random": state[1], "numpy": (name, tuple(keys.tolist()), *rest)}


def from_plain(plain: dict[str, Any]) -> State:
    """The snapshot that to_plain was given."""
    version, keys, gauss = plain["random"]
    name, numbers, *rest = plain["numpy"]
    return plain["torch"].cpu(), (version, tuple(keys), gauss), (name, np.array(numbers, dtype=np.uint32), *rest)


def key_seed(*key: Any) -> int:
    """A seed of 63 bits that tells keys apart."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the default generators; the GPU's is left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
