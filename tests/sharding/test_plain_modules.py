"""A user's own nn.Module with a policy of ten lines, and policies that treat equal blocks differently."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc.capture import Variant
from shardc.policy import match, module_classes, parse_policy
from shardc.sharding.shard import ShardedModel, shard
from tests.sharding.exact import TOLERANCE, largest_error
from tests.sharding.families import Model
from tests.sharding.plain import DIM, HEADS, Plain, with_loss

POLICY = """rules:
  "embed": vocab
  "*.qkv": column
  "*.out": row
  "*.gate": column
  "*.down": row
  "head": vocab
"""
LAYOUTS = [(2, False), (2, True), (4, True)]


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_a_plain_module_is_exact(tp: int, sequence_parallel: bool) -> None:
    """Fused qkv taken apart by chunk, a gate by split, biases, LayerNorm, an untied head of odd size."""
    sharded, _ = _check(POLICY, tp, sequence_parallel)
    assert sharded.variants[Variant()].blocks == {"blocks.0": ["blocks.0", "blocks.1", "blocks.2"]}


def test_label_smoothing_is_exact() -> None:
    """CASES: label smoothing with a sharded vocabulary; one row of the batch has no target at all."""
    _check(POLICY, 2, False, functools.partial(Plain, label_smoothing=0.1))


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize(
    ("only", "blocks"),
    [
        ("blocks.0", {"blocks.0": ["blocks.0"], "blocks.1": ["blocks.1", "blocks.2"]}),
        ("blocks.1", {"blocks.0": ["blocks.0", "blocks.2"], "blocks.1": ["blocks.1"]}),
        ("blocks.{1,2}", {"blocks.0": ["blocks.0"], "blocks.1": ["blocks.1", "blocks.2"]}),
    ],
)
def test_equal_blocks_with_unequal_roles(only: str, blocks: dict, tp: int, sequence_parallel: bool) -> None:
    """Only some attentions are sharded: equal blocks with equal roles are still held once."""
    policy = POLICY.replace('"*.qkv"', f'"{only}.attention.qkv"').replace('"*.out"', f'"{only}.attention.out"')
    sharded, parameters = _check(policy, tp, sequence_parallel)
    assert sharded.variants[Variant()].blocks == blocks
    held = {name: parameters[f"blocks.{name}.attention.qkv.weight"].shard is not None for name in "012"}
    assert held == {name: name in only for name in "012"}


class Mixed(Plain):
    """One scale for the heads of a sharded query and for the residual stream, seen as heads."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM // HEADS))
        self.query = nn.Linear(DIM, DIM)
        self.back = nn.Linear(DIM, DIM)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids)
        heads = self.query(x).unflatten(-1, (HEADS, -1)) * self.scale
        x = (x.unflatten(-1, (HEADS, -1)) * self.scale).flatten(-2) + self.back(heads.flatten(-2))
        return with_loss(self.head(self.norm(self.blocks[0](x))), labels)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_a_parameter_of_shards_and_of_what_is_whole_is_exact(tp: int, sequence_parallel: bool) -> None:
    """PITFALLS 21: its gradient is partial in one use only, so that the sum over ranks cannot wait for the end."""
    _, parameters = _check(POLICY + '  "query": column\n  "back": row\n', tp, sequence_parallel, Mixed)
    assert parameters["scale"].grad_reduce == (("tp",) if sequence_parallel else ())


def _check(
    policy: str, tp: int, sequence_parallel: bool, make: Callable[[], nn.Module] = Plain
) -> tuple[ShardedModel, dict]:
    classes = module_classes(make())
    model = Model(make, match(parse_policy(policy, "mine.yaml"), classes), classes)
    sharded = shard(model.capture(Variant()), model.roles, tp=tp, sequence_parallel=sequence_parallel)
    assert not sharded.certificate.findings
    assert sharded.propagated == []
    assert largest_error(sharded, model) < TOLERANCE
    return sharded, sharded.parameters
