"""The attention window of a Hugging Face config: the sequence length at which its graph changes."""

from __future__ import annotations

from typing import Any


def window_of(config: Any) -> int | None:
    """The window that some layer of the model uses, None where every layer sees the whole sequence.

    Mistral has `sliding_window` and no `layer_types`; Qwen2 and Qwen3 ignore theirs unless `use_sliding_window`, and
    the layers say which of them slide where the config lists them.
    """
    layer_types = getattr(config, "layer_types", None)
    fields = ("sliding_window", "attention_chunk_size")
    for field, kind in zip(fields, ("sliding_attention", "chunked_attention"), strict=True):
        size = getattr(config, field, None)
        listed = layer_types is None or kind in layer_types
        if isinstance(size, int) and size > 0 and listed and getattr(config, "use_sliding_window", True):
            return size
    return None
