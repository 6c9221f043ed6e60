"""Shard maps: how plan.json says which elements of a parameter a rank keeps. See docs/architecture.md, section 2."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardc.errors import ShardcError
from shardc.sharding.factors import Dims, Factor, leaves
from shardc.sharding.layout import Layout
from shardc.sharding.mesh import Mesh


def shard_map_of(name: str, dims: Dims, layouts: dict[str, Layout], mesh: Mesh) -> dict | None:
    """The shard map of a parameter with these factors and layouts; None where every rank holds all of it."""
    split = {axis: layout.factor for axis, layout in layouts.items() if layout.letter == "S"}
    if not split:
        return None
    found = [
        (d, segments) for d, factors in enumerate(dims) if (segments := _segments(factors, split, mesh)) is not None
    ]
    if len(found) != 1:
        raise ShardcError(f"{name}: {len(found)} of its dims would be sharded", "mark its module `replicate`")
    dim, segments = found[0]
    return {"dim": dim, "segments": segments}


def _segments(factors: Sequence[Factor], split: dict[str, Factor], mesh: Mesh) -> list[dict] | None:
    found = leaves(factors)
    pieces = found[0].segments if len(found) == 1 and found[0].segments is not None else [found]
    segments = [_segment(leaves(piece), split, mesh) for piece in pieces]
    if not any(segment["splits"] for segment in segments):
        return None
    if not all(segment["splits"] for segment in segments):
        return None
    return segments


def _segment(piece: Sequence[Factor], split: dict[str, Factor], mesh: Mesh) -> dict:
    splits: list[list] = []
    for index, leaf in enumerate(piece):
        axes = tuple(axis for axis, factor in split.items() if factor is leaf)
        if axes:
            splits.append([index, mesh.name(axes)])
    return {"sizes": [leaf.size for leaf in piece], "splits": splits}


def factors_of_shard_map(dims: Dims, shard_map: dict | None, mesh: Mesh) -> dict[str, Factor]:
    """axis -> the factor that a shard map splits over it, for dims analysed anew. Raises ShardcError if none fits."""
    if shard_map is None:
        return {}
    found = leaves(dims[shard_map["dim"]])
    pieces = found[0].segments if len(found) == 1 and found[0].segments is not None else [found]
    if len(pieces) != len(shard_map["segments"]):
        raise ShardcError(
            f"a shard map has {len(shard_map['segments'])} segments where the dim has {len(pieces)}",
            "compile the plan again",
        )
    result: dict[str, Factor] = {}
    for number, (piece, segment) in enumerate(zip(pieces, shard_map["segments"], strict=True)):
        split = _split_of_segment(leaves(piece), segment, mesh)
        if number and split != result:
            raise ShardcError("the segments of a shard map are split along different factors", "compile the plan again")
        result = split
    return result


def _split_of_segment(piece: list[Factor], segment: dict, mesh: Mesh) -> dict[str, Factor]:
    result = {}
    for index, name in segment["splits"]:
        ranks = prod(mesh.sizes.get(axis, 1) for axis in mesh.atomic(name))
        factor = _leaf_at(piece, prod(segment["sizes"][:index]), segment["sizes"][index], ranks)
        if factor is None:
            raise ShardcError(
                f"a shard map splits {segment['sizes']} at {index}, which is no factor of the dim",
                "compile the plan again",
            )
        for axis in mesh.atomic(name):
            if result.setdefault(axis, factor) is not factor:
                raise ShardcError(f"a shard map splits a segment twice over {axis}", "compile the plan again")
    return result


def _leaf_at(piece: Sequence[Factor], outer: int, size: int, ranks: int) -> Factor | None:
    """The leaf with `outer` indices outside it; finer than the shard map's factor where it splits alike."""
    before = 1
    for leaf in piece:
        if before == outer and (leaf.size == size or (size % leaf.size == 0 and leaf.size % ranks == 0)):
            return leaf
        before *= leaf.size
    return None
