"""boost: the same loop under each plugin trains as one process does."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardc.booster import Booster, declare_elementwise
from shardc.booster.plugin import (
    GeminiPlugin,
    GradientCheckpointConfig,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardc.errors import ShardcError
from shardc.plan.verification import RELATIVE, compare_gradients
from shardc.runtime.plan import Plan
from tests.booster.small import (
    PLUGINS,
    ROWS,
    make_loader,
    make_model,
    make_rows,
    parameter_groups,
    plugin_named,
    relative,
)
from tests.workers import Workers

HERE = "tests.booster.test_boost"


# -- gradients ---------------------------------------------------------------------------------------------------------
def gradients(name: str) -> None:
    """Of one call: every one, beside the live model's."""
    model, batch = make_model(), {key: torch.stack([row[key] for row in make_rows(ROWS)]) for key in make_rows(1)[0]}
    expected = model(**batch).loss
    expected.backward()
    reference = {key: parameter.grad for key, parameter in model.named_parameters()}
    fresh, plugin = make_model(), plugin_named(name)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    coord, rows = plugin.dp_coord, ROWS // plugin.dp_size
    loss = boosted(**{key: value[coord * rows : (coord + 1) * rows] for key, value in batch.items()}).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=RELATIVE, atol=0)
    optimizer.backward(loss)
    boosted.module.reduce_gradients()
    found = boosted.module.gather_gradients()
    if boosted.module.mesh.rank == 0:
        worst = compare_gradients(found, reference)[0]
        assert worst.error <= worst.bound, worst


@pytest.mark.parametrize("name", PLUGINS)
def test_every_gradient_is_that_of_one_process(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:gradients", name)


# -- loops -------------------------------------------------------------------------------------------------------------
def one_process(kind: str, arguments: dict[str, Any], steps: int) -> list[float]:
    """Losses of a plain loop."""
    model = make_model()
    optimizer = getattr(torch.optim, kind)(list(parameter_groups(model)), **arguments)
    losses = []
    for batch in make_loader(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def boosted_loop(name: str, kind: str, arguments: dict[str, Any], steps: int) -> list[float]:
    """The same under a plugin."""
    model, plugin = make_model(), plugin_named(name)
    optimizer = getattr(torch.optim, kind)(list(parameter_groups(model)), **arguments)
    booster = Booster(plugin=plugin)
    loader = make_loader(steps, ROWS // plugin.dp_size)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Rates at which six steps change the loss, and rounding of float32 does not grow.
OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-3, "amsgrad": True},
    "AdamW": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3, "centered": True, "momentum": 0.5},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.05},
}


def all_optimizers(name: str) -> None:
    """Each of them: two groups with rates and decays of their own; Rprop has no decay."""
    for kind, arguments in OPTIMIZERS.items():
        difference = relative(boosted_loop(name, kind, arguments, 6), one_process(kind, arguments, 6))
        assert difference < 2e-5, (kind, difference)


@pytest.mark.parametrize("name", ["tp2", "gemini", "fsdp"])
def test_elementwise_optimizers_of_torch_keep_their_groups(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:all_optimizers", name)


def test_rprop_too() -> None:
    model, reference = make_model(), make_model()
    boosted, optimizer, *_ = Booster().boost(model, torch.optim.Rprop(model.parameters(), lr=1e-3))
    plain = torch.optim.Rprop(reference.parameters(), lr=1e-3)
    for batch in make_loader(6):
        loss, expected = boosted(**batch).loss, reference(**batch).loss
        torch.testing.assert_close(loss, expected, rtol=2e-5, atol=0)
        optimizer.backward(loss)
        expected.backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()


def interrupted_loop(name: str) -> None:
    """Evaluation before and between steps, a result that is thrown away, no_sync, logits read on one rank."""
    model, plugin = make_model(), plugin_named(name, max_norm=0.5)
    reference = make_model()
    booster = Booster(plugin=plugin)
    loader = make_loader(6, ROWS // plugin.dp_size)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, _, loader, _ = booster.boost(model, adamw, None, loader)
    plain, clips = torch.optim.AdamW(reference.parameters(), lr=1e-3), hasattr(plugin, "max_norm")
    global_batches = list(make_loader(6))
    for step, (batch, whole) in enumerate(zip(loader, global_batches, strict=True)):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            outputs, expected = model(**batch), reference(**whole)
            torch.testing.assert_close(outputs.loss, expected.loss, rtol=2e-5, atol=0)
            if model.module.mesh.rank == 0:
                rows = ROWS // plugin.dp_size
                torch.testing.assert_close(outputs.logits, expected.logits[:rows], rtol=1e-4, atol=1e-4)
        model(**batch)  # thrown away
        expected = reference(**whole).loss / 2
        expected.backward()
        if step % 2 == 0:
            with booster.no_sync(model, optimizer):
                booster.backward(model(**batch).loss / 2, optimizer)
            continue
        loss = model(**batch).loss / 2
        assert repr(loss)
        booster.backward(loss, optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", PLUGINS)
def test_evaluation_unused_results_and_no_sync_change_nothing(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:interrupted_loop", name)


def recomputed(name: str) -> None:
    """gradient_checkpointing_enable of the live model, then of the boosted one, off and on."""
    model, plugin = make_model(), plugin_named(name)
    model.gradient_checkpointing_enable()
    expected = one_process("SGD", {"lr": 0.05}, 3)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.SGD(list(parameter_groups(model)), lr=0.05)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, make_loader(3, ROWS // plugin.dp_size))
    runs = []
    for stage in model.module.stages.values():
        for part in stage.modules():
            if type(part).__name__.endswith("Attention"):
                part.register_forward_hook(lambda *_: runs.append(1))
    once = None
    for step, batch in enumerate(loader):
        if step == 1:
            model.gradient_checkpointing_disable()
        elif step == 2:
            model.gradient_checkpointing_enable()
        before = len(runs)
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.item(), expected[step], rtol=2e-5, atol=0)
        ran = len(runs) - before
        once = ran if step == 1 else once
        if step != 1:
            assert ran == 2 * (once or ran // 2)


@pytest.mark.parametrize("name", ["tp2_pp2_zero1", "gemini", "fsdp"])
def test_gradient_checkpointing(workers: Workers, name: str) -> None:
    workers.run(4, f"{HERE}:recomputed", name)


@pytest.mark.parametrize("plugin", [TorchDDPPlugin, GeminiPlugin])
def test_a_model_that_is_dropped_frees_its_memory(plugin: type) -> None:
    """A script that boosts another model after it has room for it."""

    def train() -> list[weakref.ref]:
        model = make_model()
        booster = Booster(plugin=plugin() if plugin is TorchDDPPlugin else plugin(precision="fp32"))
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        booster.backward(model(**next(iter(make_loader(1)))).loss, optimizer)
        optimizer.step()
        return [weakref.ref(chunk) for chunk in model.module.state.chunks]

    chunks = train()
    gc.collect()
    assert chunks and all(chunk() is None for chunk in chunks)


def test_the_lowest_limit_of_the_norm_holds_for_one_step() -> None:
    """Of clip_grad_by_norm and the plugin; zero_grad forgets it, as it forgets the gradients."""
    model, booster = make_model(), Booster(plugin=LowLevelZeroPlugin(1, "fp32", max_norm=0.1))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    (batch,) = make_loader(1)
    for limits, moved in (((0.01, 0.05), 0.01), ((), 0.1), ((0.2,), 0.1)):
        if limits == (0.2,):
            booster.backward(model(**batch).loss, optimizer)
            optimizer.clip_grad_by_norm(1e-6)
            optimizer.zero_grad()
        booster.backward(model(**batch).loss, optimizer)
        for limit in limits:
            optimizer.clip_grad_by_norm(limit)
        before = {name: value.clone() for name, value in model.module.gather_parameters().items()}
        optimizer.step()
        after = model.module.gather_parameters()
        distance = sum(float((after[name] - before[name]).square().sum()) for name in after) ** 0.5
        assert distance == pytest.approx(moved, rel=1e-3)
        model.zero_grad()


def test_options_of_the_plugin_reach_the_state() -> None:
    """Sizes of chunks and the dtype of masters; the mode stays the model's own."""
    plugin = LowLevelZeroPlugin(1, "bf16", reduce_bucket_size_in_m=0.004, master_weights=False)
    model = make_model().eval()
    boosted, *_ = Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    masters = boosted.module.state.masters(0)
    largest = max(parameter.numel() for parameter in model.parameters())
    assert max(master.numel() for master in masters) < max(largest, 0.004 * 2**20) + 1024
    assert {master.dtype for master in masters} == {torch.bfloat16}
    assert not boosted.training and not boosted.module.training


def test_options_of_fsdp_reach_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = TorchFSDPPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=mixed)
    build, given = Plan.build, []

    def recorded(self: Plan, *args: Any, **arguments: Any) -> Any:
        given.append(arguments["options"])
        return build(self, *args, **arguments)

    monkeypatch.setattr(Plan, "build", recorded)
    boosted, *_ = Booster(plugin=plugin).boost(make_model())
    assert boosted.dtype is torch.bfloat16
    assert (given[0].communication_dtype, given[0].reshard_after_forward) == (torch.float32, False)


# -- what boost refuses ------------------------------------------------------------------------------------------------
class Centred(torch.optim.SGD):
    """Not elementwise, unless declared."""


def test_optimizers_that_are_not_elementwise_are_refused_by_name() -> None:
    model = make_model()
    for optimizer in (torch.optim.LBFGS(model.parameters()), Centred(model.parameters(), lr=0.1)):
        with pytest.raises(ShardcError, match=rf"{type(optimizer).__name__}.*\bAdamW\b"):
            Booster().boost(model, optimizer)
    declare_elementwise(Centred)
    assert Booster().boost(model, Centred(model.parameters(), lr=0.1))[1] is not None


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ShardcError, match=r"parameter 0 of group 0, \[101, 32\], is not of the model"):
        Booster().boost(make_model(), torch.optim.SGD(make_model().parameters(), lr=0.1))


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**next(iter(make_loader(1)))).loss.backward()
    optimizer.step()
    with pytest.raises(ShardcError, match="has taken steps before boost"):
        Booster().boost(model, optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model",), "model is str, no nn.Module"),
        ((nn.Linear(1, 1), [1]), "optimizer is list"),
        ((nn.Linear(1, 1), None, 3), "criterion is int"),
        ((nn.Linear(1, 1), None, None, None, 3), "lr_scheduler is int"),
    ],
)
def test_arguments_in_another_order_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ShardcError, match=message):
        Booster().boost(*arguments)


def test_a_boosted_model_is_not_boosted_again() -> None:
    boosted, *_ = Booster().boost(make_model())
    with pytest.raises(ShardcError, match="the model is a BoostedModel"):
        Booster().boost(boosted)


def test_a_schedule_of_the_undivided_length_is_refused(workers: Workers) -> None:
    workers.run(2, f"{HERE}:undivided_schedule")


def undivided_schedule() -> None:
    model, loader = make_model(), make_loader(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    with pytest.raises(ShardcError, match="an epoch has 2 steps, so it should be 2"):
        Booster(plugin=TorchDDPPlugin()).boost(model, optimizer, None, loader, schedule)


def test_parameters_outside_the_optimizer_are_frozen_and_named() -> None:
    model = make_model()
    trained = [p for name, p in model.named_parameters() if "layers.1" in name]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with pytest.warns(UserWarning, match=r"frozen: model.embed_tokens.weight, model.layers.0"):
        boosted, optimizer, *_ = Booster().boost(model, optimizer)
    before = boosted.module.gather_parameters()
    before = {name: value.clone() for name, value in before.items()}
    optimizer.backward(boosted(**next(iter(make_loader(1)))).loss)
    optimizer.step()
    after = boosted.module.gather_parameters()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "layers.1" in name}


# -- what else a plugin says -------------------------------------------------------------------------------------------
def different_batches() -> None:
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
    boosted, *_ = Booster(plugin=plugin).boost(make_model())
    rank = boosted.module.mesh.rank
    with pytest.raises(ShardcError, match="were given different input_ids, labels"):
        boosted(**next(iter(make_loader(1, seed=rank))))


def test_ranks_of_one_replica_must_be_given_the_same_batch(workers: Workers) -> None:
    workers.run(2, f"{HERE}:different_batches")


POLICY = """
models: [qwen3]
rules:
  "*.mlp.{gate,up}_proj": column
  "*.mlp.down_proj": row
pipeline: {blocks: "model.layers.*", cuts: auto}
"""


def own_policy(policy: str) -> None:
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", policy=policy)
    boosted, *_ = Booster(plugin=plugin).boost(make_model())
    specs = boosted.module.spec.parameters
    split = {name.rpartition(".")[0].rpartition(".")[2] for name, spec in specs.items() if spec.shard is not None}
    assert split == {"gate_proj", "up_proj", "down_proj"}
    with torch.no_grad():
        batch = next(iter(make_loader(1)))
        torch.testing.assert_close(boosted(**batch).loss, make_model()(**batch).loss, rtol=1e-5, atol=0)


def test_the_users_policy_is_used(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(POLICY)
    workers.run(2, f"{HERE}:own_policy", str(path))


def test_gradient_checkpoint_config_counts_layers() -> None:
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=1, precision="fp32", gradient_checkpoint_config=GradientCheckpointConfig(0.5)
    )
    boosted, *_ = Booster(plugin=plugin).boost(make_model())
    layers = boosted.module.stages["0"].model.layers
    assert ["forward" in vars(layer) for layer in layers] == [True, False]


def test_a_booster_without_plugin_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        boosted, *_ = Booster(mixed_precision="bf16").boost(make_model())
    assert boosted.dtype is torch.bfloat16


def test_booster_refuses_what_is_no_plugin_and_no_precision() -> None:
    with pytest.raises(ShardcError, match="plugin='gemini' is no plugin"):
        Booster(plugin="gemini")
    with pytest.raises(ShardcError, match="mixed_precision='fp8'; valid: fp16, bf16, fp32"):
        Booster(mixed_precision="fp8")
