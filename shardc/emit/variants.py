"""What a body is written for: a variant of the batch, and which of the calls of one module in it."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.capture import Variant


@dataclass(frozen=True, slots=True, order=True)
class CallKey:
    """`call` counts the calls of one module within a forward; nearly all modules are called once."""

    variant: Variant
    call: int = 0
