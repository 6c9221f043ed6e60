"""The process on each machine that holds its ranks: torchrun, its first failure, and the end of all that it started.

python -m shardc.launcher.node [--supervised MARK] TORCHRUN-OPTIONS -- SCRIPT ARGS...

With MARK, standard input is a line to the supervisor: `interrupt` and `kill` on it do what they say, and where it
closes, the ranks are terminated. What went wrong is then one line on standard error that begins with MARK.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from shardc.launcher.failures import Failure, first_failure
from shardc.launcher.processes import RUN_ID, kill_processes
from shardc.launcher.watch import SIGNALS, Watch

GPUS = "gpus"  # --nproc_per_node: one rank for each GPU, or one
ERROR_FOLDER = "SHARDC_ERROR_FOLDER"
_STARTUP = Path(__file__).parent / "startup"


class Stopped(BaseException):
    """A signal ends this process."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Node:
    """One torchrun, run in this process."""

    def __init__(self, mark: str | None):
        self.mark = mark
        self.run_id = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="shardc-run-"))
        self.has_said = False

    def run(self, arguments: list[str]) -> int:
        """The exit status: 0, that of the first failure, 128 + the signal that stopped it."""
        for number in SIGNALS:
            signal.signal(number, _raise_stopped)
        Watch(self.run_id, self._control(), leaving=self._stopped).start()
        os.environ[RUN_ID], os.environ[ERROR_FOLDER] = self.run_id, str(self.folder)
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{_STARTUP}{os.pathsep}{path}" if path else str(_STARTUP)
        status = 1
        try:
            status = self._torchrun(arguments)
        except Stopped as stopped:
            status = 128 + stopped.number
            self._stopped(stopped.number)
        finally:
            if status:
                kill_processes(self.run_id)
            shutil.rmtree(self.folder, ignore_errors=True)
        return status

    def _torchrun(self, arguments: list[str]) -> int:
        import torch
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

        options = parse_args(arguments)
        if options.nproc_per_node == GPUS:
            options.nproc_per_node = str(torch.cuda.device_count() or 1)
        if options.log_dir is None and options.redirects == options.tee == "0":
            options.log_dir = str(self.folder)  # only for files of torchrun's own, which it leaves behind
        failures: Iterable[Failure] = ()
        try:
            run(options)
            return 0
        except ChildFailedError as error:
            failures = self._failures(error.failures)
        except SignalException as error:
            self._report(failures=[asdict(failure) for failure in self._failures({})])
            raise Stopped(error.sigval) from None
        except Exception as error:
            traceback.print_exc()
            self._report(error="".join(traceback.format_exception_only(error)).strip())
            return 1
        first = first_failure(failures)
        assert first is not None
        if self.mark is None:
            sys.stdout.flush()
            print(f"\n{first.text()}", file=sys.stderr, flush=True)
        self._report(failures=[asdict(failure) for failure in failures])
        return first.status

    def _failures(self, ended: dict[int, Any]) -> list[Failure]:
        """What torchrun saw (its failures by rank) and what the ranks wrote down, for it or for us."""
        now_s, failures = time.time(), {}
        for rank, failure in ended.items():
            age_s = now_s - failure.timestamp
            told = failure.message if isinstance(failure.message, dict) else {}
            texts = told.get("message"), told.get("extraInfo", {}).get("py_callstack")
            failures[rank] = Failure(rank, failure.local_rank, failure.pid, failure.exitcode, age_s, *texts)
        for path in self.folder.glob("rank*.json"):
            record = json.loads(path.read_text())
            age_s = now_s - record.pop("time_s")
            seen = failures.get(record["rank"])
            failures[record["rank"]] = Failure(**record, exit_code=seen.exit_code if seen else None, age_s=age_s)
        return list(failures.values())

    def _report(self, **record: Any) -> None:
        if self.mark is not None:
            sys.stderr.buffer.write(f"{self.mark}{json.dumps(record)}\n".encode())
            sys.stderr.buffer.flush()

    def _control(self) -> int | None:
        """The supervisor's line, moved away from standard input, which the ranks inherit."""
        if self.mark is None:
            return None
        control, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return control

    def _stopped(self, number: int) -> None:
        """Say so once; the watch calls it too, where the main thread cannot end."""
        if self.mark is None and not self.has_said:
            self.has_said = True
            print(f"shardc run: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def main() -> int:
    """Run as the module's docstring says."""
    arguments = sys.argv[1:]
    mark = None
    if arguments[:1] == ["--supervised"]:
        mark, arguments = arguments[1], arguments[2:]
    return Node(mark).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
