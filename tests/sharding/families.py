"""Tiny members of the eleven families, their batches, and what Hugging Face computes for them in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.capture.capture import CapturedModel, Variant, capture
from shardc.capture.graph import op_name
from shardc.models import reduced_config, resolve, source_from_config
from shardc.policy import Rule, match, module_classes, policy_for
from tests.sharding.simulate import Batch

WINDOW, SHORT, LONG = 10, 8, 12  # tokens; sequences are multiples of every tp under test

FAMILIES = {
    "llama": "Llama-3.2-1B",
    "mistral": "Mistral-7B-v0.1",
    "qwen2": "Qwen2.5-0.5B",
    "qwen3": "Qwen3-0.6B",
    "gemma2": "Gemma-2-2b",
    "gemma3": "Gemma-3-1b",
    "phi3": "Phi-3-mini-4k-instruct",
    "olmo2": "OLMo-2-1B",
    "gpt2": "gpt2",
    "neox": "pythia-70m",
    "opt": "opt-125m",
}


@functools.cache
def tiny_config(
    family: str, heads: int = 8, kv_heads: int | None = None, tied: bool | None = None, intermediate: int | None = None
) -> Any:
    """heads: divisible by every tp under test. kv_heads: as many as the family allows (4), unless given."""
    config = copy.deepcopy(reduced_config(resolve(FAMILIES[family]).config, 1, 2))
    grouped = getattr(config, "num_key_value_heads", None) is not None
    head_dim = 6
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": (kv_heads or heads // 2) if grouped else None,
        "head_dim": head_dim,
        "hidden_size": head_dim * heads,
        "intermediate_size": intermediate or 24 + heads,
        "ffn_dim": 24,
        "word_embed_proj_dim": head_dim * heads,
        "sliding_window": WINDOW,
    }
    for name, size in sizes.items():
        if getattr(config, name, None) is not None and size is not None:
            setattr(config, name, size)
    if tied is not None:
        config.tie_word_embeddings = tied
    if family in ("gemma2", "gemma3"):  # two equal blocks, and one that differs
        config.num_hidden_layers = 3
        config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    return config


@dataclass(frozen=True)
class Model:
    """A model to shard: how to build it, its roles, its modules by path, and its attention window."""

    make: Callable[[], nn.Module]
    roles: dict[str, Rule]
    classes: dict[str, str]
    window: int | None = None

    def capture(self, *variants: Variant) -> CapturedModel:
        return capture(self.make, window=self.window, variants=variants or None)


def family_model(family: str, **sizes: Any) -> Model:
    config = tiny_config(family, **sizes)
    source = source_from_config(config, family)
    with torch.device("meta"):
        classes = module_classes(source.make())
    windowed = getattr(config, "sliding_window", None) is not None and family != "qwen2"
    return Model(source.make, match(policy_for(config), classes), classes, WINDOW if windowed else None)


def variants_of(model: Model) -> list[Variant]:
    """Plain, masked, packed; and beyond the window where there is one."""
    longs = (False, True) if model.window else (False,)
    kinds = [{}, {"masked": True}, {"positions": True, "packed": True}]
    return [Variant(**kind, long=long) for long in longs for kind in kinds]


def batch_for(variant: Variant, vocabulary: int = 101) -> Batch:
    """Three rows: ragged ignored labels, one row without any target; left- and right-padded where masked."""
    rows, length = 3, LONG if variant.long else SHORT
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[1] = -100
    tensors = {"input_ids": ids, "labels": labels}
    if variant.masked:
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, :2] = 0
        mask[2, -3:] = 0
        labels[mask == 0] = -100
        tensors["attention_mask"] = mask
    if variant.positions:
        restart = 5 if variant.packed else length
        tensors["position_ids"] = torch.arange(length).remainder(restart).expand(rows, -1).contiguous()
    return Batch(tensors, rows, length)


class InFloat64(TorchFunctionMode):
    """Casts to a narrower float dtype go to float64 instead, so that a model can be compared to the last digits."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if op_name(func) in ("float", "half", "bfloat16"):
            return args[0].double()
        args = tuple(torch.float64 if a in _NARROW else a for a in args)
        return func(*args, **{k: torch.float64 if v in _NARROW else v for k, v in (kwargs or {}).items()})


class _Narrow(tuple):
    def __contains__(self, item: object) -> bool:
        return isinstance(item, torch.dtype) and super().__contains__(item)


_NARROW = _Narrow((torch.float32, torch.float16, torch.bfloat16))


def build_perturbed(model: Model) -> nn.Module:
    """The model in float64, with no norm at 1, no bias at 0 and no two weights equal."""
    torch.manual_seed(3)
    module = model.make().eval()
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def dense_loss(module: nn.Module, batch: Batch) -> Tensor:
    with InFloat64():
        out = module(**batch.tensors)
    return out["loss"] if isinstance(out, dict) else out.loss
