"""An sshd for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launcher.machines import Sshd, running_sshd


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """127.0.0.1 and localhost lead to it where its port is given to ssh, and machines.ALIAS always does."""
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server
