"""The dropout masks that a model draws: recorded as it draws them, or given to it in their place.

Both see every `F.dropout` and every `scaled_dot_product_attention` with dropout, in the order of the calls. Attention
draws inside its kernel: its mask is found by a second call from the same random state, with the identity for values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Record(TorchFunctionMode):
    """`masks`: True where an element was kept, of every call that drew."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if draw := _draw_of(function, args, kwargs):
            state = torch.get_rng_state()
            with torch.no_grad():
                self.masks.append(draw() != 0)
            torch.set_rng_state(state)
        return function(*args, **kwargs)


class Inject(TorchFunctionMode):
    """Every call takes the next of `masks` in place of drawing one."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.masks: Iterator[Tensor] = iter(masks)

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _draw_of(function, args, kwargs) is None:
            return function(*args, **kwargs)
        keep = next(self.masks)
        if function is F.scaled_dot_product_attention:
            return _attention(keep, *args, **kwargs)
        x, p = args[0], _p(args, kwargs)
        assert keep.shape == x.shape, (keep.shape, x.shape)
        return x * keep / (1 - p)


def _draw_of(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Tensor] | None:
    """Draws what the call would draw and gives a tensor that is 0 where it drops; None if the call draws nothing."""
    if function is F.dropout:
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        if not training or _p(args, kwargs) == 0:
            return None
        return lambda: F.dropout(torch.ones_like(args[0]), _p(args, kwargs), True)
    if function is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
        query, key, value = args[:3]
        identity = torch.eye(key.shape[2]).expand(*value.shape[:2], -1, -1)
        return lambda: F.scaled_dot_product_attention(query, key, identity, *args[3:], **kwargs)
    return None


def _p(args: tuple, kwargs: dict[str, Any]) -> float:
    return kwargs.get("p", args[1] if len(args) > 1 else 0.5)


def _attention(
    keep: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by its definition, with a given dropout mask."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        assert attn_mask.dtype == torch.bool
        weights = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights * attn_mask.any(-1, keepdim=True)  # the kernel gives 0 where a query sees no key
    assert keep.shape == weights.shape, (keep.shape, weights.shape)
    return (weights * keep / (1 - dropout_p)) @ value


def join(parts: list[list[Tensor]], whole: list[torch.Size]) -> list[Tensor]:
    """The masks of the whole from those of the tp ranks. parts: by rank, by call. whole: the shape of each call.

    A mask with no short dim has to be equal on all ranks; where a dim is short, ranks hold distinct shards of it. What
    sequence parallelism padded is cut off.
    """
    joined = []
    for masks, shape in zip(zip(*parts, strict=True), whole, strict=True):
        short = [dim for dim, size in enumerate(shape) if masks[0].shape[dim] < size]
        equal = all(torch.equal(mask, masks[0]) for mask in masks)
        assert equal != bool(short) or len(masks) == 1, f"{tuple(shape)}: ranks hold {tuple(masks[0].shape)}, {equal=}"
        mask = torch.cat(masks, short[0]) if short else masks[0]
        joined.append(mask[tuple(slice(size) for size in shape)])
    return joined
