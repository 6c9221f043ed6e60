"""Adapters under each plugin: trained as peft does in one process, saved as peft reads them, trained further."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from shardc.booster import Booster
from shardc.errors import ShardcError
from tests.booster.small import PLUGINS, ROWS, make_loader, make_model, plugin_named, relative
from tests.workers import Workers

HERE = "tests.booster.test_lora_training"


def config() -> peft.LoraConfig:
    """Beside columns and rows."""
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM")


def adapted(folder: str | None = None) -> peft.PeftModel:
    """The model with adapters: new ones, the same wherever they are made, or those of a folder."""
    torch.manual_seed(3)
    model = Booster().enable_lora(make_model(), pretrained_dir=folder, lora_config=config())
    if folder is None:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:  # zero when new
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def plain(steps: int) -> tuple[list[float], peft.PeftModel]:
    """Losses in one process, and the trained model."""
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in make_loader(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def trained(name: str, folder: str) -> None:
    """Three steps, saved, three more steps of what was read again."""
    losses = []
    batches = list(range(6))
    for part, read in (("first", None), ("second", f"{folder}/first")):
        plugin = plugin_named(name)
        booster, model = Booster(plugin=plugin), adapted(read)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # with the frozen ones, as many scripts do
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, make_loader(6, ROWS // plugin.dp_size))
        if read is not None:
            booster.load_optimizer(optimizer, f"{folder}/optimizer")
        for batch in loader:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 3:
                break
        booster.save_lora_as_pretrained(model, f"{folder}/{part}")
        booster.save_optimizer(optimizer, f"{folder}/optimizer")
        with pytest.raises(ShardcError, match="save_lora_as_pretrained"):
            booster.save_model(model, f"{folder}/whole", shard=True)
    expected, reference = plain(len(batches))
    assert relative(losses, expected) < 2e-5
    if model.module.mesh.rank == 0:
        again = peft.PeftModel.from_pretrained(make_model(), f"{folder}/second")
        wanted = dict(reference.named_parameters())
        for key, parameter in again.named_parameters():
            torch.testing.assert_close(parameter, wanted[key], rtol=1e-4, atol=1e-5, check_device=False)


@pytest.mark.parametrize("name", PLUGINS)
def test_adapters_train_as_in_one_process(workers: Workers, name: str, tmp_path: Path) -> None:
    workers.run(4, f"{HERE}:trained", name, str(tmp_path))
