"""What users of other ZeRO implementations run into (CASES: ZeRO), under every plugin."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardc.booster import Booster
from shardc.errors import ShardcError
from tests.booster.small import ROWS, make_loader, make_model, plugin_named, relative
from tests.end_to_end.user_model import Decoder
from tests.workers import Workers

HERE = "tests.booster.test_zero"
SHARDED = ["gemini", "fsdp", "pp2_zero3"]


def held(name: str) -> None:
    """A small model is sharded too: the dp ranks together hold each parameter once, but for padding."""
    model, plugin = make_model(hidden_size=64, intermediate_size=160), plugin_named(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total < 100_000
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in key)  # frozen ones are sharded as well
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, *_ = Booster(plugin=plugin).boost(model, torch.optim.AdamW(trained))
    storages = {}
    for parameter in (*model.module.parameters(), *model.module.state.masters(0)):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes() // 4
    for chunk in getattr(model.module.state, "chunks", ()):
        storages[chunk.shard.untyped_storage().data_ptr()] = chunk.shard.untyped_storage().nbytes() // 4
    everywhere = torch.tensor(sum(storages.values()))
    dist.all_reduce(everywhere)
    tied = model.module.spec.parameters["model.embed_tokens.weight"].shape
    bound = total * 1.1 + (tied[0] * tied[1] if plugin.pp_size > 1 else 0)
    assert total <= everywhere <= bound, (total, everywhere)


@pytest.mark.parametrize("name", SHARDED)
def test_a_small_model_is_sharded_frozen_parameters_too(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:held", name)


def lengths(name: str) -> None:
    """Evaluation before the first step; each step has another sequence length."""
    plugin, reference = plugin_named(name), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    model = make_model()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, expected = [], []
    rows = ROWS // plugin.dp_size
    for step, whole in enumerate(make_loader(4)):
        whole = {key: value[:, : 12 - 3 * (step % 2) - step // 2] for key, value in whole.items()}
        batch = {key: value[plugin.dp_coord * rows : (plugin.dp_coord + 1) * rows] for key, value in whole.items()}
        with torch.no_grad():
            losses.append(model.eval()(**batch).loss.item())
            expected.append(reference.eval()(**whole).loss.item())
        loss, wanted = model.train()(**batch).loss, reference.train()(**whole).loss
        booster.backward(loss, optimizer)
        wanted.backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
        losses.append(loss.item())
        expected.append(wanted.item())
    assert relative(losses, expected) < 2e-5


@pytest.mark.parametrize("name", ["zero2", "fsdp", "gemini", "tp2_pp2_zero1"])
def test_evaluation_before_the_first_step_and_other_lengths(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:lengths", name)


def frozen(name: str) -> None:
    """Frozen parameters, some of them below trained ones, stay; the others go as in one process."""
    plugin, reference, model = plugin_named(name), make_model(), make_model()
    for network in (reference, model):
        for key, parameter in network.named_parameters():
            parameter.requires_grad_("embed" not in key and "layers.1.mlp" not in key)
    # eps: rounding of tiny gradients is no step of the learning rate's size
    plain = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=1e-3, eps=1e-4, weight_decay=0.5
    )
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4, weight_decay=0.5)
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, adamw, None, make_loader(3, ROWS // plugin.dp_size))
    for batch, whole in zip(loader, make_loader(3), strict=True):
        booster.backward(model(**batch).loss, optimizer)
        reference(**whole).loss.backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
    found = model.module.gather_parameters()
    if model.module.mesh.rank == 0:
        for key, parameter in reference.named_parameters():
            torch.testing.assert_close(found[key], parameter.detach(), rtol=1e-4, atol=1e-5, msg=key)
            assert parameter.requires_grad or torch.equal(found[key], parameter), key


@pytest.mark.parametrize("name", ["zero1", "fsdp", "gemini", "tp2_pp2_zero1"])
def test_frozen_parameters_stay(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:frozen", name)


def failed_backward(name: str) -> None:
    """A backward pass that fails midway, as for want of memory: no step on part of the gradients; then all goes on."""
    plugin, reference, model = plugin_named(name), make_model(), make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(
        model, sgd, None, make_loader(3, ROWS // plugin.dp_size)
    )
    (stage,) = model.module.stages.values()

    def fail(*_: object) -> None:
        raise MemoryError

    for step, (batch, whole) in enumerate(zip(loader, make_loader(3), strict=True)):
        if step == 1:
            handle = stage.model.layers[0].mlp.register_full_backward_hook(fail)
            with pytest.raises(MemoryError):
                optimizer.backward(model(**batch).loss)
            handle.remove()
            with pytest.raises(ShardcError, match=r"backward pass failed .*\n  call optimizer.zero_grad\(\)"):
                optimizer.step()
            optimizer.zero_grad()
        loss, expected = model(**batch).loss, reference(**whole).loss
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-5, atol=0)
        optimizer.backward(loss)
        expected.backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()


@pytest.mark.parametrize("name", ["zero1", "fsdp", "gemini"])
def test_a_backward_that_fails_is_not_stepped_on(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:failed_backward", name)


class WithSpare(Decoder):
    """A parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


def test_a_parameter_that_is_never_used_is_named() -> None:
    with pytest.raises(ShardcError, match=r"spare\.weight: neither the loss nor the logits are computed from this"):
        Booster().boost(WithSpare())
