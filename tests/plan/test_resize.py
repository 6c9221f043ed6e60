"""A file at other sizes: each number becomes the one in its place, an edit is kept or refused with its line."""

import re
from dataclasses import dataclass

import pytest

from shardc.errors import ShardcError
from shardc.plan.resize import resize

LARGE = """\
class Attention(nn.Module):
    def __init__(self):
        self.q_proj = nn.Linear(2560, 2048)
        self.k_proj = nn.Linear(2560, 512)
        self.q_norm = Norm(128)

    def forward(self, x, cos, sin):
        q = self.q_proj(x).view(*x.shape[:-1], -1, 128)
        first = q[..., :64]
        second = q[..., 64:]
        return F.attention(
            q * cos,
            groups=4,
        )


class Mlp(nn.Module):
    def forward(self, x):
        return x.view(-1, 4) * 64


STAGES = (Attention,)
"""
SMALL = (
    LARGE.replace("2560", "96").replace("2048", "64").replace("512", "32").replace("128", "16")
    .replace(":64", ":8").replace("64:", "8:").replace("-1, 4) * 64", "-1, 2) * 64")
)  # fmt: skip
WRAPPED = SMALL.replace(
    "F.attention(\n            q * cos,\n            groups=4,\n        )", "F.attention(q * cos, groups=4)"
).replace("Norm(16)", "Norm(x.size(16))")


@dataclass(frozen=True)
class Edit:
    """A change of LARGE; what it is in SMALL, and the lines that it is said to be in."""

    old: str
    new: str
    small: tuple[str, str]
    lines: list[int]


EDITS = {
    "a name is changed": Edit("first", "half", ("first", "half"), [9]),
    "two lines change places": Edit(
        "        first = q[..., :64]\n        second = q[..., 64:]\n",
        "        second = q[..., 64:]\n        first = q[..., :64]\n",
        (
            "        first = q[..., :8]\n        second = q[..., 8:]\n",
            "        second = q[..., 8:]\n        first = q[..., :8]\n",
        ),
        [9, 10],
    ),
    "a number of the function is used again": Edit("q * cos", "q[:128] * cos", ("q * cos", "q[:16] * cos"), [12]),
    "a number of the class is used again": Edit("q * cos", "q[:2560] * cos", ("q * cos", "q[:96] * cos"), [12]),
    "a number that the file has not": Edit("q * cos", "q * cos * 1.0", ("q * cos", "q * cos * 1.0"), [12]),
    "a line is taken out": Edit("        second = q[..., 64:]\n", "", ("        second = q[..., 8:]\n", ""), [10]),
    "a comment is no edit": Edit("first = q[", "first = q[  # half of 64\n        ", ("", ""), []),
}  # fmt: skip


def _words(text: str) -> str:
    """Without spaces, line ends and the commas that stand before a closing bracket."""
    return "".join(text.split()).replace(",)", ")")


def test_the_small_file_is_the_large_one_resized() -> None:
    resized = resize(LARGE, LARGE, SMALL)
    assert resized.text == SMALL
    assert (resized.edited, resized.restated) == ([], [])


def test_a_line_of_the_small_file_is_traced_back() -> None:
    small = SMALL.replace("        first", "        extra = 1\n        first")
    resized = resize(LARGE, LARGE, small)
    assert resized.text == small
    assert resized.line_of[small.splitlines().index("        extra = 1")] in (8, 9)
    for old, new in (("view\\(\\*x", 8), ("groups", 13), ("STAGES", 22)):
        row = next(i for i, line in enumerate(small.splitlines()) if re.search(old, line))
        assert resized.line_of[row] == new


def test_another_form_at_the_small_sizes_is_taken_over_and_said() -> None:
    resized = resize(LARGE, LARGE, WRAPPED)
    assert _words(resized.text) == _words(WRAPPED)
    assert resized.edited == []
    assert resized.restated == [5, 13]


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_kept(name: str) -> None:
    edit = EDITS[name]
    assert LARGE.count(edit.old) >= 1
    resized = resize(LARGE.replace(edit.old, edit.new), LARGE, SMALL)
    if edit.lines:
        assert resized.text == SMALL.replace(*edit.small)
    else:
        assert _words(resized.text) == _words(SMALL).replace("first=q[", "first=q[#halfof64")
    assert resized.edited == edit.lines


def test_a_number_with_two_meanings_is_refused() -> None:
    large, small = LARGE.replace("* 64", "* 64 / x[64:]"), SMALL.replace("* 64", "* 64 / x[8:]")
    with pytest.raises(ShardcError) as error:
        resize(large.replace("x[64:]", "x[64:].mean(64)"), large, small)
    assert error.value.problem == (
        "model.py:19: the edit writes 64, which at the small sizes is 64 in one place and 8 in another"
    )


def test_an_edit_where_the_file_has_another_form_is_refused() -> None:
    with pytest.raises(ShardcError) as error:
        resize(LARGE.replace("groups=4,", "groups=3 + 1"), LARGE, WRAPPED)
    assert error.value.problem == "model.py:14: the edit stands where the file has another form at the small sizes"
