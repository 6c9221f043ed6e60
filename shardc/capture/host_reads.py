"""Values that Python reads while a model runs on meta tensors: computed on the CPU where sizes alone decide them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch

from shardc.capture.graph import RANDOM_OPS, op_name
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


def draws(rows: Iterable[Row]) -> bool:
    """Whether one of these rows draws random numbers."""
    return any(row.op == "call_function" and op_name(row.target) in RANDOM_OPS for row in rows)


def certain_answer(row: Row) -> bool | None:
    """The answer of a comparison of `torch.rand` with a number where every draw gives the same, else None.

    OPT asks `rand < layerdrop` for each layer that it trains, also where layerdrop is 0."""
    compare = _ORDERS.get(op_name(row.target))
    args, _ = row.literals()
    if compare is None or len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    if op_name(row.operands[0].target) != "rand":
        return None
    lowest, highest = compare(0.0, args[1]), compare(math.nextafter(1, 0), args[1])  # a draw is in [0, 1)
    return lowest if lowest == highest else None


_ORDERS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def evaluate(
    rows: Iterable[Row], wanted: set[Row], row: Row, inputs: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, frozenset[int | float]]:
    """The real value of a row that depends on sizes and `inputs` alone, and the numbers in its computation."""
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
        if current.op == "placeholder" and current in wanted:
            values[current] = inputs[current.target]
        elif current in wanted:
            args, kwargs = on_cpu(current.literals())
            operands = [values[r] for r in current.operands]
            values[current] = current.target(*fill(args, operands), **fill(kwargs, operands))
    return values[row], frozenset(literals)


def is_guard(rows: Iterable[Row], sources: set[Row], row: Row, input_row: Row, answer: bool) -> bool:
    """Whether a boolean of one input answers the question that the variants ask of it, as far as samples tell.

    attention_mask: are all tokens kept? position_ids: does no row restart? Anything else, such as a comparison of the
    largest position with a limit, has another answer for one of the samples.
    """
    name, shape = input_row.target, input_row.concrete.shape
    samples = _SAMPLES[name](*shape) if name in _SAMPLES and len(shape) == 2 and shape[1] > 2 else []
    answers = [bool(evaluate(rows, sources, row, {name: sample})[0]) == expected for sample, expected in samples]
    return bool(answers) and all(answers) and answer in [expected for _, expected in samples]


def _masks(rows: int, length: int) -> list[tuple[torch.Tensor, bool]]:
    full = torch.ones(rows, length, dtype=torch.int64)
    left, right, one = full.clone(), full.clone(), full.clone()
    left[-1, : length // 2] = 0
    right[:, length // 2 :] = 0
    one[0, -1] = 0
    return [(full, True), (left, False), (right, False), (one, False)]


def _positions(rows: int, length: int) -> list[tuple[torch.Tensor, bool]]:
    single = torch.arange(length).repeat(rows, 1)
    packed, last = single.clone(), single.clone()
    packed[:, length // 2 :] -= length // 2
    last[-1, -1] = 0
    return [(single, True), (single + 3, True), (single + 10**7, True), (packed, False), (last, False)]


_SAMPLES = {"attention_mask": _masks, "position_ids": _positions}
