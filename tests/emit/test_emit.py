"""The emitted file of an unsharded model is the Hugging Face model, bit for bit, and reads like it."""

import subprocess
import sys

import pytest
import torch

from shardc.emit import emit
from shardc.runtime.mesh import MeshAxis
from tests.capture.replay import NoIdleDraws
from tests.emit.tiny import FAMILIES, batches, build, captured, labels_for, load, reference

ONE = MeshAxis("tp", 1, 0)


def emitted(name: str) -> str:
    return emit([captured(name).variants], window=FAMILIES[name].window, title=f"tiny {name}")


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_gradients_and_logits_equal_the_original_bit_for_bit(name, tmp_path):
    module = load(emitted(name), tmp_path)
    original = reference(name, torch.float32)
    stage = build(lambda: module.STAGES[0](ONE), original, captured(name).plain.constants, torch.float32)
    assert sorted(n for n, _ in stage.named_parameters()) == sorted(n for n, _ in original.named_parameters())
    gradients = dict(stage.named_parameters())
    for length in (30, 9):
        for kind, batch in batches(length).items():
            packed = batch.pop("packed", False)
            labels = labels_for(batch["input_ids"])
            count = module.count_targets(labels)
            assert count == (labels[:, 1:] != -100).sum()
            for training in (True, False):
                original.train(training).zero_grad()
                stage.train(training).zero_grad()
                torch.manual_seed(2)
                with NoIdleDraws():
                    expected = original(**batch, labels=labels)
                torch.manual_seed(2)
                loss, logits = stage(**batch, labels=labels, num_targets=count.float(), packed=packed)
                where = f"{kind}, {length} tokens, training={training}"
                assert torch.equal(expected.loss, loss), where
                assert torch.equal(expected.logits, logits), where
                if training:
                    expected.loss.backward()
                    loss.backward()
                    for n, parameter in original.named_parameters():
                        assert torch.equal(parameter.grad, gradients[n].grad), f"{n}: {where}"


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2", "opt"])
def test_equal_in_bfloat16_too(name, tmp_path):
    """A dtype that is read off a name which was bound anew is wrong in bf16 only (PITFALLS 10)."""
    module = load(emitted(name), tmp_path)
    original = reference(name, torch.bfloat16).eval()
    constants = captured(name).plain.constants
    stage = build(lambda: module.STAGES[0](ONE), original, constants, torch.bfloat16).eval()
    for kind, batch in batches(30).items():
        packed = batch.pop("packed", False)
        labels = labels_for(batch["input_ids"])
        expected = original(**batch, labels=labels)
        loss, logits = stage(**batch, labels=labels, num_targets=module.count_targets(labels).float(), packed=packed)
        assert torch.equal(expected.loss, loss), kind
        assert torch.equal(expected.logits, logits), kind


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_is_linted_and_formatted(name, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(emitted(name))
    options = ["--isolated", "--line-length", "120"]
    for command in (["check", "--select", "E,F,I,UP,B,SIM,RUF,W", *options], ["format", "--diff", *options]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_without_labels_the_loss_is_none(tmp_path):
    module = load(emitted("qwen3"), tmp_path)
    stage = build(
        lambda: module.STAGES[0](ONE),
        reference("qwen3", torch.float32),
        captured("qwen3").plain.constants,
        torch.float32,
    )
    loss, logits = stage(input_ids=batches(9)["plain"]["input_ids"])
    assert loss is None and logits.shape == (3, 9, 256)


def test_equal_layers_are_one_class_and_one_loop():
    text = emitted("gemma3")
    assert text.count("\nclass ") == 8
    assert "nn.ModuleList(Gemma3DecoderLayer() for _ in range(7))" in text
    assert "if i % 3 != 2:" in text  # the third layer attends to everything, the others to the window
    assert 'self.rotary_emb(inputs_embeds, position_ids, "sliding_attention")' in text


def test_a_tied_weight_is_tied_in_the_constructor():
    assert "self.lm_head.weight = self.model.embed_tokens.weight" in emitted("gemma2")
