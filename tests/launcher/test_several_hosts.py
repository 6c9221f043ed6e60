"""Jobs on two hosts, by a real ssh to this machine: output, first error, exit code; nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.machines import ALIAS, Run, Sshd, free_port, run, wait_until
from tests.launcher.test_one_machine import ODD

REDUCE = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
seen = any(b"a secret" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists())
names = ("ODD", "HF_ODD", "HF_TOKEN", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "OTHER", "LOCAL_WORLD_SIZE")
said = {
    "arguments": sys.argv[1:], "total": total.item(), "seen": seen, "ssh": "SSH_CONNECTION" in os.environ,
    **{name: os.environ.get(name) for name in names},
}
Path("rank" + os.environ["RANK"]).write_text(json.dumps(said))
print("rank", os.environ["RANK"], "reduces", flush=True)
dist.destroy_process_group()
"""
WAIT = """
import os, sys, time
from pathlib import Path
rank, what = os.environ["RANK"], sys.argv[1]
Path("pid" + rank).write_text(str(os.getpid()))
while len(list(Path().glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
sys.stderr.write("half a line")
if rank == "1" and what == "raise":
    raise ValueError("rank 1 is out of luck")
if rank == "1" and what == "exit":
    sys.exit(3)
if what == "connect":
    Path("ssh" + rank).write_text(str("SSH_CONNECTION" in os.environ))
    sys.exit()
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reduce it.py").write_text(REDUCE)
    (tmp_path / "wait.py").write_text(WAIT)
    return tmp_path


def started(folder: Path, sshd: Sshd, what: str) -> Run:
    """A job of two hosts with a rank each, all of which run."""
    job = Run(folder, *sshd.hostfile(folder, "127.0.0.1 slots=1", "localhost slots=1"), "wait.py", what, sshd=sshd)
    wait_until(lambda: len(list(folder.glob("pid*"))) == 2, "both ranks run")
    return job


def test_ranks_of_two_hosts_are_one_job_and_get_words_and_variables_unharmed(folder: Path, sshd: Sshd) -> None:
    odd = "a'b\"c $HOME `id` \\\n!"
    hosts = sshd.hostfile(folder, "127.0.0.1 slots=1 # the first", "", "localhost slots=2", "worker-2")
    variables = {"HF_ODD": odd, "HF_TOKEN": "a secret", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo", "OTHER": "x"}
    words = (*hosts, "--exclude=worker-2", "--env", f"ODD={odd}", "reduce it.py", *ODD)
    done = run(folder, *words, sshd=sshd, environment=variables)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(3)]
    assert [rank.pop("LOCAL_WORLD_SIZE") for rank in ranks] == ["1", "2", "2"]
    expected = {
        "arguments": ODD,
        "total": 6,
        "seen": False,
        "ssh": True,
        "ODD": odd,
        "HF_ODD": odd,
        "HF_TOKEN": "a secret",
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": None,
        "OTHER": None,
    }
    assert ranks == [expected] * 3
    assert sorted(line for line in done.stdout.splitlines() if "reduces" in line) == [
        "[127.0.0.1] rank 0 reduces",
        "[localhost] rank 1 reduces",
        "[localhost] rank 2 reduces",
    ]


def test_the_first_error_is_shown_last_and_a_host_that_waits_does_not_hide_it(folder: Path, sshd: Sshd) -> None:
    done = started(folder, sshd, "raise").end()
    assert done.returncode == 1
    pid, lines = (folder / "pid1").read_text(), done.stderr.splitlines()
    assert lines[-1] == (
        f"shardc run: rank 1 (local rank 0 of localhost, pid {pid}) failed first: ValueError: rank 1 is out of luck"
    )
    assert lines[-2] == "ValueError: rank 1 is out of luck"
    assert lines[-5] == "Traceback (most recent call last):"
    assert "[localhost] ValueError: rank 1 is out of luck" in lines
    assert any(line.startswith("[127.0.0.1] half a line") for line in lines)


def test_the_exit_code_of_the_first_failure_is_that_of_the_job(folder: Path, sshd: Sshd) -> None:
    done = started(folder, sshd, "exit").end()
    assert done.returncode == 3
    pid = (folder / "pid1").read_text()
    assert done.stderr.splitlines()[-1] == (
        f"shardc run: rank 1 (local rank 0 of localhost, pid {pid}) ended first, with exit code 3; "
        "what it printed is above"
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_nothing_is_left_on_any_host_after(number: signal.Signals, code: int, folder: Path, sshd: Sshd) -> None:
    job = started(folder, sshd, "wait")
    job.send(number)
    done = job.end()
    assert done.returncode == code
    if number != signal.SIGKILL:
        assert done.stderr.splitlines()[-1] == f"shardc run: ended by {number.name}"


def test_a_connection_that_breaks_ends_all(folder: Path, sshd: Sshd) -> None:
    job = started(folder, sshd, "wait")
    ssh = next(words for words in job.left() if words.startswith("ssh ") and " localhost " in words)
    for process in Path("/proc").glob("[0-9]*"):
        if (process / "cmdline").exists() and (process / "cmdline").read_bytes().decode().replace("\0", " ") == ssh:
            os.kill(int(process.name), signal.SIGTERM)
    done = job.end()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("shardc run: the connection to localhost is lost: ")


def test_this_machine_is_started_without_ssh_beside_a_host_that_only_ssh_knows(folder: Path, sshd: Sshd) -> None:
    words = ("--host", f"localhost,{ALIAS}", "--nproc_per_node=1", "--master_addr=127.0.0.1", "wait.py", "connect")
    done = run(folder, *words, sshd=sshd)
    assert done.returncode == 0, done.stderr
    assert [(folder / f"ssh{rank}").read_text() for rank in (0, 1)] == ["False", "True"]


def test_a_first_host_that_only_ssh_knows_is_named(folder: Path, sshd: Sshd) -> None:
    done = run(folder, "--host", f"{ALIAS},localhost", "wait.py", "wait", sshd=sshd)
    assert done.returncode == 2
    assert done.stderr == (
        f"ShardcError: {ALIAS} is reached, but no address is found for it, "
        "and it is the host that all ranks connect to\n  give its address: --master_addr ADDRESS\n"
    )


def test_one_host_has_no_prefix(folder: Path, sshd: Sshd) -> None:
    words = ("--host", ALIAS, "--nproc_per_node=1", "--master_addr=127.0.0.1", "wait.py", "connect")
    done = run(folder, *words, sshd=sshd)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "half a line"


def test_a_port_that_is_in_use_is_named(folder: Path, sshd: Sshd) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        hosts = sshd.hostfile(folder, "127.0.0.1 slots=1", "localhost slots=1")
        done = run(folder, *hosts, f"--master_port={port}", "wait.py", "wait", sshd=sshd)
    assert done.returncode == 1
    assert "failed first: " in done.stderr.splitlines()[-1]
    assert f"port: {port}" in done.stderr.splitlines()[-1]


def test_an_unreachable_host_is_named_with_what_ssh_says_and_nothing_starts(folder: Path, sshd: Sshd) -> None:
    hosts = f"{ALIAS},no-such-host.invalid"
    done = run(folder, "--host", hosts, "--master_addr=127.0.0.1", "wait.py", "wait", sshd=sshd)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("shardc run: cannot reach no-such-host.invalid: ssh: Could not resolve hostname ")
    assert done.stderr.count("\n") == 1
    assert not list(folder.glob("pid*"))

    port = free_port()
    done = run(folder, "--host", "127.0.0.1", f"--ssh-port={port}", "wait.py", "wait", sshd=sshd)
    assert done.returncode == 1
    assert done.stderr.startswith(f"shardc run: cannot reach 127.0.0.1: ssh: connect to host 127.0.0.1 port {port}: ")


def test_a_host_that_never_answers_is_given_up_within_the_connect_timeout(folder: Path, sshd: Sshd) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port, began_s = silent.getsockname()[1], time.monotonic()
        words = ("--host=127.0.0.1,localhost", f"--ssh-port={port}", "--connect-timeout=2", "wait.py", "wait")
        done = run(folder, *words, sshd=sshd)
    assert done.returncode == 1
    assert time.monotonic() - began_s < 15
    assert done.stderr.startswith("shardc run: cannot reach ")
    assert "timed out" in done.stderr
    assert done.stderr.count("\n") == 1


SSH = {
    "ssh refuses": (
        "echo a banner >&2; echo 'Host key verification failed.' >&2; exit 255",
        "cannot reach 192.0.2.1: Host key verification failed.",
    ),
    "ssh says nothing": ("exit 255", "cannot reach 192.0.2.1: exit code 255"),
    "there is no Python": (
        "echo 'sh: no such file' >&2; exit 127",
        f"192.0.2.1 cannot start {sys.executable}: sh: no such file; each host needs it at this path",
    ),
}


@pytest.mark.parametrize(("does", "text"), SSH.values(), ids=SSH)
def test_a_host_that_cannot_start_is_one_line(does: str, text: str, folder: Path) -> None:
    (folder / "ssh").write_text(f"#!/bin/sh\n{does}\n")
    (folder / "ssh").chmod(0o755)
    done = run(folder, "--host=192.0.2.1", "wait.py", "wait", environment={"SHARDC_SSH": str(folder / "ssh")})
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"shardc run: {text}\n")
