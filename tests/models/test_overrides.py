"""`--set` values and per-layer lists."""

import pytest

from shardc import ShardcError
from shardc.models import parse_set
from shardc.models.overrides import continue_pattern, parse_value, pattern_length

VALUES = {
    "4": 4,
    "1e-6": 1e-6,
    "True": True,
    "none": None,
    "gelu": "gelu",
    "[1, 2]": [1, 2],
    "[sliding_attention,full_attention]": ["sliding_attention", "full_attention"],
    '{"rope_type": "default"}': {"rope_type": "default"},
    '"4"': "4",
}


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=str)
def test_a_value_is_read_as_what_it_looks_like(text, value):
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_parse_set_splits_at_the_first_equals_sign():
    assert parse_set(["a=1", "b=x=y"]) == {"a": 1, "b": "x=y"}
    with pytest.raises(ShardcError) as caught:
        parse_set(["num_hidden_layers"])
    assert str(caught.value) == (
        "--set num_hidden_layers: not of the form field=value\n  for example --set num_hidden_layers=4"
    )


@pytest.mark.parametrize(
    ("rows", "period", "five"),
    [("f", 1, "fffff"), ("sf" * 3, 2, "sfsfs"), ("sssssf", 6, "sssss"), ("sfsfs", 2, "sfsfs"), ("fffs", 4, "fffsf")],
)
def test_the_shortest_pattern_is_continued(rows, period, five):
    assert pattern_length(list(rows)) == period
    assert "".join(continue_pattern(list(rows), 5)) == five
