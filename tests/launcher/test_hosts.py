"""Hostfiles and the choice of hosts; the texts of their errors."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shardc.errors import ShardcError
from shardc.launcher.hosts import Host, choose, hosts_of, read_hostfile
from shardc.launcher.launch import launch
from shardc.launcher.options import parse

HOSTS = [Host("worker-0", 8), Host("worker-1", 4), Host("worker-2")]


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text(text)
    return path


def test_a_hostfile_has_slots_comments_blank_lines_and_bare_names(tmp_path: Path) -> None:
    text = "# the cluster\n\nworker-0 slots=8\n  worker-1\tslots = 4 # older\n\r\n"
    text += "me@worker-2.site.org\n[fe80::1%eth0]\n10.0.0.7"
    assert read_hostfile(write(tmp_path, text)) == [
        Host("worker-0", 8),
        Host("worker-1", 4),
        Host("me@worker-2.site.org"),
        Host("fe80::1%eth0"),
        Host("10.0.0.7"),
    ]


BAD_LINES = {
    "a word that is not slots": ("w0\nw1 slot=2", "line 2: 'w1 slot=2' is no host"),
    "slots without a number": ("w1 slots=", "line 1: 'w1 slots=' is no host"),
    "slots in words": ("w1 slots=two", "line 1: 'w1 slots=two' is no host"),
    "no slots at all": ("\n# c\nw1 slots=0 # none", "line 3: 'w1 slots=0' is no host"),
    "two hosts on a line": ("w1 w2", "line 1: 'w1 w2' is no host"),
    "an option of ssh": ("-oProxyCommand=x", "line 1: '-oProxyCommand=x' is no host"),
    "a command": ("w1;reboot", "line 1: 'w1;reboot' is no host"),
}


@pytest.mark.parametrize(("text", "problem"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_with_its_number(text: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ShardcError) as caught:
        read_hostfile(path)
    assert str(caught.value) == (
        f"{path}, {problem}; valid: HOST, or HOST slots=N with N of 1 or more\n  correct the line; # begins a comment"
    )


def test_other_faults_of_a_hostfile(tmp_path: Path) -> None:
    path = write(tmp_path, "w0 slots=2\n\nw1\nw0 slots=4\n")
    with pytest.raises(ShardcError) as caught:
        read_hostfile(path)
    assert str(caught.value) == (
        f"{path}, line 4: w0 is on line 1 already; valid: each host once\n"
        "  delete one of the lines; w0 slots=N starts N ranks"
    )
    with pytest.raises(ShardcError) as caught:
        read_hostfile(write(tmp_path, "# none\n"))
    assert str(caught.value) == f"{path}: it names no host\n  write one host a line: worker-0 slots=8"
    advice = "name a file with one host a line: worker-0 slots=8"
    for missing, reason in ((tmp_path / "none.txt", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ShardcError) as caught:
            read_hostfile(missing)
        assert str(caught.value) == f"--hostfile {missing}: {reason}\n  {advice}"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ShardcError, match="it is no text"):
        read_hostfile(path)


def test_include_and_exclude_keep_the_order_of_the_hosts() -> None:
    assert choose(HOSTS, "hosts.txt", "worker-2, worker-0", None) == [HOSTS[0], HOSTS[2]]
    assert choose(HOSTS, "hosts.txt", None, "worker-0") == HOSTS[1:]
    assert choose(HOSTS, "hosts.txt", None, None) == HOSTS


CHOICES = {
    "an unknown host": (
        "worker-9",
        None,
        "--include: worker-9 is not in hosts.txt; valid: worker-0, worker-1, worker-2\n  correct the name",
    ),
    "none left": (
        None,
        "worker-0,worker-1,worker-2",
        "--exclude worker-0,worker-1,worker-2 leaves no host of hosts.txt: worker-0, worker-1, worker-2\n"
        "  leave one in",
    ),
    "an empty name": ("worker-0,", None, "--include 'worker-0,': a name is empty\n  write --include worker-0,worker-1"),
    "a name twice": (
        None,
        "worker-0,worker-0",
        "--exclude worker-0,worker-0: worker-0 is there twice; valid: each host once\n  delete one of them",
    ),
}


@pytest.mark.parametrize(("include", "exclude", "text"), CHOICES.values(), ids=CHOICES)
def test_a_wrong_choice_of_hosts(include: str | None, exclude: str | None, text: str) -> None:
    with pytest.raises(ShardcError) as caught:
        choose(HOSTS, "hosts.txt", include, exclude)
    assert str(caught.value) == text


def test_names_on_the_command_line() -> None:
    assert hosts_of("a, me@b,[::1]") == [Host("a"), Host("me@b"), Host("::1")]
    with pytest.raises(ShardcError) as caught:
        hosts_of("a,-oProxyCommand=x")
    assert str(caught.value) == "--host: '-oProxyCommand=x' is no name of a host\n  write --host worker-0,worker-1"


def test_which_host_is_this_machine() -> None:
    for name in ("localhost", "127.0.0.1", "127.8.9.1", "::1", socket.gethostname()):
        assert Host(name).is_this_machine, name
    for name in ("192.0.2.1", "no-such-host.invalid", "somebody@localhost"):
        assert not Host(name).is_this_machine, name
    assert Host("me@worker-2").address == "worker-2"


MISTAKES = {
    "more nodes than hosts": (
        ["--host=a,b", "--nnodes=3", "x.py"],
        "--nnodes 3: the number of hosts is 2; valid: 1 to 2\n  leave --nnodes out to use all of them",
    ),
    "elastic nodes": (
        ["--host=a,b", "--nnodes=1:2", "x.py"],
        "--nnodes 1:2: the number of hosts is 2; valid: 1 to 2\n  leave --nnodes out to use all of them",
    ),
    "a node that is not there": (
        ["--host=a,b", "--node_rank=2", "x.py"],
        "--node_rank 2: the number of hosts is 2; valid: 0 to 1\n  leave --node_rank out to start all hosts from here",
    ),
    "standalone": (
        ["--host=a,b", "--standalone", "x.py"],
        "--standalone is one machine, and there are 2 hosts\n  leave one of them out",
    ),
    "a first host that others cannot find": (
        ["--host=localhost,a,b", "x.py"],
        "the first host is localhost, which a, b cannot reach by this name\n"
        "  name this machine as the others do, or give --master_addr",
    ),
    "a variable that is not set": (
        ["--env=SHARDC_NOT_SET", "x.py"],
        "--env SHARDC_NOT_SET: it is not set here\n  set it, or write --env SHARDC_NOT_SET=VALUE",
    ),
    "an ssh that is not there": (
        ["--host=a.invalid,b.invalid", "x.py"],
        "no such command: no-such-ssh, which reaches a.invalid, b.invalid\n"
        "  install ssh, or name another in SHARDC_SSH",
    ),
}


@pytest.mark.parametrize(("words", "text"), MISTAKES.values(), ids=MISTAKES)
def test_what_hosts_do_not_allow(words: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_SSH", "no-such-ssh -v")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("something was started"))
    with pytest.raises(ShardcError) as caught:
        launch(parse(words))
    assert str(caught.value) == text


def words_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of a command line that starts ranks on this machine only."""

    class Became(Exception):
        pass

    def execv(path: str, command: list[str]) -> None:
        raise Became(command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(Became) as became:
        launch(parse(words))
    command = became.value.args[0]
    assert command[1:3] == ["-m", "shardc.launcher.node"]
    return command[3:]


def test_what_torchrun_gets_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = str(write(tmp_path, "worker-0 slots=8\nworker-1 slots=4\nlocalhost slots=3\n"))
    rows = {
        "x.py -a": "--standalone --nproc_per_node=gpus -- x.py -a",
        "--nproc-per-node 2 -m x": "--standalone --nproc_per_node=2 --module -- x",
        "--standalone x.py": "--nproc_per_node=gpus --standalone -- x.py",
        "--rdzv-backend c10d x.py": "--nproc_per_node=gpus --rdzv_backend=c10d -- x.py",
        "--master-port 5 --max-restarts 1 x.py": "--master_port=5 --nproc_per_node=gpus --max_restarts=1 -- x.py",
        "--nnodes 1:4 x.py": "--nnodes=1:4 --nproc_per_node=gpus -- x.py",
        "-H localhost x.py": "--standalone --nproc_per_node=gpus -- x.py",
        f"--hostfile {hosts} --include localhost x.py": "--standalone --nproc_per_node=3 -- x.py",
        f"--hostfile {hosts} --node_rank 1 x.py": (
            "--nnodes=3 --node_rank=1 --master_addr=worker-0 --master_port=29500 --nproc_per_node=4 -- x.py"
        ),
        "-H a,b,c --nnodes 2 --node_rank 0 --nproc_per_node 2 --master_addr m --master_port 7 x.py": (
            "--nnodes=2 --node_rank=0 --master_addr=m --master_port=7 --nproc_per_node=2 -- x.py"
        ),
        "-H a,b --node_rank 1 --rdzv_endpoint m:7 --rdzv_backend c10d x.py": (
            "--nnodes=2 --node_rank=1 --nproc_per_node=gpus --rdzv_endpoint=m:7 --rdzv_backend=c10d -- x.py"
        ),
    }
    for words, command in rows.items():
        assert words_of(words.split(), monkeypatch) == command.split(), words


def test_torchruns_own_variable_sets_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert words_of(["x.py"], monkeypatch) == ["--standalone", "--nproc_per_node=5", "--", "x.py"]
    assert words_of(["--nproc_per_node=2", "x.py"], monkeypatch)[1] == "--nproc_per_node=2"
