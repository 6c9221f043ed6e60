"""What runs in a rank before its script: its error is written down, and nothing else is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardc.launcher import startup

STARTUP = Path(startup.__file__).parent


def rank(folder: Path, code: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run code as rank 3, with this PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"SHARDC_ERROR_FOLDER": str(folder), "RANK": "3", "LOCAL_RANK": "1"}
    environment["PYTHONPATH"] = str(STARTUP) if path is None else f"{STARTUP}{os.pathsep}{path}"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_an_exception_is_written_down_and_shown_as_ever(tmp_path: Path) -> None:
    code = "def f():\n    raise ValueError('bad \\udcff')\nf()"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    done = rank(tmp_path, code)
    assert (done.returncode, done.stderr) == (1, plain.stderr)
    record = json.loads((tmp_path / "rank3.json").read_text())
    assert abs(record.pop("time_s") - time.time()) < 60
    assert record.pop("pid") > 0
    assert record.pop("traceback").encode(errors="backslashreplace").decode() == plain.stderr
    assert record == {"rank": 3, "local_rank": 1, "error": "ValueError: bad \udcff"}


@pytest.mark.parametrize("code", ["pass", "import sys; sys.exit(3)", "import sys; sys.exit('no')"])
def test_an_end_without_an_exception_leaves_no_record_and_removes_an_old_one(code: str, tmp_path: Path) -> None:
    (tmp_path / "rank3.json").write_text("{}")
    rank(tmp_path, code)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_write_for_the_rank(tmp_path: Path) -> None:
    done = rank(tmp_path, "import os\nif os.fork() == 0: raise ValueError\nos.wait()")
    assert done.returncode == 0
    assert "ValueError" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_hides_no_error(tmp_path: Path) -> None:
    done = rank(tmp_path / "gone", "raise ValueError('bad')")
    assert "ValueError: bad" in done.stderr
    assert "the error of this rank cannot be written down" in done.stderr


@pytest.mark.parametrize("path", [None, "/a:/b", ":/a"])
def test_the_search_path_is_as_it_would_have_been(path: str | None, tmp_path: Path) -> None:
    code = "import json, os, sys; print(json.dumps([sys.path, os.environ.get('PYTHONPATH')]))"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = plain if path is None else plain | {"PYTHONPATH": path}
    expected = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert rank(tmp_path, code, path).stdout == expected


def test_an_environments_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'mine'")
    done = rank(tmp_path, "import sitecustomize; print(mine, sitecustomize.__file__)", str(tmp_path))
    assert done.stdout == f"mine {tmp_path}/sitecustomize.py\n", done.stderr
