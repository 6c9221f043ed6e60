"""How many conversions a plan has, and where they stand: communication is what a plan costs."""

from __future__ import annotations

import pytest

from shardc.capture import Variant
from shardc.capture.graph import op_name
from shardc.sharding.layout import CONVERSIONS
from shardc.sharding.shard import shard
from tests.sharding.families import family_model

TP = ("copy_to", "all_reduce")
SP = ("all_gather", "reduce_scatter")
# Of one block: q, k and v share what enters them, gate and up too (PITFALLS 19). A sum stands where its bias allows.
BLOCKS = {
    "qwen3": ("model.layers.0", ["self_attn", "self_attn", "mlp", "mlp"]),
    "gemma2": ("model.layers.0", ["self_attn", "self_attn", "mlp", "mlp"]),
    "gpt2": ("transformer.h.0", ["attn", "attn.c_proj", "mlp", "mlp.c_proj"]),
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_has_two_pairs_of_conversions(family: str, sequence_parallel: bool) -> None:
    """And none that a parameter takes along: Gemma's `1 + weight` under sp needs none (PITFALLS 20)."""
    model = family_model(family)
    sharded = shard(model.capture(Variant()), model.roles, tp=2, sequence_parallel=sequence_parallel)
    block, modules = BLOCKS[family]
    nodes = [node for node in sharded.variants[Variant()].graph.nodes if node.target in CONVERSIONS]
    found = [(node.meta["call"].path, op_name(node.target)) for node in nodes]
    kinds = (SP if sequence_parallel else TP) * 2
    assert [each for each in found if each[0].startswith(block)] == [
        (f"{block}.{module}", kind) for module, kind in zip(modules, kinds, strict=True)
    ]
