"""Values that Python reads while a model runs on meta tensors: computed on the CPU where sizes alone decide them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardc.capture.memo import fill
from shardc.capture.rows import Row

HOST_READS = frozenset({
    "__bool__", "item", "tolist", "__int__", "__float__", "__index__", "numpy", "__array__", "equal", "allclose",
    "is_nonzero", "__contains__",
})  # fmt: skip


def origins(row: Row) -> set[Row]:
    """All rows that a row is computed from, itself included."""
    seen: set[Row] = set()
    todo = [row]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(current.operands)
    return seen


def evaluate(rows: Iterable[Row], wanted: set[Row], row: Row) -> tuple[torch.Tensor, frozenset[int | float]]:
    """The real value of a row that depends on sizes alone, and the numbers that stand in its computation."""
    values: dict[Row, Any] = {}
    literals: set[int | float] = set()

    def on_cpu(item: Any) -> Any:
        if isinstance(item, torch.device) or item == "meta":
            return torch.device("cpu")
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            literals.add(item)
        if isinstance(item, (tuple, list)):
            return type(item)([on_cpu(x) for x in item])
        if isinstance(item, dict):
            return {key: on_cpu(x) for key, x in item.items()}
        return item

    for current in rows:
        if current in wanted:
            args, kwargs = on_cpu(current.literals())
            operands = [values[r] for r in current.operands]
            values[current] = current.target(*fill(args, operands), **fill(kwargs, operands))
    return values[row], frozenset(literals)
