"""Compares a sharded model on simulated ranks with the dense one: the loss, every logit and every gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardc.capture.capture import Variant
from shardc.sharding.shard import ShardedModel, localise_model
from tests.sharding.families import Model, batch_for, build_perturbed, dense_loss
from tests.sharding.simulate import (
    Batch,
    Simulation,
    backward,
    expected_shards,
    reduced_gradients,
    shard_parameters,
    tp_ranks,
)

TOLERANCE = 1e-10


def largest_error(sharded: ShardedModel, model: Model) -> float:
    """Localises `sharded` and runs each of its variants; the largest relative error over loss and gradients."""
    localise_model(sharded)
    module = build_perturbed(model)
    return max(variant_error(sharded, variant, module, batch_for(variant)) for variant in sharded.variants)


def variant_error(sharded: ShardedModel, variant: Variant, module: nn.Module, batch: Batch) -> float:
    """The largest relative error of one variant of a localised model, against `module` in one process."""
    module.zero_grad()
    loss = dense_loss(module, batch)
    loss.backward()
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}

    ranks = tp_ranks(sharded.mesh)
    graph = sharded.variants[variant]
    full = {name: p.detach() for name, p in module.named_parameters()}
    full |= {name: buffer.double() for name, buffer in graph.constants.items()}
    held = shard_parameters(full, sharded.parameters, ranks)
    run = Simulation(graph, sharded.mesh, held, _with_count(batch))
    backward(run.outputs["loss"])

    errors = [_error(x, loss, loss.item()) for x in run.outputs["loss"]]
    least = 1e-3 * max(grad.abs().max().item() for grad in wanted.values())  # a key's bias has the gradient 0
    for name, parameter in sharded.parameters.items():
        found = reduced_gradients(held[name], parameter, ranks)
        expected = expected_shards(wanted[name], parameter, ranks)
        scale = max(least, wanted[name].abs().max().item())
        errors += [_error(x, y, scale) for x, y in zip(found, expected, strict=True)]
    return max(errors)


def _with_count(batch: Batch) -> Batch:
    labels = batch.tensors["labels"]
    count = (labels[:, 1:] != -100).sum().double()
    return Batch({**batch.tensors, "num_targets": count}, batch.rows, batch.length)


def _error(found: Tensor, expected: Tensor, scale: float) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return (found - expected).abs().max().item() / scale
