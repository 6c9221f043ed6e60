"""Factors: what the elements of a dim count, so that a head split out of `q_proj` is known again in attention.

Each dim of a value is a list of factors, outermost first: `view` to (B, S, 8, 128) turns one factor of 1024 into
8 * 128. A dim that is put together or taken apart by `cat`, `split` or slices is a factor with *segments*
(`q | k | v`). Operations unify factors of their operands; no layout is involved here, only shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.capture.symbols import Dim, Size

Dims = list["Factors"]
Factors = list["Factor"]


@dataclass(eq=False, slots=True)
class Factor:
    """`size` indices. Refined by `parts` (a product, outermost first) or `segments` (a sum), or equal to `same`.

    whole: an operation that needs all indices on one rank, None without any. Each such operation lists the factors
    that it needs in `meta["whole"]`: elsewhere they may still be sharded, as the sequence is between attentions.
    """

    size: Dim
    same: Factor | None = None
    parts: Factors | None = None
    segments: list[Factors] | None = None
    whole: fx.Node | None = None

    def root(self) -> Factor:
        factor = self
        while factor.same is not None:
            factor = factor.same
        return factor

    def __repr__(self) -> str:
        return f"<{self.root().size}>"


def leaves(factors: Sequence[Factor]) -> Factors:
    """The finest known factors, each at its root; a segmented factor is a leaf."""
    found: Factors = []
    for factor in factors:
        factor = factor.root()
        found += leaves(factor.parts) if factor.parts is not None else [factor]
    return found


def new_dim(size: Dim) -> Factors:
    """A dim of its own; a dim of one element has no factor."""
    return [] if size == 1 else [Factor(size)]


def new_dims(shape: Sequence[Dim]) -> Dims:
    return [new_dim(size) for size in shape]


def contains(factors: Sequence[Factor], wanted: Factor) -> bool:
    """Whether `wanted` is among the leaves, or among those of a segment."""
    return any(
        leaf is wanted or (leaf.segments is not None and any(contains(segment, wanted) for segment in leaf.segments))
        for leaf in leaves(factors)
    )


def splits(factors: Sequence[Factor], wanted: Factor) -> bool:
    """Whether a dim is sharded where `wanted` is: it is among the leaves, or in every segment of one of them."""
    return any(
        leaf is wanted or (leaf.segments is not None and all(splits(segment, wanted) for segment in leaf.segments))
        for leaf in leaves(factors)
    )


def dim_of(dims: Dims, wanted: Factor) -> int | None:
    """The dim that is sharded where `wanted` is, None where the value has none."""
    return next((d for d, factors in enumerate(dims) if splits(factors, wanted)), None)


def times(dims: Dims, wanted: Factor) -> int:
    """How often a factor occurs; alternatives in segments count once."""
    return sum(_times(factors, wanted) for factors in dims)


def _times(factors: Sequence[Factor], wanted: Factor) -> int:
    total = 0
    for leaf in leaves(factors):
        if leaf is wanted:
            total += 1
        elif leaf.segments is not None:
            total += max((_times(segment, wanted) for segment in leaf.segments), default=0)
    return total


def is_whole_dim(factors: Sequence[Factor], wanted: Factor) -> bool:
    """Whether a dim is this factor and nothing else, so that it can be gathered or scattered as a dim."""
    return leaves(factors) == [wanted]


def require_whole(factors: Sequence[Factor], by: fx.Node) -> None:
    """Note that an operation needs every index of these factors on one rank."""
    by.meta.setdefault("whole", []).extend(leaves(factors))
    _mark_whole(factors, by)


def _mark_whole(factors: Sequence[Factor], by: fx.Node) -> None:
    for leaf in leaves(factors):
        leaf.whole = leaf.whole or by
        for piece in leaf.segments or ():
            _mark_whole(piece, by)


# -- arithmetic of sizes ---------------------------------------------------------------------------------------------
def product(sizes: Sequence[Dim]) -> Dim | None:
    """Product of sizes; None where an offset makes it no monomial."""
    coefficient, batch, seq = 1, 0, 0
    for size in sizes:
        if isinstance(size, int):
            coefficient *= size
        elif isinstance(size, Size) and not size.offset:
            coefficient, batch, seq = coefficient * size.coefficient, batch + size.batch, seq + size.seq
        else:
            return size if len(sizes) == 1 else None
    return Size(coefficient, batch, seq) if batch or seq else coefficient


def quotient(size: Dim, by: Dim) -> Dim | None:
    """`size / by` where it is a size of its own, else None."""
    if size == by:
        return 1
    over = Size(by, 0, 0) if isinstance(by, int) else by
    under = Size(size, 0, 0) if isinstance(size, int) else size
    if not isinstance(over, Size) or not isinstance(under, Size) or over.offset or under.offset or not over.coefficient:
        return None
    coefficient, rest = divmod(under.coefficient, over.coefficient)
    batch, seq = under.batch - over.batch, under.seq - over.seq
    if rest or batch < 0 or seq < 0:
        return None
    return Size(coefficient, batch, seq) if batch or seq else coefficient


# -- relations -------------------------------------------------------------------------------------------------------
def _link(keep: Factor, drop: Factor, by: fx.Node) -> None:
    drop.same = keep
    keep.whole = keep.whole or drop.whole
    if keep.segments is None:
        keep.segments = drop.segments
    elif drop.segments is not None:
        _unify_segments(keep, drop, by)
    if keep.parts is None and drop.parts is not None:
        keep.parts = drop.parts
    if keep.whole:
        _mark_whole([keep], keep.whole)


def _unify_segments(keep: Factor, drop: Factor, by: fx.Node) -> None:
    sizes = [[product([f.size for f in leaves(s)]) for s in factor.segments] for factor in (keep, drop)]
    if sizes[0] != sizes[1]:
        _give_up([keep], [drop], by)
        return
    for mine, other in zip(keep.segments, drop.segments, strict=True):
        unify(mine, other, by)


def _give_up(a: Sequence[Factor], b: Sequence[Factor], by: fx.Node) -> None:
    """Factors that cannot be related are not sharded here: always right, never fast."""
    require_whole(a, by)
    require_whole(b, by)


def _split(factor: Factor, outer: Dim, inner: Dim) -> Factors | None:
    """Refine a leaf into outer * inner; None where its segments forbid it."""
    if factor.segments is not None:
        return None
    factor.parts = [Factor(outer, whole=factor.whole), Factor(inner, whole=factor.whole)]
    return factor.parts


def unify(a: Sequence[Factor], b: Sequence[Factor], by: fx.Node) -> None:
    """State that two dims of equal size count the same things; refines both until their leaves agree."""
    left, right = leaves(a), leaves(b)
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x is y:
            continue
        if x.size == y.size:
            _link(x, y, by)
        elif (rest := quotient(x.size, y.size)) is not None and (parts := _split(x, y.size, rest)):
            _link(parts[0], y, by)
            left.insert(0, parts[1])
        elif (rest := quotient(y.size, x.size)) is not None and (parts := _split(y, x.size, rest)):
            _link(parts[0], x, by)
            right.insert(0, parts[1])
        else:
            _give_up([x, *left], [y, *right], by)
            return
        left, right = leaves(left), leaves(right)


def regroup(dims: Dims, shape: Sequence[Dim], by: fx.Node) -> Dims:
    """The dims of a `view` of a value to `shape`: its factors, grouped anew, split where the shape splits them."""
    todo = leaves([factor for factors in dims for factor in factors])
    grouped: Dims = []
    for size in shape:
        group: Factors = []
        rest: Dim = size
        while rest != 1:
            leaf = todo.pop(0) if todo else None
            if leaf is not None and (q := quotient(rest, leaf.size)) is not None:
                group.append(leaf)
                rest = q
            elif leaf is not None and (q := quotient(leaf.size, rest)) is not None and (parts := _split(leaf, rest, q)):
                group.append(parts[0])
                todo.insert(0, parts[1])
                rest = 1
            else:
                require_whole([f for factors in dims for f in factors], by)
                return new_dims_whole(shape, by)
        grouped.append(group)
    return grouped


def new_dims_whole(shape: Sequence[Dim], by: fx.Node) -> Dims:
    """Dims without relation to anything, which must not be sharded."""
    dims = new_dims(shape)
    for factors in dims:
        require_whole(factors, by)
    return dims


def segment(factors: Sequence[Factor], sizes: Sequence[int], by: fx.Node) -> list[Factors]:
    """Take a dim apart into consecutive pieces of these sizes; returns the factors of each piece."""
    found = leaves(factors)
    if len(found) != 1 or not all(isinstance(s, int) for s in sizes):
        require_whole(found, by)
        return [new_dims_whole([size], by)[0] for size in sizes]
    leaf = found[0]
    if leaf.segments is None:
        leaf.segments = [new_dim(size) for size in sizes]
        if leaf.whole:
            _mark_whole([leaf], leaf.whole)
        return leaf.segments
    have = [product([f.size for f in leaves(s)]) for s in leaf.segments]
    if have == list(sizes):
        return leaf.segments
    refined = _refine(leaf, have, list(sizes))
    if refined is None:
        require_whole([leaf], by)
        return [new_dims_whole([size], by)[0] for size in sizes]
    return refined


def _refine(leaf: Factor, have: list[Dim], sizes: list[int]) -> list[Factors] | None:
    """Cut segments further so that both segmentations line up: [q, rest] and then [q + k, v] become [q, k, v]."""

    def edges(lengths: list[int]) -> list[int]:
        total, found = 0, []
        for length in lengths:
            total += length
            found.append(total)
        return found

    if sum(have) != sum(sizes):
        return None
    new_segments: list[Factors] = []
    start = 0
    pieces = sorted({*edges(have), *edges(sizes)})
    for old, end in zip(leaf.segments, edges(have), strict=True):
        inner = [p for p in pieces if start < p <= end]
        if len(inner) > 1:
            lengths = [b - a for a, b in zip([start, *inner], inner, strict=False)]
            kept = leaves(old)
            if len(kept) != 1 or kept[0].segments is not None:
                return None
            kept[0].segments = [new_dim(length) for length in lengths]
            if kept[0].whole:
                _mark_whole(kept, kept[0].whole)
            new_segments += kept[0].segments
        else:
            new_segments.append(old)
        start = end
    leaf.segments = new_segments
    result: list[Factors] = []
    start = 0
    bounds = edges([product([f.size for f in leaves(s)]) for s in new_segments])
    for end in edges(sizes):
        inside = [s for s, b in zip(new_segments, bounds, strict=True) if start < b <= end]
        result.append(inside[0] if len(inside) == 1 else [Factor(end - start, segments=inside)])
        start = end
    return result


def join(pieces: Sequence[Sequence[Factor]], size: Dim) -> Factors:
    """The dim that `cat` makes of pieces."""
    return [Factor(size, segments=[list(piece) for piece in pieces])]


def all_leaves(dims: Dims) -> Iterator[Factor]:
    """Every leaf of a value, those inside segments too."""
    for factors in dims:
        for leaf in leaves(factors):
            yield leaf
            for part in leaf.segments or ():
                yield from all_leaves([part])
