"""What a plain script does beside the documented loop: it is exact, or the error names the replacement."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardc.booster import Booster
from shardc.booster.model import BoostedModel
from shardc.booster.optimizer import BoostedOptimizer
from shardc.errors import ShardcError
from tests.booster.small import PLUGINS, ROWS, make_loader, make_model, plugin_named
from tests.workers import Workers

HERE = "tests.booster.test_plain_scripts"


def boosted(name: str) -> tuple[BoostedModel, BoostedOptimizer, list[dict[str, torch.Tensor]]]:
    """Model, optimizer, and this rank's batches of three steps."""
    model, plugin = make_model(), plugin_named(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = make_loader(3, ROWS // plugin.dp_size)
    model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(model, optimizer, None, loader)
    return model, optimizer, list(loader)


def backward_of_the_loss(name: str) -> None:
    """loss.backward() in place of booster.backward: exact."""
    model, optimizer, batches = boosted(name)
    reference = make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    for batch, whole in zip(batches, make_loader(3), strict=True):
        loss, expected = model(**batch).loss, reference(**whole).loss
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-5, atol=0)
        (loss * 3).backward()
        (expected * 3).backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()


def gradients_of_parameters(name: str) -> None:
    """clip_grad_norm_, .grad, a penalty over them: not there, and said so, before any step goes wrong."""
    model, optimizer, batches = boosted(name)
    with pytest.raises(ShardcError, match=r"SGD\.step: the optimizer was boosted, and this is not what boost returned"):
        optimizer.unwrap().step()
    with pytest.raises(ShardcError, match="backward: given SGD, not the optimizer that boost returned"):
        Booster().backward(model(**batches[0]).loss, optimizer.unwrap())
    splits = plugin_named(name).recipe.placement == "zero3"
    expected = "gather_parameters" if splits else r"weight_decay"
    with pytest.raises(ShardcError, match=expected):
        (model(**batches[0]).loss + sum(parameter.pow(2).sum() for parameter in model.parameters())).backward()
    optimizer.zero_grad()
    model(**batches[0]).loss.backward()
    with pytest.raises(ShardcError, match=r"max_norm=.*clip_grad_by_norm"):
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    with pytest.raises(ShardcError, match=r"max_norm=.*clip_grad_by_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ShardcError, match=r"optimizer\.clip_grad_by_norm"):
        next(model.parameters()).grad  # noqa: B018
    with pytest.raises(ShardcError, match="freeze parameters before boost"):
        model.requires_grad_(False)
    reference = make_model()
    reference(**next(iter(make_loader(3)))).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
    torch.testing.assert_close(optimizer.clip_grad_by_norm(0.25), expected, rtol=1e-5, atol=0)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.5)
    optimizer.step()
    sgd.step()
    found = model.module.gather_parameters()
    if model.module.mesh.rank == 0:
        for key, parameter in reference.named_parameters():
            torch.testing.assert_close(found[key], parameter.detach(), rtol=1e-4, atol=1e-5)


def saving_and_moving(name: str) -> None:
    """save_pretrained, state_dict and the like name what does it here; to() the same device is nothing."""
    model, optimizer, _ = boosted(name)
    with pytest.raises(ShardcError, match=r"booster\.save_model\(model, 'out', shard=True\)"):
        model.save_pretrained("out")
    for call, named in (
        (model.state_dict, "save_model"),
        (lambda: model.load_state_dict({}), "load_model"),
        (optimizer.state_dict, "save_optimizer"),
        (lambda: optimizer.load_state_dict({}), "load_optimizer"),
        (lambda: optimizer.add_param_group({}), "before boost"),
        (lambda: copy.deepcopy(model), "save_model"),
        (lambda: pickle.dumps(optimizer), "save_optimizer"),
        (lambda: next(model.parameters()).mul_(2), "load_model"),
        (lambda: setattr(next(model.parameters()), "data", torch.zeros(1)), "load_model"),
        (lambda: next(model.parameters()).register_hook(print), "get_grad_norm"),
        (model.half, "precision="),
        (lambda: model.to(torch.bfloat16), "precision="),
    ):
        with pytest.raises(ShardcError, match=named):
            call()
    assert model.to("cpu") is model
    assert model.num_parameters() == sum(p.numel() for p in make_model().parameters())
    assert model.config.hidden_size == 32


def generating(name: str) -> None:
    """generate names from_pretrained."""
    model, _, batches = boosted(name)
    with pytest.raises(ShardcError, match=r"from_pretrained\(folder\) and generate"):
        model.generate(batches[0]["input_ids"])


def logits_of_a_training_call(name: str) -> None:
    """On one rank only: read, or refused, and no rank waits. A backward through them is refused."""
    model, optimizer, batches = boosted(name)
    outputs = model(**batches[0])
    if model.module.mesh.rank == 0:
        assert "loss" in repr(outputs)
        try:
            logits = outputs.logits
        except ShardcError as error:
            assert "no_grad" in str(error)
        else:
            expected = make_model()(**next(iter(make_loader(3)))).logits[: logits.shape[0]]
            torch.testing.assert_close(logits.detach(), expected.detach(), rtol=1e-4, atol=1e-4)
            with pytest.raises(ShardcError, match=r"boost\(criterion="):
                logits.sum().backward()
    optimizer.zero_grad()
    with torch.no_grad():
        outputs = model(**batches[0])
    if model.module.mesh.rank == 0:
        assert outputs.logits.shape == (len(batches[0]["input_ids"]), 12, 101)


CHECKS = [backward_of_the_loss, gradients_of_parameters, saving_and_moving, generating, logits_of_a_training_call]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("name", PLUGINS)
def test_plain(workers: Workers, name: str, check: str) -> None:
    workers.run(4, f"{HERE}:{check}", name)


SCRIPT = """
import shardc
from shardc.booster.plugin import {plugin}
shardc.launch_from_torch()
plugin = {plugin}({arguments})
print(plugin.dp_size)
"""


@pytest.mark.parametrize(
    ("plugin", "arguments", "expected"),
    [
        ("GeminiPlugin", "", None),
        ("HybridParallelPlugin", "tp_size=2, pp_size=2", "tp_size=2 * pp_size=2 = 4 does not divide the 1 process"),
    ],
)
def test_python_without_a_launcher_is_one_process(
    tmp_path: Path, plugin: str, arguments: str, expected: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(plugin=plugin, arguments=arguments))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    if expected is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert expected in done.stderr
        assert "shardc run --nproc_per_node 4" in done.stderr
