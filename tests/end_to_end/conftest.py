"""What the scripts of users are run on: no network, a tiny model, a little text."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

TINY_MODEL = Path(__file__).parents[2] / "examples" / "tiny_model.py"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that examples/tiny_model.py writes: model/ and data/."""
    folder = tmp_path_factory.mktemp("tiny")
    with mock.patch.object(sys, "argv", [str(TINY_MODEL), str(folder)]):
        runpy.run_path(str(TINY_MODEL), run_name="__main__")
    return folder
