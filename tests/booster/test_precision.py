"""fp16 with a loss scale that all ranks agree on, bf16 with float32 masters, and what is said of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardc.booster import Booster
from shardc.booster.loss_scale import LossScaler
from shardc.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from shardc.booster.plugin.recipe import ScalerSettings
from shardc.errors import ShardcError
from tests.booster.small import PLUGINS, ROWS, make_loader, make_model, plugin_named, relative
from tests.workers import Workers

HERE = "tests.booster.test_precision"
SCALED = {
    "zero1": lambda **kw: LowLevelZeroPlugin(1, "fp16", **kw),
    "zero2": lambda **kw: LowLevelZeroPlugin(2, "fp16", **kw),
    "gemini": lambda **kw: GeminiPlugin(precision="fp16", **kw),
    "tp2": lambda **kw: HybridParallelPlugin(2, 1, precision="fp16", **kw),
    "tp2_pp2_zero1": lambda **kw: HybridParallelPlugin(2, 2, precision="fp16", zero_stage=1, num_microbatches=2, **kw),
    "pp2_zero3": lambda **kw: HybridParallelPlugin(1, 2, precision="fp16", zero_stage=3, num_microbatches=2, **kw),
}


# -- fp16 --------------------------------------------------------------------------------------------------------------
def overflow_on_one_rank(name: str) -> None:
    """In step 2 rank 0 alone has infinite gradients: all skip, the scale halves, the schedule waits."""
    plugin = SCALED[name](initial_scale=2**10, hysteresis=1, max_norm=1.0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    booster = Booster(plugin=plugin)
    loader = make_loader(4, ROWS // plugin.dp_size)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)
    rank, losses, scales, rates = model.module.mesh.rank, [], [], []
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        assert loss.dtype is torch.float32
        before = {key: value.clone() for key, value in model.module.gather_parameters().items()}
        booster.backward(loss * float("inf") if (rank, step) == (0, 2) else loss, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        after = model.module.gather_parameters()
        assert optimizer.skipped == (step == 2)
        if rank == 0:
            changed = any(not torch.equal(before[key], after[key]) for key in before)
            assert changed == (step != 2)
        assert torch.isfinite(optimizer.get_grad_norm()) == (step != 2)
        losses.append(loss.item())
        scales.append(optimizer.scaler.value)
        rates.append(optimizer.param_groups[0]["lr"])
    assert scales == [1024, 1024, 512, 512]
    assert rates == pytest.approx([1e-3 / 2, 1e-3 / 3, 1e-3 / 3, 1e-3 / 4])
    assert relative(losses, float32_losses(skipped=2)) < 5e-3


def float32_losses(skipped: int) -> list[float]:
    """The same in one process, in float32."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step, batch in enumerate(make_loader(4)):
        loss = model(**batch).loss
        losses.append(loss.item())
        if step != skipped:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", SCALED)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:overflow_on_one_rank", name)


def gradients_do_not_underflow(name: str) -> None:
    """A loss of a millionth of the usual one: its fp16 gradients are zero without the scale, exact enough with it."""
    norms = []
    targets = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in make_loader(1))
    for share, scale in ((1, 2.0**8), (10**6, 2.0**27)):
        plugin = SCALED[name](initial_scale=scale, max_norm=1.0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        booster = Booster(plugin=plugin)
        loader = make_loader(1, ROWS // plugin.dp_size)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
        for batch in loader:
            booster.backward(model(**batch, num_items_in_batch=targets * share).loss, optimizer)
            optimizer.step()
        assert not optimizer.skipped
        norms.append(optimizer.get_grad_norm().item() * share)
    assert relative(norms[:1], norms[1:]) < 1e-2


@pytest.mark.parametrize("name", ["zero1", "tp2_pp2_zero1"])
def test_small_gradients_of_fp16_do_not_underflow(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:gradients_do_not_underflow", name)


def test_a_scale_that_is_too_large_comes_down_and_training_goes_on() -> None:
    model = make_model()
    booster = Booster(plugin=LowLevelZeroPlugin(1, "fp16"))  # its scale begins at 2**32
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in make_loader(30):
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), optimizer.skipped))
    assert losses[0][1] and not losses[-1][1]
    assert optimizer.scaler.value < 2**32
    assert losses[-1][0] < losses[0][0]


def test_backward_without_the_booster_is_refused_in_fp16() -> None:
    for plugin in (LowLevelZeroPlugin(1, "fp16"), HybridParallelPlugin(1, 1, precision="fp16", num_microbatches=2)):
        model = make_model()
        model, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = next(iter(make_loader(1)))
        with pytest.raises(ShardcError, match=r"booster\.backward\(loss, optimizer\)"):
            model(**batch).loss.backward()
        optimizer.backward(model(**batch).loss)
        optimizer.step()


# (overflows, then the expected scales), from a scale of 8; growth after 3 good steps
SCALES: list[tuple[dict[str, Any], list[bool], list[float]]] = [
    ({"hysteresis": 1}, [True, True, False, False, False], [4, 2, 2, 2, 4]),
    ({"hysteresis": 2}, [True, True, True, False], [8, 4, 2, 2]),
    ({"hysteresis": 2}, [True, False, False, False, True, True], [8, 8, 8, 16, 16, 8]),
    ({"hysteresis": 1, "min_scale": 3.0}, [True, True], [4, 3]),
    ({"hysteresis": 1, "max_scale": 12.0}, [False] * 6, [8, 8, 12, 12, 12, 12]),
    ({"hysteresis": 1}, [False, False, True, False, False, False], [8, 8, 4, 4, 4, 8]),
]


@pytest.mark.parametrize(("settings", "overflows", "expected"), SCALES)
def test_the_scale_follows_its_settings(settings: dict, overflows: list[bool], expected: list[float]) -> None:
    scaler = LossScaler(ScalerSettings(initial_scale=8.0, growth_interval=3, **settings), torch.device("cpu"))
    scales = []
    for overflowed in overflows:
        scaler.update(overflowed)
        scales.append(scaler.value)
        assert scaler.scale.item() == scaler.value
    assert scales == expected
    again = LossScaler(ScalerSettings(), torch.device("cpu"))
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict() and again.scale.item() == scaler.value


# -- bf16 --------------------------------------------------------------------------------------------------------------
def master_values(name: str) -> None:
    """The masters of a float32 model that trains in bf16 hold its float32 values, bit for bit."""
    plugin = plugin_named(name, "bf16")
    model = make_model()
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-3)
    booster = Booster(plugin=plugin, mixed_precision=None if plugin.control_precision() else "bf16")
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    state = boosted.module.state
    seen = 0
    for key, value in make_model().named_parameters():
        spec = boosted.module.spec.by_any_name().get(key)
        piece = None if spec is None else state.piece(spec.name)
        if piece is None or piece.master is None or spec.shard is not None:
            continue
        assert piece.master.dtype is torch.float32
        held = piece.master.data.view(-1)[piece.start : piece.start + piece.numel]
        assert torch.equal(held, value.detach().flatten()[piece.offset : piece.offset + piece.numel])
        seen += 1
    assert seen
    assert boosted.dtype is torch.bfloat16


@pytest.mark.parametrize("name", PLUGINS)
def test_masters_are_the_models_own_float32_values(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:master_values", name)


def bf16_losses_with_masters(rate: float, steps: int) -> list[float]:
    """One process: bf16 forward and backward, float32 masters and AdamW."""
    model, masters = make_model().bfloat16(), make_model()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=rate)
    losses = []
    for batch in list(make_loader(1)) * steps:
        loss = model(**batch).loss
        loss.backward()
        for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


def small_updates(name: str) -> None:
    """Updates far below the resolution of bf16 add up in the masters."""
    plugin = plugin_named(name, "bf16")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-5)
    booster = Booster(plugin=plugin, mixed_precision=None if plugin.control_precision() else "bf16")
    loader = make_loader(1, ROWS // plugin.dp_size)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    (batch,) = loader
    losses = []
    for _ in range(30):
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expected = bf16_losses_with_masters(4e-5, 30)
    fall, expected_fall = losses[0] - losses[-1], expected[0] - expected[-1]
    assert expected_fall > 0.02
    assert abs(fall - expected_fall) < 0.15 * expected_fall, (fall, expected_fall)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gemini", "tp2_pp2_zero1"])
def test_updates_below_the_resolution_of_bf16_add_up(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:small_updates", name)


# -- outputs and choices -----------------------------------------------------------------------------------------------
def test_outputs_are_cast_where_the_plugin_says() -> None:
    for forced, expected in ((False, torch.bfloat16), (True, torch.float32)):
        model, *_ = Booster(plugin=GeminiPlugin(precision="bf16", force_outputs_fp32=forced)).boost(make_model())
        with torch.no_grad():
            assert model(**next(iter(make_loader(1)))).logits.dtype is expected


def test_floating_inputs_are_cast_unless_the_plugin_says_not() -> None:
    seen = []

    def criterion(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch["attention_mask"].dtype)
        return outputs.logits.float().mean()

    for casts, expected in ((True, torch.bfloat16), (False, torch.float32)):
        plugin = LowLevelZeroPlugin(1, "bf16", cast_inputs=casts)
        model, *_ = Booster(plugin=plugin).boost(make_model(), criterion=criterion)
        (batch,) = make_loader(1)
        with torch.no_grad():
            model(**batch, attention_mask=torch.ones(batch["input_ids"].shape))
        assert seen.pop() is expected


def test_a_model_of_mixed_dtypes_needs_a_precision() -> None:
    model = make_model()
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(ShardcError, match=r'precision="bf16"'):
        Booster().boost(model)


def test_mixed_precision_beside_a_plugin_with_its_own_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="mixed_precision='bf16' has no effect beside GeminiPlugin"):
        Booster(mixed_precision="bf16", plugin=GeminiPlugin(precision="fp32"))
