"""Which of many failures is the first, and what is said of it."""

from __future__ import annotations

import signal

import pytest

from shardc.launcher.failures import Failure, first_failure


def ended(rank: int, code: int | None, age_s: float, error: str | None = None, host: str | None = None) -> Failure:
    trace = None if error is None else f"Traceback (most recent call last):\n{error}\n"
    return Failure(rank, 0, 100 + rank, code, age_s, error, trace, host)


CASES = {
    "the earlier of two tracebacks": [ended(1, 1, 0.20, "ValueError: bad"), ended(0, 1, 0.15, "RuntimeError: closed")],
    "a traceback, of a rank that the launcher then ended": [
        ended(2, -signal.SIGTERM, 0.3, "ValueError: bad"),
        ended(0, 1, 0.2, "RuntimeError: closed"),
    ],
    "a traceback, of a rank that had not ended when its host was stopped": [
        ended(3, None, 5.0, "ValueError: bad"),
        ended(0, 1, 4.0, "RuntimeError: closed"),
    ],
    "an exit code, though its peer's traceback is older by rounding": [
        ended(0, 3, 0.1),
        ended(1, 1, 0.9, "RuntimeError: closed"),
    ],
    "a kill, and not its peers' tracebacks": [ended(1, -signal.SIGKILL, 0.2), ended(0, 1, 0.3, "RuntimeError: closed")],
    "a traceback, and not the kill of a rank that would not end": [
        ended(1, 1, 31.0, "ValueError: bad"),
        ended(0, -signal.SIGKILL, 0.5),
    ],
    "a traceback, and not the abort that follows it": [
        ended(1, 1, 0.3, "ValueError: bad"),
        ended(0, -signal.SIGABRT, 0.4),
    ],
    "an abort, and not the ranks that the launcher ended": [
        ended(1, -signal.SIGABRT, 0.3),
        ended(0, -signal.SIGTERM, 0.4),
    ],
}


@pytest.mark.parametrize("failures", CASES.values(), ids=CASES)
def test_the_first_failure_is(failures: list[Failure]) -> None:
    assert first_failure(failures) == failures[0]
    assert first_failure(reversed(failures)) == failures[0]


def test_no_failure() -> None:
    assert first_failure([]) is None


TEXTS = {
    "an exception": (
        ended(2, 1, 0, "ValueError: bad\n  advice"),
        1,
        "Traceback (most recent call last):\nValueError: bad\n  advice\n"
        "shardc run: rank 2 (pid 102) failed first: ValueError: bad",
    ),
    "an exception on a host": (
        ended(2, -signal.SIGTERM, 0, "ValueError: bad", "worker-1"),
        1,
        "Traceback (most recent call last):\nValueError: bad\n"
        "shardc run: rank 2 (local rank 0 of worker-1, pid 102) failed first: ValueError: bad",
    ),
    "an exit code": (
        ended(0, 3, 0),
        3,
        "shardc run: rank 0 (pid 100) ended first, with exit code 3; what it printed is above",
    ),
    "a crash": (
        ended(0, -signal.SIGSEGV, 0),
        139,
        "shardc run: rank 0 (pid 100) was killed first, by signal 11 (SIGSEGV)",
    ),
    "a kill": (
        ended(0, -signal.SIGKILL, 0),
        137,
        "shardc run: rank 0 (pid 100) was killed first, by signal 9 (SIGKILL); "
        "the kernel does that where memory runs out",
    ),
}


@pytest.mark.parametrize(("failure", "status", "text"), TEXTS.values(), ids=TEXTS)
def test_what_is_said_of(failure: Failure, status: int, text: str) -> None:
    assert failure.text() == text
    assert failure.status == status
