"""Stages of a cut model: names stay, gradients add up, equal middle stages are one class."""

import pytest
import torch

from shardc.emit import emit
from shardc.pipeline.cut import block_paths, cut
from shardc.runtime.mesh import MeshAxis
from tests.emit.tiny import FAMILIES, batches, build, captured, labels_for, load, reference

ONE = MeshAxis("tp", 1, 0)


def stages_of(name, cuts):
    model = captured(name)
    paths = block_paths(model.plain)
    by_variant = {v: cut(graph, [paths[i] for i in cuts]) for v, graph in model.variants.items()}
    return [{v: stages[k] for v, stages in by_variant.items()} for k in range(len(cuts) + 1)]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "opt", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]], ids=["two stages", "four stages"])
def test_stages_one_after_another_equal_the_model(name, cuts, tmp_path):
    stages = stages_of(name, cuts)
    module = load(emit(stages, window=FAMILIES[name].window), tmp_path)
    original = reference(name, torch.float32).eval()
    constants = captured(name).plain.constants
    built = [build(lambda make=make: make(ONE), original, constants, torch.float32).eval() for make in module.STAGES]
    for kind, batch in batches(30).items():
        packed = batch.pop("packed", False)
        labels = labels_for(batch["input_ids"])
        original.zero_grad()
        expected = original(**batch, labels=labels)
        expected.loss.backward()
        given = dict(batch, labels=labels, num_targets=module.count_targets(labels).float())
        out, received = None, {}
        for stage, graphs in zip(built, stages, strict=True):
            stage.zero_grad()
            wanted = {name for graph in graphs.values() for name in graph.inputs}
            out = stage(**received, **{k: x for k, x in given.items() if k in wanted}, packed=packed)
            received = dict(zip(next(iter(graphs.values())).outputs, out, strict=False))
        loss, logits = out
        assert torch.equal(logits, expected.logits) and torch.equal(loss, expected.loss), kind
        loss.backward()
        for path, parameter in original.named_parameters():
            names = _names(stages, path)
            parts = [dict(stage.named_parameters()) for stage in built]
            found = sum(part[n].grad for part in parts for n in names if n in part and part[n].grad is not None)
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-7, msg=f"{path}: {kind}")


def _names(stages, path):
    parameters = [p for stage in stages for p in next(iter(stage.values())).parameters.values() if p.name == path]
    return dict.fromkeys(name for p in parameters for name in (p.name, *p.aliases))


def test_equal_middle_stages_share_a_class():
    text = emit(stages_of("qwen3", [1, 2, 3]))
    assert "partial(Qwen3ForCausalLMStage1, layers=range(1, 2))" in text
    assert "partial(Qwen3ForCausalLMStage1, layers=range(2, 3))" in text
    assert "class Qwen3ForCausalLMStage2" not in text
    assert "self.model.layers = nn.ModuleDict({str(i): Qwen3DecoderLayer() for i in layers})" in text


def test_two_stages_stay_short():
    text = emit(stages_of("qwen3", [2]))
    assert text.count("\nclass ") <= 8
    assert len(text.splitlines()) <= 250
