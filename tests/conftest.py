"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.workers import Workers

# Plans that boost compiles are not the user's, nor an older session's; rank processes inherit the variable.
os.environ["SHARDC_CACHE"] = tempfile.mkdtemp(prefix="shardc_cache_")

# Ranks share few cores. Where a message wakes its receiver before the sender has let go of the connection's lock, gloo
# spins for it: a third of all time. In a batch, which processes inherit, the woken do not displace those who run.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What imports made stays: collections of garbage need not go through it again."""
    gc.freeze()


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
