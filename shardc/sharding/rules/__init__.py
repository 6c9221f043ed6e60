"""One record an operation: `RULES` by name. A new operation is one function in one of these files."""

from shardc.sharding.rules import attention, dense, pointwise, reduce, shape
from shardc.sharding.rules.registry import (
    RULES,
    Rule,
    argument,
    dims_of,
    draws,
    makes_copies,
    result_dims,
    rule,
    rule_of,
    set_dims,
    shape_of,
    tensors,
)

__all__ = [
    "RULES",
    "Rule",
    "argument",
    "attention",
    "dense",
    "dims_of",
    "draws",
    "makes_copies",
    "pointwise",
    "reduce",
    "result_dims",
    "rule",
    "rule_of",
    "set_dims",
    "shape",
    "shape_of",
    "tensors",
]
