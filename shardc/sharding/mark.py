"""From roles to shards: which factor of which parameter each axis splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd, prod

from torch import fx

from shardc.capture.graph import ModelGraph, op_name
from shardc.errors import ShardcError
from shardc.policy import Rule
from shardc.sharding.analyse import describe
from shardc.sharding.factors import Dims, Factor, contains, dim_of, leaves
from shardc.sharding.mesh import Mesh
from shardc.sharding.rules import rule_of


@dataclass(slots=True)
class Marks:
    """factors: axis -> the factors that it splits. named_by: factor -> the module whose role marked it."""

    mesh: Mesh
    factors: dict[str, list[Factor]] = field(default_factory=dict)
    named_by: dict[Factor, str] = field(default_factory=dict)

    def layout_factor(self, dims: Dims, axis: str) -> Factor | None:
        """The factor of a value that an axis splits, None where it has none."""
        return next((f for f in self.factors.get(axis, ()) if dim_of(dims, f) is not None), None)

    def all_factors(self) -> list[Factor]:
        return [factor for factors in self.factors.values() for factor in factors]

    def add(self, axis: str, factor: Factor, path: str) -> None:
        if factor not in self.factors[axis]:
            self.factors[axis].append(factor)
            self.named_by.setdefault(factor, path)


@dataclass(frozen=True, slots=True)
class _Output:
    """The output dim that a `column` or `vocab` splits: the leaves of each segment of it, outermost first."""

    path: str
    rule: Rule
    size: int
    segments: list[list[Factor]]

    def heads(self) -> Iterator[list[Factor]]:
        """What may be split of each segment; nothing of a vocabulary, which has no heads."""
        if self.rule.role != "vocab":
            yield from (_heads(segment) for segment in self.segments)


def mark(model: ModelGraph, roles: dict[str, Rule], parameters: dict[str, Dims], tp: int) -> Marks:
    """Choose what tp splits. `column` and `vocab` mark their output dim, `row` its input dim must then be marked.

    Raises ShardcError naming module, sizes and valid tp for a size that tp does not divide, two roles that do not fit
    (both `column`), and a `row` that nothing feeds.
    """
    if tp == 1:
        return Marks(Mesh({"tp": 1}), {"tp": []})
    named = _weights(model, roles)
    outputs = _outputs(model, named, parameters)
    kv = _kv_split(outputs, tp)
    mesh = Mesh({"tp": tp} if kv == tp else {"tp.kv": kv, "tp.replica": tp // kv})
    marks = Marks(mesh, {axis: [] for axis in mesh.axes})
    whole = [output for output in outputs if not _mark_output(marks, output, tp)]
    for output in outputs:
        _check_fused(marks, output, tp)
    splits = {
        path: _Split.of(marks, parameters[weight], _output_dim(model, path, rule)) for path, rule, weight in named
    }
    for path, rule, _ in named:
        _check_column(marks, path, rule, splits[path])
    for output in whole:
        if not _meets_shards(model, marks, roles, output.path):
            _refuse_whole(output)
    for path, rule, _ in named:
        _check_row(path, rule, splits[path])
        _check_replicate(marks, path, rule, splits[path])
    return marks


def _weights(model: ModelGraph, roles: dict[str, Rule]) -> list[tuple[str, Rule, str]]:
    """Module path, rule and canonical weight name of each module with a role that the graph holds."""
    canonical = {alias: p.name for p in model.parameters.values() for alias in (p.name, *p.aliases)}
    in_graph = {node.target for node in model.graph.nodes if node.op == "get_attr"}
    found = []
    for path, rule in sorted(roles.items()):
        name = canonical.get(f"{path}.weight")
        if name in in_graph:
            found.append((path, rule, name))
    return found


def _output_dim(model: ModelGraph, path: str, rule: Rule) -> int:
    return 1 if rule.role != "vocab" and model.module_classes[path].__name__ == "Conv1D" else 0


def _outputs(model: ModelGraph, named: list, parameters: dict[str, Dims]) -> list[_Output]:
    """What each `column` and `vocab` may split, but no factor inside one that another of them splits (a head dim)."""
    found = []
    for path, rule, weight in named:
        if rule.role in ("column", "vocab"):
            dim = parameters[weight][_output_dim(model, path, rule)]
            found.append(_Output(path, rule, _count(leaves(dim)), _candidates(dim)))
    outer = {segment[0] for output in found for segment in output.segments if segment}
    inner: set[Factor] = set()
    for _, _, weight in named:
        for dim in map(leaves, parameters[weight]):
            inner.update(leaf for i, leaf in enumerate(dim) if outer & set(dim[:i]))
    return [
        replace(output, segments=[[] if set(segment[:1]) & inner else segment for segment in output.segments])
        for output in found
    ]


def _candidates(dim: list[Factor]) -> list[list[Factor]]:
    """The leaves that may be split, outermost first; one list a segment of a fused dim."""
    found = leaves(dim)
    if len(found) == 1 and found[0].segments is not None and not found[0].whole:
        return [leaves(piece) for piece in found[0].segments]
    return [found]


def _heads(factors: list[Factor]) -> list[Factor]:
    """The leading leaves that may be split: KV heads and heads a KV head of an attention, never the head dim."""
    free = []
    for leaf in factors:
        if leaf.whole is not None or not isinstance(leaf.size, int):
            break
        free.append(leaf)
    return free[:-1] if len(free) == len(factors) > 1 else free


def _count(factors: list[Factor]) -> int:
    return prod(leaf.size for leaf in factors if isinstance(leaf.size, int))


# -- how many ways ---------------------------------------------------------------------------------------------------
def _kv_split(outputs: list[_Output], tp: int) -> int:
    """How many ways KV heads are split: tp, or fewer where there are fewer of them (the rest replicates them)."""
    split, shared = tp, set()
    for output in outputs:
        for free in output.heads():
            if len(free) > 1:
                if _count(free) % tp:
                    _refuse_heads(output, _count(free), free[0].size, tp)
                split = min(split, gcd(free[0].size, tp))
                shared.add(free[0])
    for output in outputs:
        for free, segment in zip(output.heads(), output.segments, strict=False):
            few = free and free[0] in shared and split < tp and free[0].size % split == 0
            if len(free) == 1 and free[0].size % tp and not few:
                _refuse_size(output, free[0].size, "heads" if len(segment) > 1 else "output features", tp)
    return split


def _mark_output(marks: Marks, output: _Output, tp: int) -> bool:
    """Mark the output of a `column` or `vocab`; False where some segment has no factor that may be split."""
    return all([_mark_segment(marks, output, segment, tp) for segment in output.segments])


def _mark_segment(marks: Marks, output: _Output, segment: list[Factor], tp: int) -> bool:
    is_vocab = output.rule.role == "vocab"
    free = segment[:1] if is_vocab else _heads(segment)
    if not free or free[0].whole is not None:
        return False
    axes = marks.mesh.axes
    if not is_vocab and len(axes) == 2 and (len(free) > 1 or free[0].size % tp):
        for axis, factor in zip(axes, free, strict=False):
            marks.add(axis, factor, output.path)
    else:
        for axis in axes:
            marks.add(axis, free[0], output.path)
    return True


def _meets_shards(model: ModelGraph, marks: Marks, roles: dict[str, Rule], path: str) -> bool:
    """Whether what a module makes joins values that other roles shard, as the only KV head joins query heads.

    Each rank then makes all of it, for its own part of the rest.
    """
    marked = marks.all_factors()
    todo = [node for node in model.operations() if node.meta["call"].path == path]
    seen = set(todo)
    while todo:
        for user in todo.pop().users:
            if user in seen or not _is_between_roles(user, roles):
                continue
            if "value" in user.meta and any(dim_of(user.meta["dims"], factor) is not None for factor in marked):
                return True
            seen.add(user)
            todo.append(user)
    return False


def _is_between_roles(node: fx.Node, roles: dict[str, Rule]) -> bool:
    return node.op == "call_function" and node.meta["call"].path not in roles


# -- what does not fit -----------------------------------------------------------------------------------------------
def _check_fused(marks: Marks, output: _Output, tp: int) -> None:
    """The segments of a fused weight are split over the same axes: its gradient is one tensor."""
    for factors in marks.factors.values():
        split = [any(leaf in factors for leaf in segment) for segment in output.segments]
        if any(split) and not all(split):
            heads = min(_count(free[:1]) for free in output.heads())
            raise ShardcError(
                f"{output.path}: tp={tp} does not divide the {heads} KV heads of a fused weight; "
                f"valid: {_divisors(heads)}",
                f"use one of these for --tp, or mark the module `replicate` ({output.rule.place})",
            )


@dataclass(frozen=True, slots=True)
class _Split:
    """Which marked factor splits the input and the output dim of a weight, and how many inputs it has."""

    input: Factor | None
    output: Factor | None
    input_size: int

    @classmethod
    def of(cls, marks: Marks, dims: Dims, output_dim: int) -> _Split:
        marked = marks.all_factors()
        split = [next((f for f in marked if contains(dim, f)), None) for dim in dims]
        if len(dims) == 1:
            return cls(None, split[0], 0)
        return cls(split[1 - output_dim], split[output_dim], _count(leaves(dims[1 - output_dim])))


def _check_column(marks: Marks, path: str, rule: Rule, split: _Split) -> None:
    if rule.role == "column" and split.input is not None:
        raise ShardcError(
            f"{path}: column, but its input is already sharded by {marks.named_by[split.input]}",
            f"mark it `row` ({rule.place}): a row takes the shards that a column gives",
        )


def _check_row(path: str, rule: Rule, split: _Split) -> None:
    if rule.role == "row" and split.input is None:
        raise ShardcError(
            f"{path}: row, but nothing shards its {split.input_size} input features",
            f"mark the module that feeds it `column`, or this one `replicate` ({rule.place})",
        )


def _check_replicate(marks: Marks, path: str, rule: Rule, split: _Split) -> None:
    factor = split.input or split.output
    if rule.role == "replicate" and factor is not None:
        raise ShardcError(
            f"{path}: replicate, but {marks.named_by[factor]} shards one of its dims",
            f"mark both `replicate`, or this one `column` or `row` ({rule.place})",
        )


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)


def _refuse_heads(output: _Output, heads: int, kv_heads: int, tp: int) -> None:
    raise ShardcError(
        f"{output.path}: tp={tp} does not divide {heads} query heads; valid: {_divisors(heads)} "
        f"(above {kv_heads}, the {kv_heads} KV heads are replicated)",
        f"use one of these for --tp, or mark the module `replicate` ({output.rule.place})",
    )


def _refuse_size(output: _Output, size: int, what: str, tp: int) -> None:
    raise ShardcError(
        f"{output.path}: tp={tp} does not divide {size} {what}; valid: {_divisors(size)}",
        f"use one of these for --tp, or mark the module `replicate` ({output.rule.place})",
    )


def _refuse_whole(output: _Output) -> None:
    needed_by = next((leaf.whole for segment in output.segments for leaf in segment if leaf.whole is not None), None)
    advice = f"mark the module `replicate` ({output.rule.place})"
    reason = ""
    if needed_by is not None:
        reason = f", which {describe(needed_by)} needs whole"
        if rule_of(needed_by) is None:
            reason += f": no rule says how {op_name(needed_by.target)} works on shards"
            advice = f"write a rule (CONTRIBUTING.md, An op rule), or {advice}"
    raise ShardcError(
        f"{output.path}: {output.rule.role} would split its {output.size} output features{reason}", advice
    )


# -- what roles do not name ------------------------------------------------------------------------------------------
def sharded_by_propagation(
    model: ModelGraph, marks: Marks, roles: dict[str, Rule], parameters: dict[str, Dims]
) -> list[str]:
    """Modules whose weight is split though no rule names them: reported, never silent."""
    marked = marks.all_factors()
    found = set()
    for name, dims in parameters.items():
        names = (name, *model.parameters[name].aliases)
        paths = [each.rpartition(".")[0] for each in names]
        if not any(path in roles for path in paths) and any(contains(d, f) for d in dims for f in marked):
            found.add(paths[0])
    return sorted(found)
