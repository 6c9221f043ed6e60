"""LongRoPE in releases of transformers before it selected its frequencies by value.

They branch on the largest position and register the frequencies anew, which no graph can hold for every batch. While
capture runs, the update selects by `torch.where`, as newer releases do: the same frequencies for each batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import CellType
from typing import Any

import torch
from torch import nn

_UPDATE = "longrope_frequency_update"  # in the closure of a rotary embedding's forward


@contextlib.contextmanager
def longrope_by_value(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Among the classes of these modules, an update that branches is replaced."""
    cells = [cell for kind in dict.fromkeys(map(type, modules)) if (cell := _update_cell(kind))]
    originals = [cell.cell_contents for cell in cells]
    try:
        for cell in cells:
            cell.cell_contents = _select
        yield
    finally:
        for cell, original in zip(cells, originals, strict=True):
            cell.cell_contents = original


def _update_cell(kind: type) -> CellType | None:
    """Where the decorated forward keeps an update that does not select by value."""
    forward: Any = kind.forward
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and _UPDATE in code.co_freevars:
            cell = forward.__closure__[code.co_freevars.index(_UPDATE)]
            return None if "where" in cell.cell_contents.__code__.co_names else cell
        forward = getattr(forward, "__wrapped__", None)
    return None


def _select(self: nn.Module, position_ids: torch.Tensor, device: torch.device, layer_type: str | None = None) -> None:
    """The long frequencies where a position reaches the original length, else the short ones, into the buffer."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, rope_type, prefix = self.config.rope_parameters, self.rope_type, ""
    if layer_type is not None:
        parameters, rope_type, prefix = parameters[layer_type], rope_type[layer_type], f"{layer_type}_"
    limit = parameters["original_max_position_embeddings"]
    long, _ = ROPE_INIT_FUNCTIONS[rope_type](self.config, device, seq_len=limit + 1, layer_type=layer_type)
    short = getattr(self, f"{prefix}original_inv_freq").to(device)
    inv_freq = torch.where(position_ids.max() + 1 > limit, long, short)
    getattr(self, f"{prefix}inv_freq").copy_(inv_freq)
