"""Tiny models of each family, and what the tests do with the text that is emitted for them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from shardc.capture import CapturedModel, capture

_SMALL = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, attention_dropout=0.1, use_cache=False,
)  # fmt: skip
_HEADS = dict(_SMALL, head_dim=16)
_PLAIN_HEADS = {key: x for key, x in _SMALL.items() if key != "num_key_value_heads"}


_GEMMA3 = dict(_HEADS, num_hidden_layers=7, sliding_window=12, sliding_window_pattern=3)
_GPT2 = dict(
    vocab_size=256, n_embd=64, n_layer=4, n_head=4, n_positions=64, use_cache=False, bos_token_id=1, eos_token_id=2
)
_OPT = dict(
    vocab_size=256, hidden_size=64, ffn_dim=128, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64,
    dropout=0.1, attention_dropout=0.1, word_embed_proj_dim=64, use_cache=False,
)  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """config: name of transformers' config class. window: of its attention, which the batch of 30 tokens exceeds."""

    config: str
    fields: dict[str, Any]
    window: int | None = None


FAMILIES = {
    "qwen3": Tiny("Qwen3Config", _HEADS),
    "llama": Tiny("LlamaConfig", _HEADS),
    "gpt2": Tiny("GPT2Config", _GPT2),
    "gemma2": Tiny("Gemma2Config", dict(_HEADS, sliding_window=12, attn_implementation="eager"), 12),
    "gemma3": Tiny("Gemma3TextConfig", _GEMMA3, 12),
    "mistral": Tiny("MistralConfig", dict(_HEADS, sliding_window=23), 23),
    "gpt_neox": Tiny("GPTNeoXConfig", dict(_PLAIN_HEADS, hidden_dropout=0.1)),
    "opt": Tiny("OPTConfig", _OPT),
    "phi3": Tiny("Phi3Config", dict(_SMALL, pad_token_id=0, resid_pdrop=0.1)),
    "olmo2": Tiny("Olmo2Config", _SMALL),
}


def maker(name: str, **fields: Any) -> Callable[[], nn.Module]:
    """A function that builds the family's tiny model under the current default dtype and device."""
    tiny = FAMILIES[name]
    config = getattr(transformers, tiny.config)(**{**tiny.fields, **fields})
    return lambda: AutoModelForCausalLM.from_config(config)


@functools.cache
def captured(name: str) -> CapturedModel:
    return capture(maker(name), window=FAMILIES[name].window)


def load(text: str, folder: Path) -> types.ModuleType:
    """Import an emitted file."""
    path = folder / "model.py"
    path.write_text(text)
    module = types.ModuleType("emitted")
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def reference(name: str, dtype: torch.dtype) -> nn.Module:
    """Hugging Face's model with random weights, no norm at 1 and no bias at 0."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = maker(name)()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def build(
    make: Callable[[], nn.Module], weights: nn.Module, constants: dict[str, torch.Tensor], dtype: torch.dtype
) -> nn.Module:
    """A stage with the reference's weights and the plan's constants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        stage = make()
    finally:
        torch.set_default_dtype(before)
    missing, _ = stage.load_state_dict(weights.state_dict(), strict=False)
    assert not set(missing) - set(constants)
    for name, buffer in stage.named_buffers():
        buffer.copy_(constants[name])
    return stage


def batches(length: int) -> dict[str, dict[str, Any]]:
    """One batch for each way in which a model branches; `packed` is what the runtime tells the stage."""
    torch.manual_seed(1)
    ids = torch.randint(3, 200, (3, length))
    left, right = torch.ones(2, 3, length, dtype=torch.int64)
    left[0, :3] = 0
    right[1, -4:] = 0
    whole = torch.arange(length).expand(3, length).contiguous()
    packed = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(3, length).contiguous()
    after_padding = (left.cumsum(-1) - 1).clamp(min=0)
    return {
        "plain": dict(input_ids=ids),
        "left padding": dict(input_ids=ids, attention_mask=left),
        "right padding": dict(input_ids=ids, attention_mask=right),
        "positions": dict(input_ids=ids, position_ids=whole),
        "packed": dict(input_ids=ids, position_ids=packed, packed=True),
        "padding and positions": dict(input_ids=ids, attention_mask=left, position_ids=after_padding),
    }


def labels_for(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    labels[0, :4] = -100
    return labels
