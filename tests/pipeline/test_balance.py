"""Cuts make the costliest stage as cheap as any cuts can."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.capture import Variant, capture
from shardc.errors import ShardcError
from shardc.models import resolve
from shardc.pipeline import Costs, check_cuts, choose_cuts, measure_costs


@pytest.fixture(scope="module")
def qwen3_4b() -> Costs:
    return measure_costs(capture(resolve("Qwen3-4B").make, variants=(Variant(),)).plain)


def test_costs_of_qwen3_4b_are_those_computed_by_hand(qwen3_4b: Costs) -> None:
    weights = 2560 * (4096 + 1024 + 1024) + 4096 * 2560 + 3 * 2560 * 9728
    attention = 4 * 4096 * 4096 // 2  # two products over 4096 keys of 32 heads * 128, half of them masked
    assert set(qwen3_4b.blocks.values()) == {3 * (2 * weights + attention)}
    assert qwen3_4b.after == 3 * 2 * 2560 * 151936
    assert round(qwen3_4b.after / qwen3_4b.blocks["model.layers.0"], 1) == 3.3


@pytest.mark.parametrize(("pp", "layers"), [(1, [36]), (2, [20, 16]), (4, [10, 10, 10, 6])], ids=str)
def test_the_head_counts_as_layers(qwen3_4b: Costs, pp: int, layers: list[int]) -> None:
    bounds = [0, *choose_cuts(qwen3_4b, pp), 36]
    assert [b - a for a, b in pairwise(bounds)] == layers


sizes = st.integers(1, 9)


@given(st.lists(sizes, min_size=1, max_size=7), sizes, sizes, st.data())
def test_no_other_cuts_have_a_cheaper_costliest_stage(rows: list[int], before: int, after: int, data: st.DataObject):
    costs = Costs({f"layers.{i}": cost for i, cost in enumerate(rows)}, before, after)
    num_stages = data.draw(st.integers(1, len(rows)))
    cuts = choose_cuts(costs, num_stages)
    assert check_cuts(cuts, len(rows), num_stages) == cuts
    others = combinations(range(1, len(rows)), num_stages - 1)
    rank = {other: (max(stages), sum(c * c for c in stages)) for other in others if (stages := costs.of_stages(other))}
    assert rank[tuple(cuts)] == min(rank.values())


def test_more_stages_than_blocks_are_refused(qwen3_4b: Costs) -> None:
    with pytest.raises(ShardcError) as error:
        choose_cuts(qwen3_4b, 40)
    assert str(error.value) == ("--pp 40: the model has 36 blocks and a stage needs at least one\n  use --pp 1 to 36")


@pytest.mark.parametrize(
    ("cuts", "problem"),
    [
        ([9], "qwen3.yaml:9: 1 cuts make 2 stages, but --pp is 3"),
        ([9, 36], "qwen3.yaml:9: cuts [9, 36] do not rise between the first and last of 36 blocks"),
        ([9, 9], "qwen3.yaml:9: cuts [9, 9] do not rise between the first and last of 36 blocks"),
    ],
    ids=str,
)
def test_wrong_user_cuts_are_refused(cuts: list[int], problem: str) -> None:
    with pytest.raises(ShardcError) as error:
        check_cuts(cuts, 36, 3, "qwen3.yaml:9")
    assert error.value.problem == problem
