"""Capture: a model in, `ModelGraph`s out (torch.fx, symbolic batch and sequence, source lines)."""

from shardc.capture.capture import CapturedModel, Input, capture
from shardc.capture.graph import (
    Call,
    ModelGraph,
    Parameter,
    Repeat,
    Source,
    Value,
    block_input,
    block_output,
    op_name,
    repeat_block,
)
from shardc.capture.variants import Variant
from shardc.capture.window import window_of

__all__ = [
    "Call", "CapturedModel", "Input", "ModelGraph", "Parameter", "Repeat", "Source", "Value", "Variant",
    "block_input", "block_output", "capture", "op_name", "repeat_block", "window_of",
]  # fmt: skip
