"""A job on several hosts: all are reached before one starts, and the first that fails ends the others."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import IO

from shardc.launcher.connection import Connection
from shardc.launcher.failures import first_failure
from shardc.launcher.hosts import Host
from shardc.launcher.watch import SIGNALS

_ALIVE_S = 15  # ssh asks a silent host, and gives up after three times
_ANSWER_S = 60.0  # for a host that is reached to start Python
_END_S = 60.0  # for hosts to end their ranks, which they kill after 40 s


class Job:
    """hosts: each with whether ssh reaches it. words: (rank of host, port) -> torchrun's words. variables: for hosts
    reached by ssh. port: None is one that is free on the first host."""

    def __init__(
        self,
        hosts: Sequence[tuple[Host, bool]],
        *,
        words: Callable[[int, int], list[str]],
        variables: Mapping[str, str],
        port: int | None,
        ssh_port: int | None,
        connect_timeout_s: int,
    ):
        self._words, self._variables, self._port = words, variables, port
        self._answer_s = connect_timeout_s + _ANSWER_S
        self._mark = f"shardc-{uuid.uuid4().hex}"
        ssh = _ssh(ssh_port, connect_timeout_s)
        self._connections = [Connection(host, ssh if by_ssh else None, self._mark) for host, by_ssh in hosts]
        self._several = len(hosts) > 1
        self._events: queue.SimpleQueue[Connection | int] = queue.SimpleQueue()
        self._writing = threading.Lock()

    def run(self) -> int:
        """The exit status: 0, that of the first failure, 128 + the signal that ended the job."""
        for number in SIGNALS:
            signal.signal(number, self._signalled)
        for connection in self._connections:
            self._open(connection)
        first, stopped_by = self._until_all_have_ended()
        for connection in self._connections:
            if connection.status is None:
                connection.process.kill()
                self._say(f"shardc run: {connection.host.name} does not answer: its ranks may still run")
        if stopped_by is not None:
            self._say(f"shardc run: ended by {signal.Signals(stopped_by).name}")
            return 128 + stopped_by
        return 0 if first is None else self._explain(first)

    def _open(self, connection: Connection) -> None:
        lines = f"[{connection.host.name}] ".encode() if self._several else b""
        connection.open(lambda target, line: self._show(target, lines + line), self._events.put)

    def _until_all_have_ended(self) -> tuple[Connection | None, int | None]:
        """Tell all when all have answered; hang up when the first fails. Returns that one, and the signal, if any."""
        first: Connection | None = None
        stopped_by: int | None = None
        told = ending = False
        running = set(self._connections)
        until_s: float | None = time.monotonic() + self._answer_s
        while running:
            try:
                event = self._events.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                if ending:
                    break
                event = next(connection for connection in self._connections if connection.port is None)
                event.error = f"no answer within {self._answer_s:.0f} s"
            if isinstance(event, int):
                self._stop(event, again=stopped_by is not None)
                stopped_by = stopped_by or event
            else:
                if event.status is not None:
                    running.discard(event)
                if event.failed and not ending:
                    first = event
                    self._hang_up(besides=event if event.told else None)
                elif not told and not ending and all(connection.port is not None for connection in self._connections):
                    told, until_s = True, None
                    self._tell_all()
            if not ending and (first is not None or stopped_by is not None):
                ending, until_s = True, time.monotonic() + _END_S
        return first, stopped_by

    def _tell_all(self) -> None:
        port = self._connections[0].port if self._port is None else self._port
        for rank, connection in enumerate(self._connections):
            python = [sys.executable, "-m", "shardc.launcher.node", "--supervised", self._mark]
            variables = {} if connection.ssh is None else self._variables
            connection.tell(folder=_folder(), variables=variables, words=[*python, *self._words(rank, port)])

    def _hang_up(self, besides: Connection | None = None) -> None:
        for connection in self._connections:
            if connection is not besides:
                connection.hang_up()

    def _stop(self, number: int, again: bool) -> None:
        """Ctrl-C reaches the ranks as such, a second one kills them; other signals terminate them."""
        if number != signal.SIGINT:
            self._hang_up()
            return
        for connection in self._connections:
            if connection.told:
                connection.say("kill" if again else "interrupt")
            else:
                connection.hang_up()

    def _explain(self, first: Connection) -> int:
        """Show the first error last; returns its status."""
        found = [
            replace(failure, host=connection.host.name if self._several else None)
            for connection in self._connections
            for failure in connection.failures()
        ]
        failure = first_failure(found) if first.failures() or first.error else None
        if failure is not None:
            self._say(f"\n{failure.text()}")
            return failure.status
        if first.error is not None:
            self._say(f"shardc run: {first.host.name} failed first: {first.error.splitlines()[0]}")
            return 1
        self._say(f"shardc run: {first.ending()}")
        return first.status if first.port is not None and 0 < first.status < 255 else 1

    def _show(self, target: IO[bytes], line: bytes) -> None:
        with self._writing:
            try:
                target.write(line)
                target.flush()
            except BrokenPipeError:  # whoever read the output has gone
                self._events.put(signal.SIGHUP)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._show(sys.stderr.buffer, f"{text}\n".encode(errors="backslashreplace"))

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._events.put(number)


def ssh_command() -> list[str]:
    """`ssh`, or what $SHARDC_SSH holds: another, or options for it."""
    return shlex.split(os.environ.get("SHARDC_SSH", "")) or ["ssh"]


def _ssh(port: int | None, connect_timeout_s: int) -> list[str]:
    """The command with our options; those of the command itself come first, and so win."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": connect_timeout_s,
        "ControlMaster": "no",  # it would outlive the job
        "ServerAliveInterval": _ALIVE_S,
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    if port is not None:
        words += ["-p", str(port)]
    return [*ssh_command(), "-T", *words]


def _folder() -> str:
    """The current folder, by the name that the shell knows: other machines may mount it there only."""
    folder, name = os.getcwd(), os.environ.get("PWD", "")
    return name if name and os.path.isdir(name) and os.path.samefile(name, folder) else folder
