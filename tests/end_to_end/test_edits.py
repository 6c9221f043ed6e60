"""A hand edit of model.py: refused with its line where it changes what is computed, proved again where it does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardc
from shardc.plan import Refuted, check_folder, verify, write_plan
from tests.end_to_end.exact import Layout, compile_layout, small

LAYOUT = Layout(tp=2)
WRONG = ("hidden_states = residual + hidden_states", "hidden_states = residual + residual + hidden_states")
HARMLESS = [
    ("a local is renamed", [("variance", "mean_square")]),
    (
        "two independent lines change places",
        [("        cos = emb.cos()\n        sin = emb.sin()\n", "        sin = emb.sin()\n        cos = emb.cos()\n")],
    ),
    (
        "a value gets a name",
        [("return residual + hidden_states", "total = residual + hidden_states\n        return total")],
    ),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = small("Qwen3-4B", LAYOUT, num_hidden_layers=2)
    return write_plan(compile_layout(source, LAYOUT), tmp_path_factory.mktemp("plans") / "qwen3")


def edited(written: Path, folder: Path, edits: list[tuple[str, str]]) -> Path:
    plan = shutil.copytree(written, folder / "plan")
    text = (plan / "model.py").read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    (plan / "model.py").write_text(text)
    return plan


def line_of(plan: Path, text: str) -> int:
    return next(i for i, line in enumerate((plan / "model.py").read_text().splitlines(), 1) if text in line)


def test_an_edit_that_doubles_a_term_is_refused_with_its_line(written: Path, tmp_path: Path) -> None:
    plan = edited(written, tmp_path, [WRONG])
    place = f"model.py:{line_of(plan, WRONG[1])}"
    (finding,) = check_folder(plan).findings
    assert place in str(finding)
    for use in (shardc.load_plan, verify):
        with pytest.raises(Refuted) as error:
            use(plan)
        assert place in str(error.value)
    command = [sys.executable, "-m", "shardc.cli.main", "check", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, env=_wide())
    assert done.returncode == 1
    assert place in done.stdout + done.stderr


def _wide() -> dict[str, str]:
    import os

    return os.environ | {"COLUMNS": "300"}


@pytest.mark.parametrize(("name", "edits"), HARMLESS, ids=[row[0] for row in HARMLESS])
def test_a_harmless_edit_is_proved_again(
    name: str, edits: list[tuple[str, str]], written: Path, tmp_path: Path
) -> None:
    plan = edited(written, tmp_path, edits)
    assert check_folder(plan).findings == []
    assert shardc.load_plan(plan).spec.model == "Qwen3-4B"
