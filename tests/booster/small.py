"""A small model, data and the plugins that tests go through, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardc.booster import Booster
from shardc.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

ROWS, LENGTH, VOCABULARY = 8, 12, 101  # of the global batch

# name -> plugin of a job of four ranks in a precision
PLUGINS: dict[str, Callable[..., Plugin]] = {
    "ddp": lambda precision="fp32", **kw: TorchDDPPlugin(),
    "zero1": lambda **kw: LowLevelZeroPlugin(stage=1, **kw),
    "zero2": lambda **kw: LowLevelZeroPlugin(stage=2, **kw),
    "fsdp": lambda precision="fp32", **kw: TorchFSDPPlugin(),
    "gemini": lambda **kw: GeminiPlugin(**kw),
    "gemini_offload": lambda **kw: GeminiPlugin(
        offload_optim_frac=1.0, offload_param_frac=0.5, enable_gradient_accumulation=True, **kw
    ),
    "tp2": lambda **kw: HybridParallelPlugin(tp_size=2, pp_size=1, **kw),
    "tp2_pp2_zero1": lambda **kw: HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=1, num_microbatches=2, **kw),
    "pp2_zero3": lambda **kw: HybridParallelPlugin(tp_size=1, pp_size=2, zero_stage=3, num_microbatches=2, **kw),
}


def plugin_named(name: str, precision: str = "fp32", **arguments: Any) -> Plugin:
    """The plugin of that name; DDP and FSDP take their precision from the model."""
    return PLUGINS[name](precision=precision, **arguments)


def make_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen3ForCausalLM:
    """GQA, tied weights, an odd vocabulary; the same values wherever it is made."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes | changes))
    with torch.no_grad():  # no norm is 1
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return model.to(dtype)


def make_rows(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Rows with ragged labels."""
    draws = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=draws)
        labels = ids.clone()
        labels[int(torch.randint(3, LENGTH, (1,), generator=draws)) :] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def make_loader(steps: int, batch_size: int = ROWS, seed: int = 1) -> DataLoader:
    """Batches of `steps` global batches."""
    return DataLoader(make_rows(ROWS * steps, seed), batch_size=batch_size)


def parameter_groups(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    for dims, decay in (((2,), 0.1), ((1,), 0.0)):
        yield {"params": [p for p in model.parameters() if p.dim() in dims], "weight_decay": decay}


def train_on(batch: dict[str, Tensor], booster: Booster, model: Any, optimizer: Any, schedule: Any) -> Tensor:
    """One step of a plain script; its loss."""
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss


def relative(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
