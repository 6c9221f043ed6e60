"""Models beyond the bundled families: a user's own, with a short YAML, and those that bring a plan of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from shardc.models import ModelSource, resolve, source_from_config
from shardc.policy import bundled_policies, load_policy, policy_for
from tests.end_to_end.exact import Layout, check, compare, prepare
from tests.workers import Workers

TP2, TP2_PP2 = Layout(tp=2), Layout(tp=2, pp=2)
USER_MODEL = Path(__file__).with_name("user_model.py")
SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

PLAIN = """\
rules:
  "tokens": vocab
  "blocks.*.{query,key,value}": column
  "blocks.*.attention.out": row
  "blocks.*.up": column
  "blocks.*.down": row
  "head": vocab
pipeline: {blocks: "blocks.*"}
"""
STABLELM = """\
rules:
  "*.embed_tokens": vocab
  "*.self_attn.{q,k,v}_proj": column
  "*.self_attn.o_proj": row
  "*.mlp.{gate,up}_proj": column
  "*.mlp.down_proj": row
  "lm_head": vocab
pipeline: {blocks: "model.layers.*"}
"""
GPT_NEO = """\
rules:
  "transformer.wte": vocab
  "*.{q,k,v}_proj": column
  "*.out_proj": row
  "*.c_fc": column
  "*.c_proj": row
  "lm_head": vocab
pipeline: {blocks: "transformer.h.*"}
"""


def source(config: str, **fields: Any) -> ModelSource:
    return source_from_config(getattr(transformers, config)(**{**SIZES, **fields}), config.removesuffix("Config"))


def stablelm() -> ModelSource:
    return source("StableLmConfig")


def gpt_neo() -> ModelSource:
    layers = {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 256}
    fields = {key: size for key, size in SIZES.items() if key not in ("num_attention_heads", "num_hidden_layers")}
    del fields["num_key_value_heads"]
    config = transformers.GPTNeoConfig(**fields, **layers, max_position_embeddings=64)
    return source_from_config(config, "GPT-Neo")


UNLISTED = [("StableLM", stablelm, STABLELM, "left"), ("GPT-Neo", gpt_neo, GPT_NEO, "none")]


@pytest.mark.parametrize(("name", "make", "yaml", "padding"), UNLISTED, ids=[row[0] for row in UNLISTED])
def test_an_architecture_without_file_or_plan_is_exact_with_a_users_policy(
    name: str, make: Any, yaml: str, padding: str, workers: Workers, tmp_path: Path
) -> None:
    model = make()
    assert not getattr(model.config, "base_model_tp_plan", None)
    assert model.config.model_type not in bundled_policies()
    assert len(yaml.splitlines()) <= 10
    (tmp_path / "mine.yaml").write_text(yaml)
    check(workers, tmp_path, model, TP2_PP2, policy=load_policy(str(tmp_path / "mine.yaml")), padding=padding)


@pytest.mark.parametrize("layout", [TP2_PP2, Layout(tp=2, sp=True)], ids=str)
def test_a_plain_module_is_exact_with_a_users_policy(layout: Layout, workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PLAIN)
    model = resolve(f"{USER_MODEL}:make_model", {"depth": 4})
    trial = prepare(model, tmp_path, layout, str(tmp_path / "mine.yaml"))
    batches = [trial.batch(rows=9, length=length) for length in (12, 7)]
    compare(workers, trial, batches).assert_exact()


OWN_PLANS: dict[str, dict[str, Any]] = {
    "SmolLM3Config": {"no_rope_layers": [1, 1, 0]},  # the last layer is unlike the others
    "Starcoder2Config": {},
    "CohereConfig": {},
    "GraniteConfig": {},
    "Glm4Config": {"head_dim": 16},
    "ApertusConfig": {},  # scalars of the activation between column and row: their gradient is reduced
}


@pytest.mark.parametrize("config", OWN_PLANS)
def test_the_plan_of_the_models_own_class_is_exact(config: str, workers: Workers, tmp_path: Path) -> None:
    model = source(config, **OWN_PLANS[config])
    assert model.config.model_type not in bundled_policies()
    assert policy_for(model.config).file == f"{config}.base_model_tp_plan"
    check(workers, tmp_path, model, TP2, padding="right")
