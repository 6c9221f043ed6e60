"""Stages run one after another give the loss and every gradient of the uncut model, bit by bit."""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shardc.capture import CapturedModel, Input, ModelGraph, Variant, capture, repeat_block
from shardc.capture.symbols import MODEL_DTYPE, B, S
from shardc.errors import ShardcError
from shardc.models import ModelSource, source_from_config
from shardc.pipeline import block_paths, cut
from tests.pipeline.run_stage import run_stage

SMALL = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4)
LENGTH = 11


def _qwen3(**fields: Any) -> ModelSource:
    from transformers import Qwen3Config

    return source_from_config(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, **fields), "tiny")


def _gpt2() -> ModelSource:
    from transformers import GPT2Config

    tokens = dict(bos_token_id=0, eos_token_id=0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=5, n_head=4, n_positions=32, **tokens)
    return source_from_config(config, "tiny")


def _gemma2() -> ModelSource:
    from transformers import Gemma2Config

    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=24)
    return source_from_config(config, "tiny")


@dataclass(frozen=True)
class Family:
    make: Any
    window: int | None = None
    fields: dict = field(default_factory=dict)


FAMILIES = {
    "qwen3": Family(_qwen3),
    "qwen3 tied": Family(_qwen3, fields={"tie_word_embeddings": True}),
    "gpt2": Family(_gpt2),
    "gemma2": Family(_gemma2, window=24),
}
PLAIN, MASKED = Variant(), Variant(masked=True)


@cache
def _captured(name: str) -> tuple[ModelSource, CapturedModel]:
    family = FAMILIES[name]
    source = family.make(**family.fields)
    return source, capture(source.make, window=family.window, variants=(PLAIN, MASKED))


def _model(source: ModelSource) -> nn.Module:
    """The model with every parameter perturbed, so that no norm is 1 and no bias 0."""
    torch.manual_seed(1)
    model = source.make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _batch(variant: Variant) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(0, 97, (3, LENGTH))
    labels = ids.clone()
    labels[0, :4] = -100
    batch = {"input_ids": ids, "labels": labels}
    if variant.masked:
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        labels[1, :3] = -100
        batch["attention_mask"] = mask
    return batch


def _reference(model: nn.Module, batch: dict, num_targets: torch.Tensor) -> tuple[torch.Tensor, dict]:
    out = model(**batch, num_items_in_batch=num_targets)
    out.loss.backward()
    return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def _run_stages(stages: list[ModelGraph], model: nn.Module, batch: dict) -> tuple[torch.Tensor, dict]:
    """Forward through the stages with detached values between them, backward in reverse order."""
    model.zero_grad()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    sent: dict[str, torch.Tensor] = {}
    runs = []
    for stage in stages:
        received = {n: x.detach().requires_grad_(x.requires_grad) for n, x in sent.items()}
        given = {name: (received | batch)[name] for name in stage.inputs}
        sent = run_stage(stage, given, tensors.__getitem__)
        runs.append((received, sent))
    loss = sent["loss"]
    loss.backward()
    for (_, sent), (received, _) in reversed([*pairwise(runs)]):
        outputs = [(x, received[name].grad) for name, x in sent.items() if x.requires_grad]
        if outputs:
            torch.autograd.backward(*zip(*outputs, strict=True))
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


EVEN_CUTS = [[1], [2], [3], [4], [1, 3, 4]]


@pytest.mark.parametrize("cuts", EVEN_CUTS, ids=str)
@pytest.mark.parametrize("variant", [PLAIN, MASKED], ids=lambda v: v.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_give_loss_and_gradients_bit_by_bit(name: str, variant: Variant, cuts: list[int]) -> None:
    source, captured = _captured(name)
    graph = captured.variants[variant]
    blocks = block_paths(graph)
    stages = cut(graph, [blocks[i] for i in cuts])
    model, batch = _model(source), _batch(variant)
    batch_with_count = batch | {"num_targets": (batch["labels"][:, 1:] != -100).sum().float()}
    loss_ref, grads_ref = _reference(model, batch, batch_with_count["num_targets"])
    loss, grads = _run_stages(stages, model, batch_with_count)
    assert torch.equal(loss, loss_ref)
    wrong = [n for n, grad in grads_ref.items() if grads[n] is None or not torch.equal(grads[n], grad)]
    assert not wrong
    for stage in stages:
        stage.graph.lint()


@pytest.mark.parametrize("name", FAMILIES)
def test_only_hidden_states_cross(name: str) -> None:
    _, captured = _captured(name)
    for graph in captured.variants.values():
        stages = cut(graph, [block_paths(graph)[i] for i in (1, 3)])
        assert [[*stage.outputs] for stage in stages] == [["hidden_states"]] * 2 + [["loss", "logits", "count"]]
        assert all("labels" not in s.inputs and "num_targets" not in s.inputs for s in stages[:-1])
        assert all(s.inputs["hidden_states"].meta["value"].shape == (B, S, 32) for s in stages[1:])


def test_one_stage_is_the_model() -> None:
    _, captured = _captured("qwen3")
    (stage,) = cut(captured.plain, [])
    assert [str(n.target) for n in stage.graph.nodes] == [str(n.target) for n in captured.plain.graph.nodes]
    assert [n.name for n in stage.graph.nodes] == [n.name for n in captured.plain.graph.nodes]
    assert stage.blocks == captured.plain.blocks


def test_first_block_of_a_stage_represents_its_kind() -> None:
    _, captured = _captured("gemma2")
    stages = cut(captured.plain, ["model.layers.1", "model.layers.4"])
    assert [stage.blocks for stage in stages] == [
        {"model.layers.0": ["model.layers.0"]},
        {
            "model.layers.1": ["model.layers.1", "model.layers.3"],
            "model.layers.2": ["model.layers.2"],
        },
        {"model.layers.4": ["model.layers.4"]},
    ]
    bodies = {c.path for n in stages[1].graph.nodes if n.op == "call_function" for c in n.meta["call"].chain()}
    assert not any(path.startswith(("model.layers.0", "model.layers.4")) for path in bodies)
    assert {"model.layers.1.mlp.up_proj", "model.layers.2.self_attn"} <= bodies


def test_each_stage_holds_its_own_parameters_and_a_tied_weight_twice() -> None:
    _, captured = _captured("qwen3 tied")
    graph = captured.plain
    first, last = cut(graph, ["model.layers.2"])
    trained = {name for name, p in graph.parameters.items() if not p.is_buffer}
    assert {*first.parameters} | {*last.parameters} == trained | {*graph.constants}
    assert {*first.parameters} & {*last.parameters} == {"model.embed_tokens.weight", "model.rotary_emb.inv_freq"}
    assert "model.layers.1.mlp.up_proj.weight" in first.parameters
    assert "model.layers.4.mlp.up_proj.weight" in last.parameters
    head = next(n for n in last.graph.nodes if n.target == "model.embed_tokens.weight")
    assert head.meta["call"].path == "lm_head"


class Chain(nn.Module):
    """An embedding that every block reads, and blocks with two outputs: values that skip stages."""

    def __init__(self, num_blocks: int = 4, width: int = 8, frozen: int = 0):
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.layers = nn.ModuleList(Pair(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 13)
        for layer in (self.embed, *self.layers)[: frozen and frozen + 1]:
            layer.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        embedded = self.embed(input_ids)
        hidden_states, memory = embedded, embedded
        for layer in self.layers:
            hidden_states, memory = layer(hidden_states, memory, embedded)
        logits = self.head(hidden_states + memory)
        loss = nn.functional.cross_entropy(logits.view(-1, 13), labels.view(-1))
        return {"loss": loss, "logits": logits}


class Pair(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, memory: torch.Tensor, embedded: torch.Tensor) -> tuple:
        hidden_states = torch.tanh(self.up(hidden_states + embedded))
        return hidden_states, memory * hidden_states


@pytest.mark.parametrize("frozen", [0, 2], ids=["trainable", "frozen start"])
@pytest.mark.parametrize("cuts", [[1], [2], [1, 2, 3]], ids=str)
def test_values_pass_through_the_stages_between(cuts: list[int], frozen: int) -> None:
    graph = capture(lambda: Chain(frozen=frozen), variants=(PLAIN,)).plain
    stages = cut(graph, [f"layers.{i}" for i in cuts])
    torch.manual_seed(0)
    model = Chain(frozen=frozen)
    ids = torch.randint(0, 13, (2, 5))
    reference = model(ids, ids)
    reference["loss"].backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    loss, grads = _run_stages(stages, model, {"input_ids": ids, "labels": ids, "num_targets": torch.tensor(10.0)})
    assert torch.equal(loss, reference["loss"].detach())
    for name, grad in expected.items():
        assert grad is None or torch.equal(grads[name], grad), name
    sent = {"hidden_states", "memory"} if frozen else {"hidden_states", "memory", "embedded"}
    assert [{*stage.outputs} for stage in stages[:-1]] == [sent] * len(cuts)
    assert all(sum(n.target is repeat_block for n in s.graph.nodes) == len(s.parameters) // 2 - 1 for s in stages[1:-1])


def test_frozen_blocks_are_sent_not_run_again() -> None:
    graph = capture(lambda: Chain(frozen=2), variants=(PLAIN,)).plain
    _, second, _, _ = cut(graph, ["layers.1", "layers.2", "layers.3"])
    assert {name.split(".")[1] for name in second.parameters if name.startswith("layers.")} == {"1"}
    assert "hidden_states" in second.inputs


class Widened(nn.Module):
    """A stage between sees only half of the sequence; its position table needs all of it."""

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": hidden_states + torch.arange(input_ids.shape[1] * 1).sum()}


def test_a_stage_that_mentions_the_sequence_gets_a_tensor_that_shows_it() -> None:
    inputs = {"hidden_states": Input((B, 4), MODEL_DTYPE, requires_grad=True), "input_ids": Input((B, S))}
    graph = capture(Widened, inputs=inputs, variants=(PLAIN,)).plain
    (stage,) = cut(graph, [])
    assert [*stage.inputs] == ["hidden_states", "input_ids"]
    assert not stage.inputs["input_ids"].users


ERRORS = [
    (
        ["model.layers.2.mlp"],
        "cut at 'model.layers.2.mlp' is inside the block model.layers.2; blocks: model.layers.0 to model.layers.4",
    ),
    (
        ["model.norm"],
        "cut at 'model.norm' is not a block of this model; blocks: model.layers.0 to model.layers.4",
    ),
    (
        ["model.layers.3", "model.layers.1"],
        "cuts 'model.layers.3', 'model.layers.1' do not follow the order of the model; "
        "blocks: model.layers.0 to model.layers.4",
    ),
]


@pytest.mark.parametrize(("first_blocks", "problem"), ERRORS, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_a_wrong_cut_is_refused(first_blocks: list[str], problem: str) -> None:
    _, captured = _captured("qwen3")
    with pytest.raises(ShardcError) as error:
        cut(captured.plain, first_blocks)
    assert error.value.problem == problem
    assert error.value.advice == "a stage begins at a whole block; give the path of one, in model order"
