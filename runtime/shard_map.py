"""Which elements of a full tensor a rank holds.

Dim `dim` of the full tensor is the concatenation of segments. A segment is a mixed-radix product of sizes, outermost
first; for each (index, axis) in its splits, a rank keeps its part of that factor, and the kept pieces are
concatenated. A fused q|k|v is three segments; heads interleaved as (head, 3 * size) are one segment split at factor 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.mesh import MeshAxis


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a sharded dim: its factor sizes, and (factor index, axis name) for each split."""

    sizes: tuple[int, ...]
    splits: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The map of one parameter: a dim and its segments."""

    dim: int
    segments: tuple[Segment, ...]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> ShardMap:
        """From the form in plan.json. Raises KeyError on a missing field."""
        segments = []
        for segment in data["segments"]:
            splits = tuple((index, axis) for index, axis in segment["splits"])
            segments.append(Segment(tuple(segment["sizes"]), splits))
        return cls(data["dim"], tuple(segments))

    @property
    def axes(self) -> frozenset[str]:
        """Names of the axes that the tensor is sharded over."""
        return frozenset(axis for segment in self.segments for _, axis in segment.splits)

    def indices(self, tp: MeshAxis) -> Tensor:
        """(n,) int64: the indices along `dim` that the coord of `tp` keeps, in the order in which it holds them."""
        kept, start = [], 0
        for segment in self.segments:
            length = math.prod(segment.sizes)
            index = torch.arange(start, start + length, device="cpu").reshape(segment.sizes)
            for factor, name in segment.splits:
                begin, end = tp.named(name).bounds(segment.sizes[factor])
                index = index.narrow(factor, begin, end - begin)
            kept.append(index.flatten())
            start += length
        return torch.cat(kept)

    def runs(self, tp: MeshAxis) -> list[tuple[int, int]]:
        """The same indices as half-open ranges, for reading a file range by range."""
        index = self.indices(tp)
        if len(index) == 0:
            return [(0, 0)]
        breaks = ((index[1:] != index[:-1] + 1).nonzero().flatten() + 1).tolist()
        ends = [0, *breaks, len(index)]
        return [(int(index[a]), int(index[b - 1]) + 1) for a, b in itertools.pairwise(ends)]

    def local_shape(self, shape: Sequence[int], tp: MeshAxis) -> tuple[int, ...]:
        """Shape of this rank's shard of a tensor of `shape`."""
        local = list(shape)
        local[self.dim] = sum(end - start for start, end in self.runs(tp))
        return tuple(local)


def shard_tensor(full: Tensor, shard_map: ShardMap | None, tp: MeshAxis) -> Tensor:
    """The part of a full tensor that the coord of `tp` holds; the tensor itself where shard_map is None."""
    if shard_map is None:
        return full
    return full.index_select(shard_map.dim, shard_map.indices(tp).to(full.device))


def unshard_tensor(shards: Sequence[Tensor], shard_map: ShardMap | None, tp: MeshAxis, shape: Sequence[int]) -> Tensor:
    """The full tensor of `shape` from the shards of all coords of `tp`, in order of coord; inverse of shard_tensor."""
    if shard_map is None:
        return shards[0]
    full = shards[0].new_empty(tuple(shape))
    for coord, shard in enumerate(shards):
        full.index_copy_(shard_map.dim, shard_map.indices(tp.at(coord)).to(full.device), shard)
    return full
