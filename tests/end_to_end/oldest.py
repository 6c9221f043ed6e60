"""One of two ranks under the oldest transformers: every family is compiled and proved, one is trained.

`shardc run --nproc_per_node 2 -m tests.end_to_end.oldest FOLDER`; test_oldest.py starts it.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import shardc
from shardc.booster import Booster
from shardc.booster.plugin import HybridParallelPlugin
from shardc.plan.verification import make_batch, perturbed_model, vocabulary_of
from tests.capture.families import PRESETS
from tests.capture.test_branches import test_longrope_is_exact_on_both_sides_of_its_original_length as check_longrope
from tests.end_to_end.exact import Layout, compile_layout, small

LR = 0.1


def compile_families(names: list[str]) -> list[str]:
    """Compile each at a small size; a plan that is not proved is an error. Returns the names."""
    layout = Layout(tp=2, pp=2)
    for name in names:
        compile_layout(small(PRESETS[name], layout), layout)
    return names


def train_as_one_process_does(folder: Path) -> None:
    """An OPT, whose code has changed most since, over two ranks: losses, and each parameter after the last step."""
    source = small(PRESETS["opt"], Layout(tp=2), dropout=0.0, attention_dropout=0.0)
    model = perturbed_model(source).train()
    reference = copy.deepcopy(model)
    batches = [
        make_batch(model, rows=4, vocabulary=vocabulary_of(source), padding=padding, length=length)
        for padding, length in zip(("none", "left", "right"), (13, 9, 11), strict=True)
    ]
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, *_ = booster.boost(model, optimizer)
    sgd = torch.optim.SGD(reference.parameters(), lr=LR)
    for batch in batches:
        expected = reference(**batch).loss
        expected.backward()
        sgd.step()
        sgd.zero_grad()
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0.0)
    booster.save_model(model, folder / "trained", shard=True)
    trained = dict(transformers.AutoModelForCausalLM.from_pretrained(folder / "trained").named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


def main(folder: Path) -> None:
    shardc.launch_from_torch()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    compiled = compile_families(list(PRESETS)[rank::ranks])
    if rank == ranks - 1:
        check_longrope()  # transformers of that age branches on positions
    train_as_one_process_does(folder)
    found = {"transformers": transformers.__version__, "compiled": compiled}
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
