"""What comes from one host, and how its end is told; here the host is this machine, without ssh."""

from __future__ import annotations

import json
import os
import queue
import sys

from shardc.launcher.connection import Connection
from shardc.launcher.hosts import Host

MARK = "shardc-the-mark"
REPORT = {"rank": 1, "local_rank": 0, "pid": 7, "exit_code": 1, "age_s": 0.5, "error": "E", "traceback": "T"}


class Opened:
    """A host that has answered. lines: what it printed."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.lines: list[bytes] = []
        self.connection = Connection(Host("localhost"), None, MARK)
        self.connection.open(lambda target, line: self.lines.append(line), self.events.put)
        assert self.events.get(timeout=60).port

    def become(self, code: str, folder: str = os.curdir) -> Connection:
        """What it is after it ran this code."""
        self.connection.tell(folder=folder, variables={"ODD": "a'b\"c\n"}, words=[sys.executable, "-c", code])
        while self.connection.status is None:
            self.events.get(timeout=60)
        return self.connection


def test_lines_arrive_whole_and_bars_as_they_are_drawn() -> None:
    host = Opened()
    code = (
        "import os, time\n"
        "for part in (b'one\\n\\ntw', b'o\\r\\nbar 1\\rbar 2', b'\\rend'):\n    os.write(1, part); time.sleep(0.2)\n"
        "os.write(1, os.environb[b'ODD'])"
    )
    assert host.become(code).status == 0
    assert host.lines == [b"one\n", b"\n", b"two\r\n", b"bar 1\r", b"bar 2\r", b"enda'b\"c\n"]


def test_a_report_is_no_output_and_its_age_grows() -> None:
    host = Opened()
    record = MARK + json.dumps({"failures": [REPORT]})
    connection = host.become(f"import os, sys; os.write(2, b'half a line' + {record.encode()!r} + b'\\n'); sys.exit(4)")
    assert (connection.status, connection.failed, host.lines) == (4, True, [b"half a line\n"])
    (failure,) = connection.failures()
    assert failure.error == "E"
    assert failure.age_s > 0.5


def test_a_host_without_this_folder_is_named() -> None:
    connection = Opened().become("", folder="/no/such/folder")
    assert connection.status == 1
    assert connection.ending() == (
        "localhost ended: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/folder'"
    )


def test_what_waits_to_be_told_ends_when_nobody_is_left() -> None:
    host = Opened()
    host.connection.hang_up()
    assert host.events.get(timeout=60).status == 1
    assert host.lines == []
