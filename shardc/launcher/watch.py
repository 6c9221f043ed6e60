"""Stops a node: sees signals and the supervisor's line at once, while the main thread may be inside a call of torch."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from shardc.launcher.processes import kill_processes, processes_of, signal_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPT_S = 5.0  # after an interrupt: a rank inside a collective does not see it, and is then terminated
_GRACE_S = 40.0  # after any signal: ranks that are left are killed; torchrun does so after 30 s
_IDLE_S = 2.0  # how long the main thread may take to end without ranks: it may be waiting for another machine
_STEP_S = 0.2


class Watch(threading.Thread):
    """Made and started on the main thread, which handles the signals too: each of them raises there."""

    def __init__(self, run_id: str, control: int | None, leaving: Callable[[int], None]):
        super().__init__(daemon=True)
        self._run_id, self._control, self._leaving = run_id, control, leaving
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._stopped_by: int | None = None
        self._since_s = 0.0
        self._terminated = False
        self._idle_since_s: float | None = None

    def run(self) -> None:
        """Until the process ends."""
        while True:
            lines = [self._wakeup] if self._control is None else [self._wakeup, self._control]
            ready, _, _ = select.select(lines, [], [], None if self._stopped_by is None else _STEP_S)
            if self._wakeup in ready:
                for number in os.read(self._wakeup, 64):
                    self._signalled(number)
            if self._control in ready:
                self._told(os.read(self._control, 64))
            if self._stopped_by is not None:
                self._press()

    def _signalled(self, number: int) -> None:
        if number not in SIGNALS:
            return
        if self._stopped_by == number == signal.SIGINT:
            self._leave()
        if self._stopped_by is None:
            self._stopped_by, self._since_s = number, time.monotonic()

    def _told(self, words: bytes) -> None:
        """What the supervisor says; nothing means that it has gone, or wants the node to go."""
        if b"kill" in words:
            self._stopped_by = self._stopped_by or signal.SIGKILL
            self._leave()
        if not words:
            self._control = None
        number = signal.SIGINT if words else signal.SIGTERM
        signal.pthread_kill(threading.main_thread().ident, number)

    def _press(self) -> None:
        """Ranks that do not end are made to; without ranks there is nothing that torchrun could wait for."""
        now_s = time.monotonic()
        if not processes_of(self._run_id):
            self._idle_since_s = self._idle_since_s or now_s
            if now_s - self._idle_since_s > _IDLE_S:
                self._leave()
            return
        self._idle_since_s = None
        if now_s - self._since_s > _GRACE_S:
            self._leave()
        if self._stopped_by == signal.SIGINT and not self._terminated and now_s - self._since_s > _INTERRUPT_S:
            self._terminated = True
            signal_processes(self._run_id, signal.SIGTERM)

    def _leave(self) -> None:
        """End this process, and the ranks before it."""
        assert self._stopped_by is not None
        kill_processes(self._run_id)
        self._leaving(self._stopped_by)
        os._exit(128 + self._stopped_by)
