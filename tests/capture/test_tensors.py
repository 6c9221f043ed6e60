"""Pitfalls 7 and 8: what the graph knows of parameters and buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardc.capture import capture
from shardc.capture.patches import default_dtype
from shardc.capture.symbols import MODEL_DTYPE
from shardc.models import source_from_config
from tests.capture import families
from tests.capture.plain import Tiny, with_body


@pytest.mark.parametrize("family", families.PRESETS)
def test_pitfall_7_constants_are_those_of_a_model_built_on_the_cpu(family: str) -> None:
    """Meta buffers hold no data: inv_freq, Gemma-3's two rotary tables and its embedding scale are computed again."""
    captured = families.captured(family)
    with default_dtype(torch.bfloat16):
        buffers = dict(families.source(family).make().named_buffers())
    names = set()
    for graph in captured.variants.values():
        for name, value in graph.constants.items():
            follows = graph.parameters[name].dtype is MODEL_DTYPE
            assert value.device.type == "cpu" and value.dtype == (torch.float32 if follows else buffers[name].dtype)
            assert torch.equal(value.to(buffers[name].dtype), buffers[name]), name
            names.add(name)
    if family == "gemma3":
        tables = ("full_attention_inv_freq", "sliding_attention_inv_freq")
        assert names == {f"model.rotary_emb.{table}" for table in tables} | {"model.embed_tokens.embed_scale"}


@pytest.mark.parametrize("tied", [True, False])
def test_pitfall_8_tied_names_are_aliases_of_the_first(tied: bool) -> None:
    config = copy.deepcopy(families.config("qwen3"))
    config.tie_word_embeddings = tied
    graph = capture(source_from_config(config, "qwen3").make).plain
    embedding = graph.parameters["model.embed_tokens.weight"]
    assert embedding.aliases == (("lm_head.weight",) if tied else ())
    assert ("lm_head.weight" in graph.parameters) != tied
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    assert ("lm_head.weight" in read) != tied


def frozen_and_fixed(self: Tiny) -> None:
    self.proj.bias.requires_grad_(False)
    self.head.weight.data = self.head.weight.data.double()
    self.register_buffer("table", torch.arange(8.0).cos())


def test_dtype_and_gradient_of_each_parameter() -> None:
    def body(self: Tiny, hidden: torch.Tensor) -> torch.Tensor:
        return self.proj(hidden + self.table)

    class Model(with_body(body, frozen_and_fixed)):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.body(self.embed(input_ids))
            return nn.functional.linear(hidden.double(), self.head.weight)

    graph = capture(Model).plain
    parameters = graph.parameters
    assert parameters["embed.weight"].dtype is MODEL_DTYPE and parameters["embed.weight"].requires_grad
    assert parameters["head.weight"].dtype is torch.float64
    assert not parameters["proj.bias"].requires_grad
    assert parameters["table"].is_buffer and torch.equal(graph.constants["table"], torch.arange(8.0).cos())
