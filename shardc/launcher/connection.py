"""One host of several: the process that starts there, by ssh or beside this one, and what comes from it.

The host is first asked to start Python and answer; then it is told what to run, on its standard input, so that
arguments and variables pass no shell and no secret is seen in a list of processes. Where that input closes, by whatever
end of this process, the host ends its ranks.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from shardc.launcher.failures import Failure
from shardc.launcher.hosts import Host

# Runs on the host: answers with a free port, reads one line, becomes what the line says. It is one line, with nothing
# in it that a shell might take inside single quotes.
_BOOTSTRAP = (
    "import json, os, socket, sys; "
    's = socket.socket(); s.bind(("", 0)); '
    'os.write(2, (sys.argv[1] + json.dumps({"port": s.getsockname()[1]}) + chr(10)).encode()); s.close(); '
    'job = json.loads(open(0, "rb", buffering=0, closefd=False).readline() or sys.exit(1)); '
    'os.chdir(job["folder"]); os.environ.update(job["variables"]); os.execv(job["words"][0], job["words"])'
)
_DRAIN_S = 2.0  # for the last output, after the process has ended


class Connection:
    """port: one that is free there, once it has answered. status: once it has ended. error: of its torchrun, or in
    place of its answer."""

    def __init__(self, host: Host, ssh: Sequence[str] | None, mark: str):
        """ssh: the command that reaches it, None for this machine. mark: begins the lines that are for us."""
        self.host, self.ssh = host, ssh
        self.port: int | None = None
        self.told = False
        self.status: int | None = None
        self.error: str | None = None
        self.last_line = ""
        self._mark = mark.encode()
        self._failures: list[tuple[float, Failure]] = []

    def open(self, show: Callable[[IO[bytes], bytes], None], changed: Callable[[Connection], None]) -> None:
        """Start. show: gets each line. changed: called at its answer, its report and its end, on another thread."""
        self._show, self._changed = show, changed
        python = [sys.executable, "-IS", "-c", _BOOTSTRAP, self._mark.decode()]
        words = python if self.ssh is None else [*self.ssh, "--", self.host.name, f"exec {shlex.join(python)}"]
        pipe = subprocess.PIPE
        # Its own session: Ctrl-C is for this process.
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        threading.Thread(target=self._carry, daemon=True).start()

    def tell(self, *, folder: str, variables: Mapping[str, str], words: Sequence[str]) -> None:
        """What to become, once it has answered."""
        self.told = True
        job = {"folder": folder, "variables": dict(variables), "words": list(words)}
        self.say(json.dumps(job))

    def say(self, line: str) -> None:
        """A line to its standard input; where it has ended, nobody hears it."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Let it end its ranks; where it has not answered, end ssh."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.port is None:
            self.process.terminate()

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or reported that it is about to."""
        return bool(self.status or self.error or self._failures)

    def failures(self) -> list[Failure]:
        """What it reported, with ages as of now."""
        now_s = time.monotonic()
        return [replace(failure, age_s=failure.age_s + now_s - heard_s) for heard_s, failure in self._failures]

    def ending(self) -> str:
        """What to say where it ended without a report."""
        name, said = self.host.name, self.last_line or f"exit code {self.status}"
        if self.port is not None:
            return f"{name} ended: {said}" if self.status != 255 else f"the connection to {name} is lost: {said}"
        if self.ssh is not None and self.status == 255:
            return f"cannot reach {name}: {said}"
        return f"{name} cannot start {sys.executable}: {said}; each host needs it at this path"

    def _carry(self) -> None:
        """Carry its output until it ends."""
        carriers = [
            threading.Thread(target=self._carry_lines, args=(source, target), daemon=True)
            for source, target in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for carrier in carriers:
            carrier.start()
        status = self.process.wait()
        for carrier in carriers:
            carrier.join(_DRAIN_S)  # something that it left behind may hold the other end
        self.status = status
        self._changed(self)

    def _carry_lines(self, source: IO[bytes], target: IO[str]) -> None:
        rest = b""
        while data := source.read1(1 << 16):
            *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", rest + data)
            for line in lines:
                self._line(line, target)
        if rest:
            self._line(rest + b"\n", target)

    def _line(self, line: bytes, target: IO[str]) -> None:
        text, mark, record = line.partition(self._mark)
        if text:
            if target is sys.stderr and text.strip():
                self.last_line = text.decode(errors="replace").strip()
            if self.port is not None:  # before that, ssh and shells speak
                self._show(target.buffer, text + b"\n" if mark else text)
        if mark:
            self._heard(json.loads(record))

    def _heard(self, record: dict) -> None:
        if "port" in record:
            self.port = record["port"]
            self._changed(self)
            return
        self.error = record.get("error")
        self._failures = [(time.monotonic(), Failure(**failure)) for failure in record.get("failures", ())]
        self._changed(self)
