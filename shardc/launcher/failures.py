"""Of all ranks that ended badly, the one that did so by itself and first."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

_AT_ONCE_S = 2.0  # ranks whose ends are this close were all seen before the launcher ended any: it looks every 0.1 s,
# but notes the time of an end without a traceback in whole seconds
_FOLLOWS = {signal.SIGABRT, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM}  # from a peer or a launcher


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank ended. exit_code: minus the signal where one killed it, None where it had not ended yet.

    age_s: how long ago, when it was reported (clocks of machines differ). error, traceback: of the exception, if any.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    age_s: float
    error: str | None = None
    traceback: str | None = None
    host: str | None = None

    @property
    def status(self) -> int:
        """The exit status of a job that ends with it, as a shell counts."""
        if self.exit_code is None or self.exit_code == 0:
            return 1
        if self.error is not None and self.exit_code < 0:
            return 1  # an exception was ending it when it was killed
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code

    def text(self) -> str:
        """The traceback, if any, and a last line that says which rank it was and what ended it."""
        name = f"rank {self.rank}"
        place = f"local rank {self.local_rank} of {self.host}, " if self.host is not None else ""
        who = f"shardc run: {name} ({place}pid {self.pid})"
        if self.error is not None:
            return f"{self.traceback or ''}{who} failed first: {self.error.splitlines()[0]}"
        if self.exit_code is not None and self.exit_code < 0:
            number = -self.exit_code
            known = number in set(signal.Signals)
            cause = f"signal {number}" + (f" ({signal.Signals(number).name})" if known else "")
            hint = "; the kernel does that where memory runs out" if number == signal.SIGKILL else ""
            return f"{who} was killed first, by {cause}{hint}"
        return f"{who} ended first, with exit code {self.exit_code}; what it printed is above"


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The cause of all: ranks that lose a peer raise errors of their own, and the launcher ends those that remain.

    A death without a traceback comes before a traceback of the same moment: its peers notice it, and not the reverse.
    Next is the earliest traceback, then a signal that a peer or a launcher may have sent.
    """
    failures = list(failures)
    earliest_s = max((failure.age_s for failure in failures), default=0.0)

    def order(failure: Failure) -> tuple[int, float]:
        code = failure.exit_code or 0
        by_itself = code > 0 or (code < 0 and -code not in _FOLLOWS)
        if failure.error is not None:
            group = 1
        elif by_itself and earliest_s - failure.age_s <= _AT_ONCE_S:
            group = 0
        else:
            group = 3 if code == -signal.SIGTERM else 2
        return group, -failure.age_s

    return min(failures, key=order, default=None)
