"""Random streams for dropout: equal where a value is replicated, distinct where it is sharded.

The default generators are the only state. They start from a seed that the tp ranks of one (dp, pp) coordinate share
and that differs between coordinates. A sharded stream is forked from them: its seed is drawn from the default CPU
generator, equally on all ranks, then moved by the coord. So torch.utils.checkpoint, which restores the default
generators, replays the sharded masks too, and saving the default generators saves everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shardc.runtime.mesh import MeshAxis

# An odd stride gives distinct seeds modulo 2**32 too, which is all that the CPU's Mersenne twister takes from a seed.
_STRIDE = 0x9E3779B97F4A7C15
_SEEDS = 2**63


def seed_stream(seed: int, *, index: int) -> None:
    """Seed the default generators of this process for stream `index`; stream 0 is torch.manual_seed(seed) itself."""
    torch.manual_seed((seed + _STRIDE * index) % _SEEDS)


@contextmanager
def sharded_rng(axis: MeshAxis) -> Iterator[None]:
    """Inside, random ops draw from a stream that is distinct for each coord on `axis`.

    Advances the outer stream by one draw on every rank. Does nothing on an axis of size 1 or an abstract axis.
    """
    if axis.size == 1 or axis.group is None:
        yield
        return
    drawn = int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu"))
    outer = state_dict()
    torch.manual_seed((drawn + _STRIDE * (axis.coord + 1)) % _SEEDS)
    try:
        yield
    finally:
        load_state_dict(outer)


def state_dict() -> dict[str, Tensor]:
    """State of the default generators: "cpu" and, once CUDA is in use, the current "cuda" device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_state_dict(state: Mapping[str, Tensor]) -> None:
    """Restore what state_dict returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
