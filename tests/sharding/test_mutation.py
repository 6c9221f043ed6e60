"""The proof refutes every plan with one mistake, and accepts correct plans however they were made."""

from __future__ import annotations

import functools

import pytest

from shardc.capture.capture import CapturedModel
from shardc.policy import match, parse_policy
from shardc.sharding.prove import prove
from shardc.sharding.shard import ShardedModel, shard
from tests.sharding.clone import clone_captured
from tests.sharding.exact import TOLERANCE, largest_error
from tests.sharding.families import Model, family_model, variants_of
from tests.sharding.mutants import all_mutants


@functools.cache
def _captured(family: str, sizes: tuple = ()) -> tuple[Model, CapturedModel]:
    model = family_model(family, **dict(sizes))
    return model, model.capture(variants_of(model)[0])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_every_mutant_is_refuted(family: str, sequence_parallel: bool) -> None:
    _check_mutants(family, 2, sequence_parallel, (), least=130)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_every_mutant_with_shared_kv_heads_is_refuted(sequence_parallel: bool) -> None:
    """2 KV heads at tp 4: reductions over tp.replica, conversions over sub-axes."""
    _check_mutants("qwen3", 4, sequence_parallel, (("kv_heads", 2),), least=200)


def _check_mutants(family: str, tp: int, sequence_parallel: bool, sizes: tuple, least: int) -> None:
    model, captured = _captured(family, sizes)
    sharded = shard(clone_captured(captured), model.roles, tp=tp, sequence_parallel=sequence_parallel)
    assert sharded.certificate.proved
    (graph,) = sharded.variants.values()
    accepted, count = [], 0
    for name, mutant, parameters in all_mutants(graph, sharded.parameters, sharded.mesh.axes):
        count += 1
        if prove(mutant, parameters, sharded.mesh).proved:
            accepted.append(name)
    assert accepted == []
    assert count >= least


# -- correct plans ---------------------------------------------------------------------------------------------------
LLAMA = {
    "*.embed_tokens": "vocab",
    "*.self_attn.{q,k,v}_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp.{gate,up}_proj": "column",
    "*.mlp.down_proj": "row",
    "lm_head": "vocab",
}
ATTENTION = ("*.self_attn.{q,k,v}_proj", "*.self_attn.o_proj")
MLP = ("*.mlp.{gate,up}_proj", "*.mlp.down_proj")
UNTIED = (("tied", False),)

CORRECT = {
    "everything": ({}, {}),
    "everything, sequence parallel": ({}, {"sequence_parallel": True}),
    "over four ranks": ({}, {"tp": 4}),
    "KV heads replicated": ({}, {"tp": 4, "sizes": (("kv_heads", 2),)}),
    "a replicated MLP": (dict.fromkeys(MLP, "replicate"), {}),
    "a replicated MLP, sequence parallel": (dict.fromkeys(MLP, "replicate"), {"sequence_parallel": True}),
    "replicated attention": (dict.fromkeys(ATTENTION, "replicate"), {}),
    "replicated attention, sequence parallel": (dict.fromkeys(ATTENTION, "replicate"), {"sequence_parallel": True}),
    "a replicated embedding": ({"*.embed_tokens": "replicate"}, {"sizes": UNTIED}),
    "a replicated embedding, sequence parallel": (
        {"*.embed_tokens": "replicate"},
        {"sizes": UNTIED, "sequence_parallel": True},
    ),
    "a replicated head": ({"lm_head": "replicate"}, {"sizes": UNTIED}),
    "a replicated head, sequence parallel": ({"lm_head": "replicate"}, {"sizes": UNTIED, "sequence_parallel": True}),
    "embedding and head replicated": (dict.fromkeys(("*.embed_tokens", "lm_head"), "replicate"), {}),
    "only vocabularies": (dict.fromkeys((*ATTENTION, *MLP), "replicate"), {}),
    "only the MLP": (dict.fromkeys((*ATTENTION, "*.embed_tokens", "lm_head"), "replicate"), {}),
    "nothing named": (dict.fromkeys(LLAMA, None), {}),
    "nothing named, sequence parallel": (dict.fromkeys(LLAMA, None), {"sequence_parallel": True}),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_plans_are_proved(name: str) -> None:
    """And they are exact on simulated ranks."""
    changes, how = CORRECT[name]
    sharded, model = _shard({**LLAMA, **changes}, **how)
    assert not sharded.certificate.findings
    assert sharded.propagated == []
    assert largest_error(sharded, model) < TOLERANCE


def test_shards_that_nobody_named_are_reported() -> None:
    """PITFALLS 23: only q_proj is a column; k, v and o follow it."""
    changes = dict.fromkeys(("*.self_attn.{q,k,v}_proj", "*.self_attn.o_proj"), None)
    sharded, model = _shard({**LLAMA, **changes, "*.self_attn.q_proj": "column"})
    assert sharded.certificate.proved
    assert [path for path in sharded.propagated if ".0." in path] == [
        f"model.layers.0.self_attn.{name}_proj" for name in ("k", "o", "v")
    ]
    assert largest_error(sharded, model) < TOLERANCE


def _shard(
    rules: dict[str, str | None], tp: int = 2, sequence_parallel: bool = False, sizes: tuple = ()
) -> tuple[ShardedModel, Model]:
    model, captured = _captured("llama", sizes)
    lines = [f'  "{pattern}": {{role: {role}, optional: true}}' for pattern, role in rules.items() if role]
    policy = parse_policy("\n".join(["rules:", *(lines or ['  "nothing": {role: row, optional: true}'])]), "test.yaml")
    sharded = shard(clone_captured(captured), match(policy, model.classes), tp=tp, sequence_parallel=sequence_parallel)
    return sharded, model
