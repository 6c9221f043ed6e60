"""Each rule against the truth: what it types is exact on simulated ranks, and what it refuses is wrong."""

from __future__ import annotations

import itertools
import random

import pytest

from shardc.sharding.factors import all_leaves, dim_of
from shardc.sharding.layout import R
from shardc.sharding.rules import RULES, dims_of
from tests.sharding.rules.samples import CONVERSION_SAMPLES, COPIES, SAMPLES
from tests.sharding.rules.truth import Sample, Trial

# Refusals of assignments that are exact, and why they stay.
STRICT = {
    "all": "no value of False came out: true of these operands only",
    "any": "no value of True came out: true of these operands only",
    "dropout": "P: a sum of dropped parts needs equal masks on all ranks, which nobody asks for",
    "embedding": "P table: nobody has one",
    "eq": "P: reals are never equal, so that all compare alike",
    "ne": "P: reals are never equal, so that all compare alike",
    "expand_as": "the second operand gives its shape only, but a shard of it changes the result",
    "full_like": "P: only the shape counts",
    "ones_like": "P: only the shape counts",
    "zeros_like": "P: only the shape counts",
    "isinf": "P: true of finite operands only",
    "isnan": "P: true of finite operands only",
    "getitem": "a step or a tensor index may keep another dim's shards: indices are not followed",
    "layer_norm": "P weight and bias: nobody has one",
    "linear": "P input with P bias: reduce first",
    "pad": "P: only where the value is 0",
    "rms_norm": "P weight: nobody has one",
    "roll": "shards along the other dims: not followed",
    "rsub": "P - P: write sub",
    "scaled_dot_product_attention": "value dim sharded, or P values: no policy makes them",
    "squeeze": "shards of more than one element: whether they are depends on tp",
    "view": "a dim that is regrouped across the shards: true of tp 2 only",
    "view_as": "the second operand gives its shape only, but a shard of it changes the result",
    "where": "P on both sides: reduce first",
}


def test_every_rule_has_a_sample() -> None:
    assert sorted(RULES) == sorted(SAMPLES)
    assert all(SAMPLES.values())


@pytest.mark.parametrize("name", sorted(RULES))
def test_what_a_rule_types_is_exact(name: str) -> None:
    for sample in SAMPLES[name]:
        _check_typed(sample)


@pytest.mark.parametrize("number", range(len(CONVERSION_SAMPLES)))
def test_what_a_conversion_types_is_exact(number: int) -> None:
    assert _check_typed(CONVERSION_SAMPLES[number]) > 0


@pytest.mark.parametrize("name", sorted(COPIES))
def test_ranks_may_make_their_own_copies(name: str) -> None:
    trial = Trial(COPIES[name])
    made = [f for f in all_leaves(dims_of(trial.node)) if dim_of(dims_of(trial.inputs[0]), f) is None]
    assert made
    for factor in made:
        result = trial.typed((R,), 2, [factor])
        assert result.factor is factor
        assert trial.holds((R,), result, 2)


@pytest.mark.parametrize("name", sorted(RULES))
def test_what_a_rule_refuses_is_wrong(name: str) -> None:
    """Some refused assignments: no layout of the result makes them exact, unless STRICT says why they are refused."""
    _check_refused(name, most=12)


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted(RULES))
def test_what_a_rule_refuses_is_wrong_grid(name: str) -> None:
    _check_refused(name, most=10**6)


def _check_typed(sample: Sample) -> int:
    """All layouts of all operands, over two ranks and over three, where shards are uneven or empty; how many typed."""
    trial, count = Trial(sample), 0
    for ranks, layouts in itertools.product((2, 3), trial.assignments()):
        result = trial.typed(layouts, ranks)
        if result is not None:
            count += 1
            assert trial.holds(layouts, result, ranks) in (True, None), f"{ranks} ranks: {layouts} -> {result} is wrong"
    return count


def _check_refused(name: str, most: int) -> None:
    for sample in SAMPLES[name]:
        trial = Trial(sample)
        refused = [layouts for layouts in trial.assignments() if trial.typed(layouts, 2) is None]
        for layouts in random.Random(0).sample(refused, min(most, len(refused))):
            exact = [result for result in trial.results_possible() if _holds(trial, layouts, result)]
            assert not exact or name in STRICT, f"{layouts} -> {exact[0]} is exact, but refused"


def _holds(trial: Trial, layouts: tuple, result: object) -> bool:
    try:
        return trial.holds(layouts, result, 2) is True
    except ValueError:  # localised in a way that no typed graph asks for
        return False
