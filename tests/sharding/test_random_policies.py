"""Whatever policy is accepted is proved and exact; whatever is not is refused as the user's mistake."""

from __future__ import annotations

import random

import pytest

from shardc.capture import Variant
from shardc.errors import ShardcError
from shardc.policy import Rule, module_classes
from shardc.sharding.shard import shard
from tests.sharding.clone import clone_captured
from tests.sharding.exact import TOLERANCE, largest_error
from tests.sharding.families import Model, family_model
from tests.sharding.plain import Plain

_EMBEDDINGS = ("embed", "embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "head", "lm_head", "embed_out")
_COLUMNS = {
    "attention": ("qkv", "q_proj", "k_proj", "v_proj", "c_attn", "query_key_value", "qkv_proj"),
    "mlp": ("gate", "gate_proj", "up_proj", "c_fc", "dense_h_to_4h", "gate_up_proj", "fc1"),
}
_ATTENTION_ROWS = ("out", "o_proj", "out_proj", "dense")


def random_roles(model: Model, seed: int) -> dict[str, Rule]:
    """Each attention and MLP of each block: sharded, whole, unnamed or half named, and now and then a wild role."""
    draw = random.Random(seed)
    kinds: dict[tuple[str, str], str | None] = {}
    roles: dict[str, Rule] = {}
    for path, kind in model.classes.items():
        if kind not in ("Linear", "Conv1D", "Embedding"):
            continue
        name = path.rpartition(".")[2]
        if name in _EMBEDDINGS:
            role = draw.choice(["vocab", "vocab", None, "replicate"])
        else:
            role = _block_role(path, name, kinds, draw)
        if role:
            roles[path] = Rule(path, role, True, "random.yaml", 1)
    return roles


def _block_role(path: str, name: str, kinds: dict, draw: random.Random) -> str | None:
    is_attention = name in (*_COLUMNS["attention"], *_ATTENTION_ROWS) or "attn.c_proj" in path
    block = next(part for part in path.split(".") if part.isdigit())
    kind = kinds.setdefault((block, is_attention), draw.choice(["sharded", "sharded", "replicate", None, "half"]))
    if draw.random() < 0.04:
        return draw.choice([None, "replicate", "column", "row"])
    if any(name in names for names in _COLUMNS.values()):
        return {"sharded": "column", "half": "column"}.get(kind, kind)
    return {"sharded": "row", "half": None}.get(kind, kind)


def _check(model: Model, seeds: range) -> None:
    captured = model.capture(Variant())
    accepted = 0
    for seed in seeds:
        roles = random_roles(model, seed)
        draw = random.Random(-seed)
        how = {"tp": draw.choice([2, 4]), "sequence_parallel": draw.random() < 0.5}
        try:
            sharded = shard(clone_captured(captured), roles, **how)
        except ShardcError:
            continue
        accepted += 1
        named = {path: rule.role for path, rule in roles.items()}
        assert not sharded.certificate.findings, (seed, how, named)
        assert largest_error(sharded, model) < TOLERANCE, (seed, how, named)
    assert accepted >= len(seeds) // 8


def test_random_policies_of_a_plain_module() -> None:
    _check(Model(Plain, {}, module_classes(Plain())), range(24))


@pytest.mark.grid
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "neox", "opt"])
def test_random_policies_of_families_grid(family: str) -> None:
    _check(family_model(family), range(100, 160))
