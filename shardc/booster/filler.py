"""The batch of a rank that has no rows in the last step: a row again, with labels that are ignored."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.batch import IGNORED_LABEL


def ignored_batch(batch: Any) -> Any | None:
    """The first row of a batch, its labels all -100, so that its weight is 0; None where it has no such labels.

    batch: a mapping with integer `labels`, (B, ...); tensors and lists of B entries are cut to the first."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return None
    filler = copy.copy(batch)  # keeps a class such as BatchEncoding
    rows = labels.shape[0]
    for name, value in batch.items():
        by_row = isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
        if by_row and len(value) == rows:
            filler[name] = value[:1]
    filler["labels"] = torch.full_like(labels[:1], IGNORED_LABEL)
    return filler
