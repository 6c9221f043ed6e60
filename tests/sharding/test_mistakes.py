"""Policies that do not fit their model: each is refused before anything runs, naming the module and the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from shardc.capture import Variant
from shardc.errors import ShardcError
from shardc.policy import match, module_classes, parse_policy
from shardc.sharding.shard import shard
from tests.sharding.families import Model, family_model
from tests.sharding.plain import Plain, Unknown

LLAMA = """rules:
  "*.embed_tokens": vocab
  "*.self_attn.{q,k,v}_proj": column
  "*.self_attn.o_proj": row
  "*.mlp.{gate,up}_proj": column
  "*.mlp.down_proj": row
"""


@dataclass(frozen=True)
class Mistake:
    """A family (or a plain module), a policy, and the whole error; line numbers of libraries are written N."""

    name: str
    family: str | type
    policy: str
    error: str
    tp: int = 2
    sizes: tuple = ()

    def __str__(self) -> str:
        return self.name


MISTAKES = [
    Mistake(
        "both column",
        "llama",
        LLAMA.replace('o_proj": row', 'o_proj": column'),
        "model.layers.0.self_attn.o_proj: column, but its input is already sharded by model.layers.0.self_attn.k_proj\n"
        "  mark it `row` (mine.yaml:4): a row takes the shards that a column gives",
    ),
    Mistake(
        "row without a column",
        "llama",
        LLAMA.replace('  "*.mlp.{gate,up}_proj": column\n', ""),
        "model.layers.0.mlp.down_proj: row, but nothing shards its 32 input features\n"
        "  mark the module that feeds it `column`, or this one `replicate` (mine.yaml:5)",
    ),
    Mistake(
        "replicate beside a column",
        "llama",
        LLAMA.replace('down_proj": row', 'down_proj": replicate'),
        "model.layers.0.mlp.down_proj: replicate, but model.layers.0.mlp.gate_proj shards one of its dims\n"
        "  mark both `replicate`, or this one `column` or `row` (mine.yaml:6)",
    ),
    Mistake(
        "heads not divisible",
        "llama",
        LLAMA,
        "model.layers.0.self_attn.q_proj: tp=3 does not divide 8 query heads; valid: 1, 2, 4, 8 "
        "(above 4, the 4 KV heads are replicated)\n"
        "  use one of these for --tp, or mark the module `replicate` (mine.yaml:3)",
        tp=3,
    ),
    Mistake(
        "FFN width not divisible",
        "llama",
        LLAMA,
        "model.layers.0.mlp.gate_proj: tp=3 does not divide 29 output features; valid: 1, 29\n"
        "  use one of these for --tp, or mark the module `replicate` (mine.yaml:5)",
        tp=3,
        sizes=(("heads", 6), ("kv_heads", 3), ("intermediate", 29)),
    ),
    Mistake(
        "few KV heads of a fused weight",
        "phi3",
        'rules:\n  "*.qkv_proj": column\n  "*.o_proj": row\n',
        "model.layers.0.self_attn.qkv_proj: tp=4 does not divide the 2 KV heads of a fused weight; valid: 1, 2\n"
        "  use one of these for --tp, or mark the module `replicate` (mine.yaml:2)",
        tp=4,
        sizes=(("kv_heads", 2),),
    ),
    Mistake(
        "a norm across heads",
        "olmo2",
        LLAMA,
        "model.layers.0.self_attn.k_proj: column would split its 24 output features, which "
        "model.layers.0.self_attn.q_norm: mean (modeling_olmo2.py:N) needs whole\n"
        "  mark the module `replicate` (mine.yaml:3)",
    ),
    Mistake(
        "an operation without a rule",
        Unknown,
        'rules:\n  "up": column\n  "down": row\n',
        "up: column would split its 20 output features, which the model: sort (plain.py:N) needs whole: "
        "no rule says how sort works on shards\n"
        "  write a rule (CONTRIBUTING.md, An op rule), or mark the module `replicate` (mine.yaml:2)",
    ),
    Mistake(
        "fused heads not divisible",
        Plain,
        'rules:\n  "*.qkv": column\n  "*.out": row\n',
        "blocks.0.attention.qkv: tp=3 does not divide 4 heads; valid: 1, 2, 4\n"
        "  use one of these for --tp, or mark the module `replicate` (mine.yaml:2)",
        tp=3,
    ),
    Mistake(
        "a mistake in one of several equal blocks",
        Plain,
        'rules:\n  "blocks.{0,2}.attention.qkv": column\n  "*.out": row\n',
        "blocks.1.attention.out: row, but nothing shards its 12 input features\n"
        "  mark the module that feeds it `column`, or this one `replicate` (mine.yaml:3)",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_refused(mistake: Mistake) -> None:
    if isinstance(mistake.family, str):
        known = family_model(mistake.family, **dict(mistake.sizes))
        make, classes = known.make, known.classes
    else:
        make, classes = mistake.family, module_classes(mistake.family())
    model = Model(make, match(parse_policy(mistake.policy, "mine.yaml"), classes), classes)
    with pytest.raises(ShardcError) as caught:
        shard(model.capture(Variant()), model.roles, tp=mistake.tp)
    assert re.sub(r"(\.py:)\d+(-\d+)?\)", r"\1N)", str(caught.value)) == mistake.error


def test_sequence_parallel_needs_ranks() -> None:
    model = family_model("llama")
    with pytest.raises(ShardcError) as caught:
        shard(model.capture(Variant()), model.roles, tp=1, sequence_parallel=True)
    assert str(caught.value) == (
        "sequence parallelism shards the residual stream over tp, and tp is 1\n  use --tp 2 or more with --sp"
    )
