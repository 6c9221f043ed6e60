"""One small plan, compiled once: Qwen3 with tied embeddings, tp 2, pp 2."""

import shutil
from pathlib import Path

import pytest

from shardc.plan import CompiledPlan, compile_plan, write_plan

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 98,
}


def compile_small() -> CompiledPlan:
    return compile_plan("Qwen3-4B", tp=2, pp=2, overrides=SMALL)


@pytest.fixture(scope="package")
def compiled() -> CompiledPlan:
    return compile_small()


@pytest.fixture(scope="package")
def written(compiled: CompiledPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(compiled, tmp_path_factory.mktemp("plans") / "small")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the plan that a test may change."""
    return shutil.copytree(written, tmp_path / "small")
