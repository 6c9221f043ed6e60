"""Under torchrun, on the devices of this machine: NCCL where there are two GPUs, else gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardc.runtime import launch_from_torch
from tests.runtime import toy


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    toy.write_plan(plans / "pipeline", pp=2)
    if torch.cuda.device_count() >= 2:
        toy.write_plan(plans / "interleaved", pp=2, stages=4, ranks=toy.interleaved(2, 4, 2))
        toy.write_plan(plans / "sequence", tp=2, sequence_parallel=True)
        toy.write_plan(plans / "data", microbatches=2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    root = Path(__file__).parents[2]
    command = [*launcher, "-m", "tests.runtime.launched", str(plans)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_without_a_launcher_the_job_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    launch_from_torch(seed=11)
    assert not dist.is_initialized()
    assert torch.initial_seed() == 11
