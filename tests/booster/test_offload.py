"""Gemini's fractions and cpu_offload: what a script does, with parameters and states in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardc.booster import Booster
from shardc.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Plugin
from tests.booster.small import ROWS, make_loader, make_model, train_on
from tests.booster.test_checkpoints import SAVED_AFTER
from tests.workers import Workers

HERE = "tests.booster.test_offload"
CHECKPOINTS = "tests.booster.test_checkpoints"
PLUGINS = {
    "gemini_half": lambda **kw: GeminiPlugin(
        offload_optim_frac=0.5, offload_param_frac=0.5, shard_param_frac=0.5, **kw
    ),
    "gemini_all": lambda **kw: GeminiPlugin(offload_optim_frac=1.0, offload_param_frac=1.0, **kw),
    "gemini_accumulates": lambda **kw: GeminiPlugin(offload_optim_frac=1.0, enable_gradient_accumulation=True, **kw),
    "zero1": lambda **kw: LowLevelZeroPlugin(stage=1, cpu_offload=True, **kw),
    "pp2_zero3": lambda **kw: HybridParallelPlugin(1, 2, zero_stage=3, num_microbatches=2, cpu_offload=True, **kw),
}


def parameters_after(plugin: Plugin, steps: int = 4) -> dict[str, torch.Tensor]:
    """On rank 0, after clipped steps with a schedule, an evaluation after each, and in fp16 an overflow."""
    torch.manual_seed(0)
    model, booster = make_model(num_hidden_layers=3), Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = make_loader(steps, ROWS // plugin.dp_size)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)
    for batch in loader:
        train_on(batch, booster, model, optimizer, schedule)
        with torch.no_grad():
            model(**batch)
    return model.module.gather_parameters()


def trains(name: str, precision: str) -> None:
    """Bit by bit as without offload."""
    settings = {"precision": precision, "max_norm": 0.5}
    if precision == "fp16":
        settings |= {"initial_scale": 2.0**20, "hysteresis": 1}  # the first step overflows
    found = parameters_after(PLUGINS[name](**settings))
    same = {"pp2_zero3": HybridParallelPlugin(1, 2, zero_stage=3, num_microbatches=2, **settings)}
    expected = parameters_after(same.get(name) or GeminiPlugin(**settings))
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offload_changes_no_bit(workers: Workers, name: str, precision: str) -> None:
    workers.run(4, f"{HERE}:trains", name, precision)


def recomputes(plugin: Plugin) -> dict[str, torch.Tensor]:
    """On rank 0, after steps with recomputed layers that zero the gradients late; the first one overflows."""
    model, booster = make_model(), Booster(plugin=plugin)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, make_loader(4, ROWS // plugin.dp_size))
    skipped = []
    for batch in loader:
        loss = model(**batch).loss
        optimizer.zero_grad()
        booster.backward(loss, optimizer)
        optimizer.step()
        skipped.append(optimizer.skipped)
    assert skipped[0] and not all(skipped)
    return model.module.gather_parameters()


def recomputes_alike() -> None:
    settings = {"precision": "fp16", "max_norm": 0.5, "initial_scale": 2.0**20, "hysteresis": 1}
    expected = recomputes(GeminiPlugin(**settings))
    found = recomputes(PLUGINS["gemini_all"](**settings))
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_skipped_step_and_recomputation_where_gradients_replace_parameters(workers: Workers) -> None:
    workers.run(2, f"{HERE}:recomputes_alike")


def test_a_run_goes_on_bit_by_bit(workers: Workers, tmp_path: Path) -> None:
    first = workers.run(4, f"{CHECKPOINTS}:first_run", "gemini_offload", "bf16", str(tmp_path), 0.2)[0]
    rest = workers.run(4, f"{CHECKPOINTS}:resumed", "gemini_offload", "bf16", str(tmp_path), 0.2)[0]
    assert rest == first[SAVED_AFTER:]
