"""Runs as a rank starts, before its script: the exception that ends the rank is written down, as time, text, traceback.

The rank's own output is untouched. Afterwards the search path is as it would have been, and an environment's own
sitecustomize has run; processes that the rank starts see nothing of this. Where the process that holds the ranks is
killed, so is the rank.
"""

import os
import sys


def _leave_the_search_path() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [entry for entry in entries if entry != here]
    if any(rest):
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_the_hidden_one() -> None:
    """The sitecustomize that this one stands before on the search path, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _write_down_what_ends_this_process() -> None:
    path = os.path.join(os.environ["SHARDC_ERROR_FOLDER"], f"rank{os.environ['RANK']}.json")
    if os.path.exists(path):  # of this rank before a restart
        os.unlink(path)
    show, process = sys.excepthook, os.getpid()

    def write_and_show(kind, value, trace) -> None:  # type: ignore[no-untyped-def]
        if os.getpid() == process:
            try:
                _write(path, kind, value, trace)
            except Exception as error:
                print(f"shardc run: the error of this rank cannot be written down: {error}", file=sys.stderr)
        show(kind, value, trace)

    sys.excepthook = write_and_show


def _write(path: str, kind, value, trace) -> None:  # type: ignore[no-untyped-def]
    import json
    import time
    import traceback

    record = {
        "rank": int(os.environ["RANK"]),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "pid": os.getpid(),
        "time_s": time.time(),
        "error": "".join(traceback.format_exception_only(kind, value)).strip(),
        "traceback": "".join(traceback.format_exception(kind, value, trace)),
    }
    with open(path + ".part", "w") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


def _end_with_the_process_that_holds_the_ranks() -> None:
    if sys.platform == "linux":
        import ctypes
        import signal

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


_leave_the_search_path()
if "SHARDC_ERROR_FOLDER" in os.environ and "RANK" in os.environ:
    _write_down_what_ends_this_process()
    _end_with_the_process_that_holds_the_ranks()
_run_the_hidden_one()
