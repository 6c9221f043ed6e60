"""Fixtures that all tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.workers import Workers

# Plans that boost compiles are not the user's, nor an older session's; rank processes inherit the variable.
os.environ["SHARDC_CACHE"] = tempfile.mkdtemp(prefix="shardc_cache_")

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    """Ranks share few cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """workers.run(n, "module:function", *args) calls a function on n ranks."""
    pool = Workers()
    yield pool
    pool.stop()
