"""Joining a job: under torchrun, on the devices of this machine (NCCL where there are two GPUs), and by numbers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardc
from shardc.runtime import ShardcError, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
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


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher in the environment; the group is left afterwards."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> int:
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def has_ipv6() -> bool:
    try:
        return bool(free_port(socket.AF_INET6, "::1"))
    except OSError:
        return False


JOINING = """
import sys, torch, torch.distributed as dist, shardc
host, port, call = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = eval(call)
total = torch.tensor([dist.get_rank() + 1], device=device)
dist.all_reduce(total)
assert (device.type, dist.get_world_size(), total.item(), torch.initial_seed()) == (device.type, 3, 6, 5)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
)
def test_ranks_that_three_launchers_started_are_one_job(host: str, alone: None) -> None:
    ranks: list[tuple[str, dict[str, str]]] = [
        ("shardc.launch(0, 3, host, port, 'gloo', 0, 5)", {}),
        (
            "shardc.launch_from_slurm(host, port, 'gloo', 5)",
            {"SLURM_PROCID": "1", "SLURM_NPROCS": "3", "SLURM_LOCALID": "0"},
        ),
        (
            "shardc.launch_from_openmpi(host=host, port=port, backend='gloo', seed=5)",
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        ),
    ]
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING, host, port, call],
            env=os.environ | variables | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for call, variables in ranks
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(said)
    assert f"shardc: 3 ranks, backend gloo, {host}:{port}\n" in said[0]
    assert not any("shardc: " in text for text in said[1:])


def test_a_quiet_job_of_one_is_joined_once(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    for seed in (3, 4):
        assert launch(0, 1, "localhost", port, backend="gloo", seed=seed, verbose=False).type in ("cpu", "cuda")
        assert dist.get_world_size() == 1
        assert torch.initial_seed() == seed
    assert "shardc: " not in capfd.readouterr().err


SLURM = {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TORCH = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


MISSING = [
    *((launch_from_slurm, SLURM, name, "launch_from_slurm: ", "srun") for name in SLURM),
    *((launch_from_openmpi, OPENMPI, name, "launch_from_openmpi: ", "Open MPI's mpirun") for name in OPENMPI),
    *(
        (launch_from_torch, TORCH, name, "launch_from_torch: RANK is set, but ", "shardc run or torchrun")
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ),
]


@pytest.mark.parametrize(("function", "variables", "name", "context", "launcher"), MISSING, ids=[m[2] for m in MISSING])
def test_a_missing_variable_is_named(
    function: Callable[..., Any],
    variables: dict[str, str],
    name: str,
    context: str,
    launcher: str,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for other in variables.keys() - {name}:
        monkeypatch.setenv(other, variables[other])
    with pytest.raises(ShardcError) as caught:
        function() if function is launch_from_torch else function("127.0.0.1", 1)
    assert str(caught.value) == f"{context}{name} is not set in the environment\n  start the script by {launcher}"


def test_a_variable_that_is_no_number_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_NPROCS": "4(x2)"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardcError) as caught:
        launch_from_slurm("127.0.0.1", 1)
    assert str(caught.value) == (
        "SLURM_NPROCS='4(x2)' in the environment is no number\n  unset it, or let the launcher set it"
    )


def test_a_rank_outside_the_job_is_refused(alone: None) -> None:
    with pytest.raises(ShardcError) as caught:
        launch(2, 2, "127.0.0.1", 1)
    assert str(caught.value) == (
        "launch: rank=2 with world_size=2; valid: 0 to 1\n  ranks are numbered from 0 and each is used once"
    )


def test_a_port_in_use_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = (
            f"port {port} of 127.0.0.1 is in use\n"
            "  end the job that holds it, or choose another port (shardc run --master_port)"
        )
        with pytest.raises(ShardcError) as caught:
            launch(0, 2, "127.0.0.1", port, "gloo")
        assert str(caught.value) == text
        for name, value in (TORCH | {"WORLD_SIZE": "2", "MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ShardcError) as caught:
            launch_from_torch("gloo")
        assert str(caught.value) == text


def test_more_ranks_than_gpus_are_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ShardcError) as caught:
        launch(2, 4, "127.0.0.1", 1, local_rank=2)
    assert str(caught.value) == (
        "local rank 2: the number of GPUs that this process sees is 2; valid: 0 to 1\n"
        "  start at most 2 processes on this machine (shardc run --nproc_per_node 2)"
    )


def test_the_only_gpu_that_a_rank_sees_is_its_own_under_slurm(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, value in (SLURM | {"SLURM_LOCALID": "3"}).items():
        monkeypatch.setenv(name, value)
    launch_from_slurm("127.0.0.1", free_port(), "gloo", verbose=False)
    assert chosen == [torch.device("cuda", 0)]


@pytest.mark.parametrize("call", [lambda: launch_from_torch(config={}), lambda: launch_from_torch({})])
def test_config_has_no_effect_and_says_so(call: Callable[[], Any], alone: None) -> None:
    with pytest.warns(UserWarning, match="^config has no effect: settings are arguments of Booster and its plugins$"):
        call()


def test_the_package_exports_what_the_runtime_does() -> None:
    for name in ("launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"):
        assert getattr(shardc, name) is getattr(shardc.runtime, name)
        assert name in shardc.__all__


def test_without_a_launcher_the_job_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    launch_from_torch(seed=11)
    assert not dist.is_initialized()
    assert torch.initial_seed() == 11
