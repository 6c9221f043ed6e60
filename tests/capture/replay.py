"""Run a model and its graph on the same weights and the same batch, and compare everything bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.capture import ModelGraph
from tests.pipeline.run_stage import run_stage


def perturb(model: nn.Module) -> nn.Module:
    """Weights that no symmetry hides: no norm is 1, no bias 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def run_model(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, logits and every gradient of the model itself."""
    model.zero_grad()
    torch.manual_seed(5)
    with NoIdleDraws():
        out = model(**batch)
    return _results(model, {name: out[name] for name in ("loss", "logits") if out.get(name) is not None})


class NoIdleDraws(TorchFunctionMode):
    """OPT of transformers 5.17 draws a number for each layer, which without layerdrop decides nothing.

    A graph does not draw it; here it leaves dropout's numbers as they are."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return torch.zeros([]) if func is torch.rand and args == ([],) else func(*args, **(kwargs or {}))


def run_graph(graph: ModelGraph, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of the graph, over the model's own parameters; buffers come from the graph's constants."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | graph.constants
    num_targets = (batch["labels"][:, 1:] != -100).sum() if "labels" in batch else torch.tensor(0)
    given = {"num_targets": num_targets.float()} | batch
    model.zero_grad()
    torch.manual_seed(5)
    out = run_stage(graph, given, tensors.__getitem__, training=model.training)
    count = out.pop("count", None)
    assert count is None or count.float() == given["num_targets"]
    return _results(model, out)


def _results(model: nn.Module, out: dict[str, Tensor]) -> dict[str, Tensor]:
    out.get("loss", out.get("logits")).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach() for name, tensor in out.items()} | gradients


def assert_bit_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str = "") -> None:
    assert found.keys() == wanted.keys(), where
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, f"{name} {where}"
        assert torch.equal(found[name], tensor), f"{name} {where}"
