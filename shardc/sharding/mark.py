"""From roles to shards: which factor of which parameter each axis splits."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from shardc.capture.graph import ModelGraph, op_name
from shardc.errors import ShardcError
from shardc.policy import Rule
from shardc.sharding.analyse import describe
from shardc.sharding.factors import Dims, Factor, contains, dim_of, leaves
from shardc.sharding.typing import Mesh


@dataclass(slots=True)
class Marks:
    """factors: axis -> the factors that it splits. named_by: factor -> the module whose role marked it."""

    mesh: Mesh
    factors: dict[str, list[Factor]] = field(default_factory=dict)
    named_by: dict[Factor, str] = field(default_factory=dict)

    def layout_factor(self, dims: Dims, axis: str) -> Factor | None:
        """The factor of a value that an axis splits, None where it has none."""
        return next((f for f in self.factors.get(axis, ()) if dim_of(dims, f) is not None), None)


def mark(model: ModelGraph, roles: dict[str, Rule], parameters: dict[str, Dims], tp: int) -> Marks:
    """Choose what tp splits. `column` and `vocab` mark their output dim, `row` its input dim must then be marked.

    Raises ShardcError naming module, sizes and valid tp for a size that tp does not divide, two roles that do not fit
    (both `column`), and a `row` that nothing feeds.
    """
    wanted: list[tuple[str, Rule, list[list[Factor]]]] = []
    for path, rule, weight in _weights(model, roles):
        if rule.role in ("column", "vocab"):
            dims = parameters[weight]
            wanted.append((path, rule, _candidates(dims[_output_dim(model, path, rule)])))
    if tp == 1:
        return Marks(Mesh({"tp": 1}))
    kv = _kv_split(model, wanted, parameters, tp)
    mesh = Mesh({"tp": tp} if kv == tp else {"tp.kv": kv, "tp.replica": tp // kv})
    marks = Marks(mesh, {axis: [] for axis in mesh.axes})
    impossible = []
    for path, rule, segments in wanted:
        for factors in segments:
            if not _mark_output(marks, path, rule, factors, tp) and not _is_lone_kv_head(model, path):
                impossible.append((path, rule, factors))
    for path, rule, weight in _weights(model, roles):
        _check_role(model, marks, path, rule, parameters[weight])
    for path, rule, factors in impossible:
        whole = factors[0].whole if factors else None
        raise ShardcError(
            f"{path}: {rule.role} would split its {factors[0].size if factors else 0} output features"
            + (f", which {describe(whole)} needs whole" if whole is not None else ""),
            f"mark the module `replicate` ({rule.place})",
        )
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


def _is_conv1d(model: ModelGraph, path: str) -> bool:
    return model.module_classes[path].__name__ == "Conv1D"


def _output_dim(model: ModelGraph, path: str, rule: Rule) -> int:
    return 1 if rule.role != "vocab" and _is_conv1d(model, path) else 0


def _candidates(dim: list[Factor]) -> list[list[Factor]]:
    """The leaves that may be split, outermost first; one list a segment of a fused dim."""
    found = leaves(dim)
    if len(found) == 1 and found[0].segments is not None and not found[0].whole:
        return [[leaf for leaf in leaves(piece)] for piece in found[0].segments]
    return [found]


def _heads(factors: list[Factor]) -> list[Factor]:
    """The leading leaves that may be split: (KV heads, heads a KV head) of an attention projection, never the head dim."""
    free = []
    for leaf in factors:
        if leaf.whole is not None or not isinstance(leaf.size, int):
            break
        free.append(leaf)
    return free[:-1] if len(free) == len(factors) > 1 else free


def _units(factors: list[Factor]) -> int:
    count = 1
    for leaf in factors:
        count *= leaf.size
    return count


def _kv_split(model: ModelGraph, wanted: list, parameters: dict[str, Dims], tp: int) -> int:
    """How many ways KV heads are split: tp, or fewer where there are fewer of them (the rest replicates them)."""
    split = tp
    for path, rule, segments in wanted:
        for factors in segments:
            free = _heads(factors)
            if rule.role == "vocab" or not free:
                continue
            units = _units(free)
            if len(free) > 1:
                if units % tp:
                    _refuse_heads(path, rule, units, free[0].size, tp)
                split = min(split, gcd(free[0].size, tp))
    for path, rule, segments in wanted:
        for factors in segments:
            free = _heads(factors)
            if rule.role == "vocab" or not free or len(free) > 1:
                continue
            if free[0].size % tp and not (split < tp and free[0].size % split == 0 and _is_shared_head(wanted, free[0])):
                _refuse(path, rule, free[0].size, len(factors), tp)
    return split


def _is_shared_head(wanted: list, factor: Factor) -> bool:
    """Whether a factor of KV heads is also the outer part of some query heads."""
    return any(len(free := _heads(factors)) > 1 and free[0] is factor for _, _, segments in wanted for factors in segments)


def _refuse_heads(path: str, rule: Rule, heads: int, kv_heads: int, tp: int) -> None:
    valid = [n for n in range(1, heads + 1) if heads % n == 0]
    raise ShardcError(
        f"{path}: tp={tp} does not divide {heads} query heads; valid: {', '.join(map(str, valid))} (above {kv_heads}, the {kv_heads} KV heads are replicated)",
        f"use one of these for --tp, or mark the module `replicate` ({rule.place})",
    )


def _refuse(path: str, rule: Rule, size: int, count: int, tp: int) -> None:
    what = "heads" if count > 1 else "output features"
    valid = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    raise ShardcError(
        f"{path}: tp={tp} does not divide {size} {what}; valid: {', '.join(map(str, valid))}",
        f"use one of these for --tp, or mark the module `replicate` ({rule.place})",
    )


def _mark_output(marks: Marks, path: str, rule: Rule, factors: list[Factor], tp: int) -> bool:
    """Mark the output of a `column` or `vocab`; False where no factor of it may be split."""
    free = factors[:1] if rule.role == "vocab" else _heads(factors)
    if not free or free[0].whole is not None:
        return False
    axes = marks.mesh.axes
    if rule.role != "vocab" and len(axes) == 2 and (len(free) > 1 or free[0].size % tp):
        _add(marks, axes[0], free[0], path)
        if len(free) > 1:
            _add(marks, axes[1], free[1], path)
    else:
        for axis in axes:
            _add(marks, axis, free[0], path)
    return True


def _is_lone_kv_head(model: ModelGraph, path: str) -> bool:
    """Whether a projection makes the only KV head of an attention: nothing to split, so every rank makes all of it."""
    todo = [node for node in model.operations() if node.meta["call"].path == path and op_name(node.target) == "linear"]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for user in node.users:
            name = op_name(user.target) if user.op == "call_function" else ""
            if name in ("scaled_dot_product_attention", "matmul"):
                keys = user.args[1:3] if name == "scaled_dot_product_attention" else user.args[:2]
                if any(k is node and node.meta["value"].shape[1] == 1 for k in keys) or op_name(node.target) == "reshape":
                    return True
            elif name not in ("linear", "") and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _add(marks: Marks, axis: str, factor: Factor, path: str) -> None:
    if factor not in marks.factors[axis]:
        marks.factors[axis].append(factor)
        marks.named_by.setdefault(factor, path)


def _check_role(model: ModelGraph, marks: Marks, path: str, rule: Rule, dims: Dims) -> None:
    out = _output_dim(model, path, rule)
    marked = {f for factors in marks.factors.values() for f in factors}
    where = rule.place
    split = [next((f for f in marked if contains(dim, f)), None) for dim in dims]
    into = split[1 - out] if len(dims) == 2 else None
    if rule.role == "column" and into is not None:
        raise ShardcError(
            f"{path}: column, but its input is already sharded by {marks.named_by[into]}",
            f"mark it `row` ({where}): a row takes the shards that a column gives",
        )
    if rule.role == "row" and into is None:
        raise ShardcError(
            f"{path}: row, but nothing shards its {_size(dims[1 - out])} input features",
            f"mark the module that feeds it `column`, or this one `replicate` ({where})",
        )
    if rule.role == "replicate" and any(f is not None for f in split):
        other = next(f for f in split if f is not None)
        raise ShardcError(
            f"{path}: replicate, but {marks.named_by[other]} shards one of its dims",
            f"mark both `replicate`, or this one `column` or `row` ({where})",
        )


def _size(dim: list[Factor]) -> int:
    return _units([leaf for leaf in leaves(dim) if isinstance(leaf.size, int)])


def sharded_by_propagation(model: ModelGraph, marks: Marks, roles: dict[str, Rule], parameters: dict[str, Dims]) -> list[str]:
    """Modules whose weight is split though no rule names them: reported, never silent."""
    marked = [f for factors in marks.factors.values() for f in factors]
    found = []
    for name, dims in parameters.items():
        path = name.rsplit(".", 1)[0]
        aliases = [a.rsplit(".", 1)[0] for a in model.parameters[name].aliases]
        if not any(p in roles for p in (path, *aliases)) and any(contains(d, f) for d in dims for f in marked):
            found.append(path)
    return sorted(set(found))

