"""In which dtype a boosted model computes."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from shardc.booster.plugin import Plugin
from shardc.errors import ShardcError

DTYPE_OF = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_COLOSSALAI_NAMES = {"fp16_apex": "fp16", "fp16_naive": "fp16"}  # kinds of one precision


def check_mixed_precision(name: str | None, plugin: Plugin) -> str | None:
    """Booster's mixed_precision as a precision, None where the plugin has one. Raises ShardcError for another name."""
    if name is None:
        return None
    precision = _COLOSSALAI_NAMES.get(name, name) if isinstance(name, str) else name
    if precision not in DTYPE_OF:
        raise ShardcError(
            f"Booster: mixed_precision={name!r}; valid: {', '.join([*DTYPE_OF, *_COLOSSALAI_NAMES])}, or None",
            "None trains in the plugin's precision, or the model's own",
        )
    if plugin.control_precision():
        warnings.warn(
            f"Booster: mixed_precision={name!r} has no effect beside {type(plugin).__name__}, "
            f"whose precision is {plugin.precision}",
            stacklevel=3,
        )
        return None
    return precision


def choose_dtype(model: nn.Module, precision: str | None) -> torch.dtype:
    """The dtype of a precision; without one, that of the model's parameters. Raises ShardcError where they differ."""
    if precision is not None:
        return DTYPE_OF[precision]
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if len(found) != 1:
        raise ShardcError(
            f"boost: the parameters have the dtypes {sorted(map(str, found))}, and no precision is given",
            'give the plugin precision="bf16", or Booster mixed_precision="bf16"',
        )
    return found.pop()
