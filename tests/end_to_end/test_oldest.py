"""The oldest supported transformers: every family compiles and is proved, and a boosted model trains as a plain one."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.capture.families import PRESETS
from tests.end_to_end.scripts import shardc_run

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "oldest"  # the Makefile installs it there


def test_every_family_under_the_oldest_transformers(tmp_path: Path) -> None:
    """On two ranks, which share the families; without the folder it fails in CI and is skipped elsewhere."""
    if not (OLDEST / "transformers").is_dir():
        reason = f"{OLDEST} is missing: run the tests by `make test`, or install constraints-oldest.txt there"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    path = os.pathsep.join((str(OLDEST), str(ROOT)))
    module = ("-m", "tests.end_to_end.oldest", str(tmp_path))
    done = shardc_run("--nproc_per_node", "2", *module, cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    minimum = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()).group(1)
    assert [each["transformers"] for each in found] == [f"{minimum}.0"] * 2
    assert sorted(name for each in found for name in each["compiled"]) == sorted(PRESETS)
