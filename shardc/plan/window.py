"""The attention window of a config: the length at which a model's attention changes its form."""

from __future__ import annotations

from typing import Any

_WINDOWED = ("sliding_attention", "chunked_attention")


def attention_window(config: Any) -> int | None:
    """Tokens that an attention layer looks back, if some layer is limited; None where all see the whole row.

    A config with `layer_types` limits the layers that say so; one without them (Mistral, Phi-3) limits all."""
    kinds = getattr(config, "layer_types", None)
    if kinds and not any(kind in _WINDOWED for kind in kinds):
        return None
    field = "attention_chunk_size" if kinds and "chunked_attention" in kinds else "sliding_window"
    return getattr(config, field, None) or None
