"""A plugin's arguments as rows of a table: default, valid values, and for what has no effect here, the reason."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from shardc.booster.plugin.recipe import PRECISIONS, GradientCheckpointConfig, ScalerSettings, is_counts
from shardc.errors import ShardcError


@dataclass(frozen=True, slots=True)
class Valid:
    """The values of an argument: `test` knows them, `text` lists them in errors; not_yet: known, but not built."""

    text: str
    test: Callable[[Any], bool]
    not_yet: tuple[str, ...] = ()


def argument(default: Any, valid: Valid, *, unused: str = "") -> Any:
    """One row. unused: what shardc does instead; then the argument is checked, and has no effect."""
    return field(default=default, metadata={"valid": valid, "unused": unused})


def one_of(*values: Any, not_yet: tuple[str, ...] = ()) -> Valid:
    """One of these strings or numbers."""
    text = ", ".join(repr(value) for value in values)
    return Valid(text, lambda value: not isinstance(value, bool) and _plain(value) and value in values, not_yet)


def optional(valid: Valid) -> Valid:
    """The same, or None."""
    return Valid(f"{valid.text}, or None", lambda value: value is None or valid.test(value), valid.not_yet)


def _plain(value: Any) -> bool:
    return isinstance(value, (str, numbers.Real))


def _number(low: float, high: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool) and low <= value <= high


def _positive(value: Any) -> bool:
    return _number(0)(value) and 0 < value < float("inf")


def _count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


ANYTHING = Valid("anything", lambda value: True)
# 0 and 1 come from command lines; a string such as "False" would be true.
FLAG = Valid("True, False", lambda value: isinstance(value, (bool, numbers.Integral)) and value in (0, 1))
COUNT = Valid("an integer from 1 on", _count)
COUNT_OR_ZERO = Valid("an integer from 0 on", lambda value: _count(value) or (type(value) is int and value == 0))
POSITIVE = Valid("a number above 0", _positive)
NOT_NEGATIVE = Valid("a number from 0 on", lambda value: _number(0)(value) and value < float("inf"))
FRACTION = Valid("a number from 0 to 1", _number(0, 1))
GROWTH = Valid("a number from 1 on", lambda value: _number(1)(value) and value < float("inf"))
BACKOFF = Valid("a number above 0 and below 1", lambda value: _number(0, 1)(value) and 0 < value < 1)
PRECISION = one_of(*PRECISIONS)
L2_NORM = one_of(2.0)
FLOATING = optional(
    Valid(
        "torch.float32, torch.bfloat16, torch.float16",
        lambda value: value in (torch.float32, torch.bfloat16, torch.float16),
    )
)
LAYERS = optional(
    Valid("a list of one number, 1 or more, for each stage", lambda value: is_counts(value, at_least=1) and value)
)
POLICY = optional(Valid("the path of a YAML file", lambda value: isinstance(value, (str, Path))))
RECOMPUTE = optional(
    Valid(
        "a GradientCheckpointConfig or PipelineGradientCheckpointConfig of shardc.booster.plugin",
        lambda value: isinstance(value, GradientCheckpointConfig),
    )
)

# What several plugins say of the arguments that they share.
NO_FP8_SENT = "tensors are sent in communication_dtype, or in their own dtype"
NO_FP8 = "linear layers compute in `precision`"
ATTENTION = "attention is the model's own: from_pretrained(..., attn_implementation=...)"
OWN_CODE = "the model computes as its own source says"
NO_OFFLOAD = "nothing is offloaded for now: parameters, gradients and optimizer states stay on the GPU"
NOT_VERBOSE = "`shardc show` prints the plan"


def check(plugin: Any) -> None:
    """Raises ShardcError for the first argument of the plugin that has no valid value."""
    for name, default, valid, _ in _rows(plugin):
        value = getattr(plugin, name)
        if not valid.test(value):
            later = _plain(value) and value in valid.not_yet
            raise ShardcError(
                f"{type(plugin).__name__}: {name}={value!r} is not {'built yet' if later else 'valid'}; "
                f"valid: {valid.text}",
                f"pass one of these, or leave {name} out for {default!r}",
            )
    _check_scale(plugin)


def _check_scale(plugin: Any) -> None:
    scaler = scaler_of(plugin)
    if not scaler.min_scale <= scaler.initial_scale <= scaler.max_scale:
        raise ShardcError(
            f"{type(plugin).__name__}: initial_scale={scaler.initial_scale!r} is not within "
            f"min_scale={scaler.min_scale!r} and max_scale={scaler.max_scale!r}",
            "the loss scale starts at initial_scale and stays within the other two",
        )


def without_effect(plugin: Any) -> dict[str, str]:
    """Arguments that were given another value than their default, and have no effect: name to reason."""
    return {name: unused for name, _, _, unused in _rows(plugin) if unused and given(plugin, name)}


def given(plugin: Any, name: str) -> bool:
    """Whether an argument has another value than its default."""
    value, default = getattr(plugin, name), next(row[1] for row in _rows(plugin) if row[0] == name)
    return value is not default and not (_plain(value) and value == default)


def scaler_of(plugin: Any) -> ScalerSettings:
    """The arguments of the loss scale, where the plugin has them."""
    names = [row.name for row in fields(ScalerSettings)]
    return ScalerSettings(**{name: getattr(plugin, name) for name in names if hasattr(plugin, name)})


def warning_text(plugin: Any, reasons: Mapping[str, str]) -> str:
    """All arguments without effect, each with its reason, as one warning says it."""
    lines = [f"  {_written(name, getattr(plugin, name))}: {reason}" for name, reason in reasons.items()]
    return "\n".join((f"{type(plugin).__name__}: accepted, but without effect:", *lines))


def arguments_text(plugin: Any) -> str:
    """The arguments that differ from their defaults, as one would write them."""
    return ", ".join(_written(row[0], getattr(plugin, row[0])) for row in _rows(plugin) if given(plugin, row[0]))


def _written(name: str, value: Any) -> str:
    short = value is None or _plain(value) or isinstance(value, (list, tuple, Path, torch.dtype))
    return f"{name}={value!r}" if short else f"{name}=<{type(value).__name__}>"


def _rows(plugin: Any) -> Iterator[tuple[str, Any, Valid, str]]:
    for row in fields(plugin):
        yield row.name, row.default, row.metadata["valid"], row.metadata["unused"]
