"""Hosts for the launcher: an sshd of our own on loopback, jobs as processes, and what they leave behind."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 120
ALIAS = "shardc-test-host"  # of this machine, known to ssh only


@dataclass(frozen=True)
class Sshd:
    """port, and the command that may log in there."""

    port: int
    command: str

    def hostfile(self, folder: Path, *lines: str) -> list[str]:
        """Options for a job on the hosts of these lines."""
        path = folder / "hosts.txt"
        path.write_text("\n".join(lines) + "\n")
        return ["--hostfile", str(path), "--ssh-port", str(self.port)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program(name: str) -> str:
    """Its path; where the system lacks it, the test fails in CI and is skipped elsewhere."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        reason = f"{name} is missing: apt-get install openssh-server openssh-client"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return found


@contextmanager
def running_sshd(folder: Path) -> Iterator[Sshd]:
    """An sshd with its own keys and configuration in `folder`, which nobody else can log in to."""
    server, port = program("sshd"), free_port()
    program("ssh")
    for key in ("host", "user"):
        subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    (folder / "known_hosts").write_text(f"shardc-test {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "ssh_config").write_text(
        f"Host {ALIAS}\n  HostName 127.0.0.1\n  Port {port}\nHost *\n  AddressFamily inet\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        f"  HostKeyAlias shardc-test\n  UserKnownHostsFile {folder}/known_hosts\n  LogLevel ERROR\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # an sshd of root starts only where it is
    log = folder / "log"
    process = subprocess.Popen([server, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)])
    try:
        wait_until(lambda: process.poll() is not None or can_connect(port), "sshd listens")
        assert process.poll() is None, log.read_text()
        yield Sshd(port, f"ssh -F {folder}/ssh_config")
    finally:
        process.terminate()
        process.wait()


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


class Run:
    """`shardc run` as a process, in a folder of its own."""

    def __init__(
        self, folder: Path, *arguments: str, sshd: Sshd | None = None, environment: dict[str, str] | None = None
    ):
        self.folder = folder
        variables = {"SHARDC_SSH": sshd.command} if sshd else {}
        here = {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}
        environment = here | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables | (environment or {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardc.cli.main", "run", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Its output and exit code, once nothing of it is left running."""
        try:
            out, err = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            for process in left_running(self.folder):
                os.kill(process, signal.SIGKILL)
            raise
        until = time.monotonic() + 20
        while left := self.left():
            assert time.monotonic() < until, left
            time.sleep(0.05)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def left(self) -> list[str]:
        return [words_of(process) for process in left_running(self.folder)]


def run(folder: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return Run(folder, *arguments, **options).end()


def left_running(folder: Path) -> list[int]:
    """Processes that stand in the folder: all of a job do, but for ssh and what waits to be told."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = os.readlink(process / "cwd")
        except OSError:
            continue
        if Path(where) == folder and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


def words_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "(ended)"
