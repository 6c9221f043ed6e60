"""A shard map is a bijection between the full tensor and the shards, replicas aside."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.runtime import MeshAxis, ShardMap, shard_tensor, unshard_tensor

SUB_AXES = {2: None, 3: None, 4: {"kv": 2, "replica": 2}, 6: {"kv": 2, "replica": 3}}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ShardMap, MeshAxis, list[int]]:
    """A map of one to three segments of up to three factors, split over tp, its sub-axes or both."""
    size = draw(st.sampled_from(sorted(SUB_AXES)))
    tp = MeshAxis.abstract("tp", size, sub_axes=SUB_AXES[size])
    ways: list[list[str]] = [["tp"]]
    if tp.sub_axes:
        ways += [["tp.kv"], ["tp.kv", "tp.replica"]]
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        axes = draw(st.sampled_from(ways))
        sizes = draw(st.lists(st.integers(1, 7), min_size=len(axes), max_size=3))
        indices = draw(st.permutations(range(len(sizes))))[: len(axes)]
        segments.append({"sizes": sizes, "splits": [list(pair) for pair in zip(indices, axes, strict=True)]})
    dim = draw(st.integers(0, 2))
    shard_map = ShardMap.parse({"dim": dim, "segments": segments})
    shape = [2, 3, 2]
    shape[dim] = sum(torch.Size(segment.sizes).numel() for segment in shard_map.segments)
    return shard_map, tp, shape


@given(layouts())
def test_unshard_inverts_shard(layout: tuple[ShardMap, MeshAxis, list[int]]) -> None:
    shard_map, tp, shape = layout
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    shards = [shard_tensor(full, shard_map, tp.at(coord)) for coord in range(tp.size)]
    assert torch.equal(unshard_tensor(shards, shard_map, tp, shape), full)
    for coord, shard in enumerate(shards):
        assert shard_map.local_shape(shape, tp.at(coord)) == tuple(shard.shape)
        runs = [torch.arange(*run) for run in shard_map.runs(tp.at(coord))]
        assert torch.equal(torch.cat(runs), shard_map.indices(tp.at(coord)))


@given(layouts())
def test_each_element_is_on_as_many_ranks_as_there_are_replicas(layout: tuple[ShardMap, MeshAxis, list[int]]) -> None:
    shard_map, tp, shape = layout
    copies = torch.cat([shard_map.indices(tp.at(coord)) for coord in range(tp.size)]).bincount(minlength=shape[0])
    start = 0
    for segment in shard_map.segments:
        split = 1
        for _, axis in segment.splits:
            split *= tp.named(axis).size
        length = torch.Size(segment.sizes).numel()
        assert copies[start : start + length].eq(tp.size // split).all()
        start += length


def test_fused_qkv_with_two_kv_heads_at_tp_four() -> None:
    """q: 4 heads as (2 kv, 2 replica); k and v: 2 heads by kv only; head size 1."""
    segments = [
        {"sizes": [2, 2], "splits": [[0, "tp.kv"], [1, "tp.replica"]]},
        {"sizes": [2], "splits": [[0, "tp.kv"]]},
        {"sizes": [2], "splits": [[0, "tp.kv"]]},
    ]
    shard_map = ShardMap.parse({"dim": 0, "segments": segments})
    tp = MeshAxis.abstract("tp", 4, sub_axes={"kv": 2, "replica": 2})
    kept = [shard_map.indices(tp.at(coord)).tolist() for coord in range(4)]
    assert kept == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]


def test_unsharded_tensor_is_itself() -> None:
    full = torch.ones(2)
    tp = MeshAxis.abstract("tp", 2)
    assert shard_tensor(full, None, tp) is full
    assert unshard_tensor([full, full], None, tp, [2]) is full
