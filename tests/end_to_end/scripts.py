"""Run a user's script as users do: by `shardc run`, or on ranks that run already."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock


def shardc_run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """`shardc run ARGUMENTS` in the folder cwd, without a network."""
    command = [sys.executable, "-m", "shardc.cli.main", "run", *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf"), "OMP_NUM_THREADS": "1"} | (env or {})
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, env=env, check=False)


def run_script(script: str, arguments: list[str]) -> str:
    """What one rank of `shardc run` does: the script as __main__, with its arguments, in the script's folder.

    Returns what it prints."""
    import datasets

    folder = Path(script).parent
    datasets.config.HF_DATASETS_CACHE = str(folder / "hf")
    printed = io.StringIO()
    argv = mock.patch.object(sys, "argv", [script, *arguments])
    with contextlib.chdir(folder), argv, contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{script} ends with {end.code}:\n{printed.getvalue()}"
    return printed.getvalue()
