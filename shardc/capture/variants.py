"""The ways in which a model branches on its batch, and the sizes at which each is probed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardc.capture.fit import Probe


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """The side of each branch that a graph takes.

    masked: an attention mask with zeros is given (an all-ones mask is dropped before the model runs).
    positions: position ids are given. packed: they restart inside a row, so rows hold several sequences.
    long: the sequence reaches the model's attention window, `S >= window`.
    """

    masked: bool = False
    positions: bool = False
    packed: bool = False
    long: bool = False

    @property
    def name(self) -> str:
        parts = [part for part in ("masked", "positions", "packed", "long") if getattr(self, part)]
        return "+".join(parts) or "plain"


# 1, B, S and B*S are pairwise non-affine over these, so that no literal has two explanations. Each dtype trains once.
PROBES = (
    Probe(2, 15, torch.bfloat16),
    Probe(3, 22, torch.float32),
    Probe(5, 13, torch.bfloat16, training=False),
    Probe(7, 19, torch.float32, training=False),
)
SMALLEST_WINDOW = 8  # below it there are too few sequence lengths to probe


def probes_for(variant: Variant, window: int | None) -> list[Probe]:
    """The probes with sequences on the variant's side of the window."""
    if window is None or (not variant.long and window > max(p.seq for p in PROBES)):
        return list(PROBES)
    if variant.long:
        return [Probe(p.batch, p.seq + window, p.dtype, p.training) for p in PROBES]
    below = (window - 2, window - 1, window - 4, window - 3)
    return [Probe(p.batch, seq, p.dtype, p.training) for p, seq in zip(PROBES, below, strict=True)]


def default_variants(arguments: set[str], window: int | None) -> list[Variant]:
    """Every side of every branch that a forward with these arguments has.

    Below a window too small to probe there is no variant: such sequences are refused.
    """
    kinds = [{}]
    if "attention_mask" in arguments:
        kinds.append({"masked": True})
    if "position_ids" in arguments:
        kinds += [{"positions": True}, {"positions": True, "packed": True}]
    if {"attention_mask", "position_ids"} <= arguments:
        kinds.append({"masked": True, "positions": True})
    longs = (False,) if window is None else (True,) if window < SMALLEST_WINDOW else (False, True)
    return sorted(Variant(**kind, long=long) for long in longs for kind in kinds)
