"""The processes below a launcher, found by a variable that they inherit: they may have left its session and group."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

RUN_ID = "SHARDC_RUN_ID"
_PATIENCE_S = 5.0  # a process that the kernel holds may outlive SIGKILL


def processes_of(run_id: str) -> list[int]:
    """Process ids, in no order; none where the system has no /proc."""
    mark = f"{RUN_ID}={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark in variables.split(b"\0"):
            found.append(int(folder.name))
    return found


def signal_processes(run_id: str, number: signal.Signals) -> None:
    """Send the signal once to each."""
    for process in processes_of(run_id):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def kill_processes(run_id: str) -> None:
    """SIGKILL, until there are none: they may start others meanwhile."""
    until = time.monotonic() + _PATIENCE_S
    while processes_of(run_id) and time.monotonic() < until:
        signal_processes(run_id, signal.SIGKILL)
        time.sleep(0.02)
