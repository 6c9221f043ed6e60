"""Jobs on this machine: what the user sees, the exit code, and that nothing is left running."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.machines import Run, run, wait_until

ODD = ["--tp", "a b", "quote\"'s", "--", "--help", "$HOME", "-x=1", "new\nline", ""]
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
rank, what = os.environ["RANK"], sys.argv[1]
if what == "echo":
    said = [sys.argv[2:], os.environ["WORLD_SIZE"], os.environ["ODD"], os.environ.get("PYTHONPATH"), sys.stdin.read()]
    Path("rank" + rank).write_text(json.dumps(said))
    sys.exit()
if what in ("deaf", "stubborn"):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "daemon" and os.fork() == 0:
    os.setsid()
    time.sleep(600)
Path("pid" + rank).write_text(str(os.getpid()))
while len(list(Path().glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if rank == "1" and what in ("raise", "daemon"):
    raise ValueError("rank 1 is out of luck")
if rank == "1" and what == "exit":
    sys.exit(3)
if rank == "1" and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "the script.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = (), **more: object) -> Run:
    return Run(folder, "--nproc_per_node", str(ranks), *options, "the script.py", *arguments, **more)


def started(folder: Path, *arguments: str, **options: object) -> Run:
    """A job whose ranks all run."""
    job = start(folder, *arguments, **options)
    wait_until(lambda: len(list(folder.glob("pid*"))) == 2, "both ranks run")
    return job


def test_arguments_and_variables_arrive_unharmed_and_the_ranks_see_their_own_search_path(folder: Path) -> None:
    done = start(folder, "echo", *ODD, options=("--env", "ODD=a'b\"c $HOME"), environment={"PYTHONPATH": "a:b"}).end()
    assert done.returncode == 0, done.stderr
    expected = [ODD, "2", "a'b\"c $HOME", "a:b", ""]
    assert [json.loads((folder / f"rank{rank}").read_text()) for rank in (0, 1)] == [expected] * 2


@pytest.mark.parametrize(
    ("what", "options"), [("raise", ()), ("daemon", ()), ("raise", ("--run-path",))], ids=["", "daemon", "run path"]
)
def test_the_rank_that_fails_is_shown_last_and_ends_the_others(
    what: str, options: tuple[str, ...], folder: Path
) -> None:
    done = start(folder, what, ranks=3, options=options).end()
    assert done.returncode == 1
    pid = (folder / "pid1").read_text()
    lines = done.stderr.splitlines()
    assert lines[-1] == f"shardc run: rank 1 (pid {pid}) failed first: ValueError: rank 1 is out of luck"
    assert lines[-2] == "ValueError: rank 1 is out of luck"
    assert "Traceback (most recent call last):" in lines[-30:-4]
    assert "ChildFailedError" not in done.stderr


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("exit", 3, "ended first, with exit code 3; what it printed is above"),
        ("kill", 137, "was killed first, by signal 9 (SIGKILL); the kernel does that where memory runs out"),
    ],
)
def test_a_rank_that_ends_without_a_traceback(what: str, code: int, text: str, folder: Path) -> None:
    done = start(folder, what).end()
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"shardc run: rank 1 (pid {(folder / 'pid1').read_text()}) {text}"


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc_per_node=1", "none.py")
    assert done.returncode == 2
    assert "can't open file" in done.stderr


def test_ctrl_c_reaches_the_ranks_and_is_130(folder: Path) -> None:
    job = started(folder, "wait")
    job.send(signal.SIGINT)
    done = job.end()
    assert done.returncode == 130
    assert done.stderr.count("KeyboardInterrupt") == 2
    assert done.stderr.splitlines()[-1] == "shardc run: ended by SIGINT"


def test_a_rank_that_does_not_hear_ctrl_c_is_terminated(folder: Path) -> None:
    job = started(folder, "deaf")
    sent_s = time.monotonic()
    job.send(signal.SIGINT)
    assert job.end().returncode == 130
    assert time.monotonic() - sent_s < 25  # torchrun alone waits for 30 s


def test_ctrl_c_twice_ends_all_at_once(folder: Path) -> None:
    job = started(folder, "stubborn")
    job.send(signal.SIGINT)
    time.sleep(0.3)
    sent_s = time.monotonic()
    job.send(signal.SIGINT)
    done = job.end()
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "shardc run: ended by SIGINT"
    assert time.monotonic() - sent_s < 20  # torchrun alone waits for 30 s


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ranks_end_with_the_launcher(number: signal.Signals, code: int, folder: Path) -> None:
    job = started(folder, "wait")
    job.send(number)
    assert job.end().returncode == code


def test_ctrl_c_while_a_machine_is_awaited(folder: Path) -> None:
    """torchrun waits for machine 0 inside a call that no signal ends."""
    job = start(folder, "wait", options=("--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1", "--master_port=1"))
    wait_until(lambda: any("launcher.node" in words for words in job.left()), "torchrun is there")
    time.sleep(4)
    job.send(signal.SIGINT)
    done = job.end()
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "shardc run: ended by SIGINT"


def test_a_wrong_flag_prints_usage_and_exits_with_2(folder: Path) -> None:
    done = run(folder, "--no-such-flag", "the script.py")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: shardc run [OPTIONS] SCRIPT [ARGS]...\n")
    assert done.stderr.splitlines()[-1] == ("shardc run: error: no such option: --no-such-flag; see shardc run --help")


def test_a_mistake_in_the_hosts_is_two_lines_and_exit_2(folder: Path) -> None:
    (folder / "hosts.txt").write_text("localhost slots=1\nworker-1 slot=2\n")
    done = run(folder, "--hostfile", "hosts.txt", "the script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ShardcError: hosts.txt, line 2: 'worker-1 slot=2' is no host; "
        "valid: HOST, or HOST slots=N with N of 1 or more\n"
        "  correct the line; # begins a comment\n"
    )


def test_help_shows_options_and_examples(folder: Path) -> None:
    done = run(folder, "--help")
    assert done.returncode == 0
    assert "--hostfile FILE" in done.stdout
    assert "examples:" in done.stdout
