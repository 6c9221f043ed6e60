"""Rank processes that live for the whole test session and run functions by name.

Each run joins the first `size` of them by gloo, through a file, so that no ports collide. A failing function returns
its traceback; the processes are then ended, as other ranks may wait for ever, and started afresh for the next run.
"""

from __future__ import annotations

import gc
import importlib
import queue
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MAX_RANKS = 4
TIMEOUT_S = 60
START_S = 180  # more, for the first run: four processes import torch, perhaps on a busy machine
GRACE_S = 2  # after one rank failed, how long the others may take to fail by themselves


class WorkerError(AssertionError):
    """A rank failed or gave no answer; the message holds the tracebacks of the ranks that did."""


class Workers:
    """Up to MAX_RANKS processes, started at the first run."""

    def __init__(self) -> None:
        self.context = mp.get_context("spawn")
        self.folder = Path(tempfile.mkdtemp())
        self.processes: list[mp.Process] = []
        self.runs = 0

    def run(self, size: int, function: str, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Call "module:name" with args on `size` ranks; returns their results in order. Raises WorkerError."""
        if not self.processes:
            self._start()
            timeout_s += START_S
        self.runs += 1
        for tasks in self.tasks[:size]:
            tasks.put((size, str(self.folder / f"store{self.runs}"), function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < size:
            try:
                rank, ok, value = self.results.get(timeout=GRACE_S if failures else timeout_s)
            except queue.Empty:
                break
            (results if ok else failures)[rank] = value
        if len(results) < size:
            self.stop()
            silent = sorted(set(range(size)) - set(results) - set(failures))
            shown = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
            raise WorkerError(f"{function}: failed on {sorted(failures)}, no answer from {silent}\n{shown}")
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []

    def _start(self) -> None:
        self.tasks = [self.context.SimpleQueue() for _ in range(MAX_RANKS)]
        self.results = self.context.Queue()
        for rank in range(MAX_RANKS):
            process = self.context.Process(target=_serve, args=(rank, self.tasks[rank], self.results), daemon=True)
            process.start()
            self.processes.append(process)


def _serve(rank: int, tasks: mp.SimpleQueue, results: mp.Queue) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as pytest's own process does: torch stays
    while True:
        size, store, function, args = tasks.get()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=TIMEOUT_S + START_S),
            )
            module, name = function.split(":")
            value = getattr(importlib.import_module(module), name)(*args)
            dist.barrier()
            dist.destroy_process_group()
            results.put((rank, True, value))
        except Exception:
            results.put((rank, False, traceback.format_exc()))
            return
