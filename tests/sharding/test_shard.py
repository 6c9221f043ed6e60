"""Sharded models on simulated ranks: the loss and every gradient of the Hugging Face model, in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from shardc.capture.capture import CapturedModel
from shardc.sharding.shard import shard
from tests.sharding.clone import clone_captured
from tests.sharding.exact import TOLERANCE, largest_error
from tests.sharding.families import FAMILIES, Model, family_model, variants_of


@dataclass(frozen=True)
class Case:
    """A family at some sizes, and how it is sharded."""

    family: str
    tp: int
    sequence_parallel: bool = False
    sizes: tuple[tuple[str, int | bool], ...] = ()

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.sizes]
        return " ".join([self.family, f"tp{self.tp}", *["sp"] * self.sequence_parallel, *sizes])


def case(family: str, tp: int, sequence_parallel: bool = False, **sizes: int | bool) -> Case:
    return Case(family, tp, sequence_parallel, tuple(sizes.items()))


@functools.cache
def _captured(family: str, sizes: tuple) -> tuple[Model, CapturedModel]:
    model = family_model(family, **dict(sizes))
    return model, model.capture(*variants_of(model))


def check(case: Case, axes: dict[str, int] | None = None) -> None:
    model, captured = _captured(case.family, case.sizes)
    sharded = shard(clone_captured(captured), model.roles, tp=case.tp, sequence_parallel=case.sequence_parallel)
    assert not sharded.certificate.findings
    assert sharded.certificate.proved
    if axes is not None:
        assert sharded.mesh.sizes == axes
    assert largest_error(sharded, model) < TOLERANCE


# Reduced vocabularies have 101 rows, which no tp divides.
FAMILY_CASES = [case(family, tp, sp) for family in FAMILIES for tp, sp in ((2, False), (4, True))]
OTHER_CASES = [case(family, tp, sp) for family in FAMILIES for tp, sp in ((2, True), (4, False))]

KV_CASES = [
    (case("qwen2", 4, kv_heads=2), {"tp.kv": 2, "tp.replica": 2}),  # Qwen2.5-3B's ratio
    (case("qwen3", 4, True, kv_heads=2), {"tp.kv": 2, "tp.replica": 2}),
    (case("llama", 2, kv_heads=1), {"tp": 2}),  # multi-query: every rank makes the KV head
    (case("qwen3", 4, True, kv_heads=1), {"tp": 4}),
    (case("gemma2", 2, kv_heads=1), {"tp": 2}),  # eager attention expands the KV head
    (case("llama", 3, True, heads=12, kv_heads=2), {"tp.kv": 1, "tp.replica": 3}),
]
OTHER_KV_CASES = (
    [
        (case(family, 4, sp, kv_heads=2), {"tp.kv": 2, "tp.replica": 2})
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
        for sp in (False, True)
    ]
    + [
        (case(family, tp, sp, kv_heads=1), {"tp": tp})
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
        for tp in (2, 4)
        for sp in (False, True)
    ]
    + [
        (case("qwen3", 4, heads=12, kv_heads=6), {"tp.kv": 2, "tp.replica": 2}),
        (case("llama", 6, True, heads=12, kv_heads=4), {"tp.kv": 2, "tp.replica": 3}),
    ]
)

TIE_CASES = [case("llama", 3, heads=6, tied=True), case("gpt2", 3, heads=6, tied=False)]
OTHER_TIE_CASES = [
    case(family, tp, sp, heads=12, kv_heads=6, tied=tied)
    for family in ("llama", "qwen3", "gpt2", "opt", "neox")
    for tp in (2, 3)
    for sp in (False, True)
    for tied in (False, True)
]


@pytest.mark.parametrize("case", FAMILY_CASES, ids=str)
def test_families(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("case", "axes"), KV_CASES, ids=str)
def test_few_kv_heads(case: Case, axes: dict[str, int]) -> None:
    """CASES: 2 KV heads, tp 4; 1 KV head (multi-query), tp 2."""
    check(case, axes)


@pytest.mark.parametrize("case", TIE_CASES, ids=str)
def test_ties(case: Case) -> None:
    """CASES: vocabulary 101 with a tp that does not divide it, tied and untied."""
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", OTHER_CASES, ids=str)
def test_families_grid(case: Case) -> None:
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize(("case", "axes"), OTHER_KV_CASES, ids=str)
def test_few_kv_heads_grid(case: Case, axes: dict[str, int]) -> None:
    check(case, axes)


@pytest.mark.grid
@pytest.mark.parametrize("case", OTHER_TIE_CASES, ids=str)
def test_ties_grid(case: Case) -> None:
    check(case)
