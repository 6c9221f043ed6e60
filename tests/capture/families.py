"""The eleven supported families at sizes that run in milliseconds, with dropout configured and a window of 23."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from shardc.capture import CapturedModel, Variant, capture
from shardc.models import ModelSource, reduced_config, resolve, source_from_config

PRESETS = {
    "llama": "Llama-3.2-1B",
    "mistral": "Mistral-7B-v0.1",
    "qwen2": "Qwen2-0.5B",
    "qwen3": "Qwen3-4B",
    "gemma2": "gemma-2-2b",
    "gemma3": "gemma-3-1b",
    "phi3": "Phi-3-mini-4k-instruct",
    "olmo2": "OLMo-2-1B",
    "gpt2": "gpt2",
    "neox": "pythia-70m",
    "opt": "opt-125m",
}
WINDOW = 23  # above and below the sequences that capture probes by itself
WINDOWED = ("mistral", "gemma2", "gemma3", "phi3")
DROPOUT = 0.1
_DROPOUTS = (
    "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout",
)  # fmt: skip


def window(family: str) -> int | None:
    return WINDOW if family in WINDOWED else None


@functools.cache
def config(family: str) -> Any:
    small = reduced_config(resolve(PRESETS[family]).config, pp=1, tp=2)
    for name in _DROPOUTS:
        if getattr(small, name, None) is not None:
            setattr(small, name, DROPOUT)
    if window(family):
        small.sliding_window = WINDOW
    return small


def source(family: str) -> ModelSource:
    return source_from_config(config(family), family)


@functools.cache
def captured(family: str) -> CapturedModel:
    return capture(source(family).make, window=window(family))


def batch(variant: Variant, *, rows: int, length: int, vocab: int, left_padding: bool = False) -> dict[str, Tensor]:
    """A batch that belongs to `variant`: ragged labels, a padded row, positions that start at 2 or that restart."""
    numbers = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(3, vocab, (rows, length), generator=numbers)
    labels = ids.clone()
    labels[:, ::5] = -100
    given = {"input_ids": ids, "labels": labels}
    if variant.masked:
        mask = torch.ones_like(ids)
        if left_padding:
            mask[-1, : (length + 1) // 2] = 0
        else:
            mask[0, length // 2 :] = 0
        given["attention_mask"] = mask
        labels[mask == 0] = -100
    if variant.positions:
        positions = torch.arange(length).repeat(rows, 1)
        if variant.packed:
            positions[:, length // 2 :] -= length // 2
        else:
            positions += 2
        given["position_ids"] = positions
    return given
