"""Which machines take part, in the order of their ranks."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardc.launcher.mistake import mistake

_NAME = r"(?:[\w.-]+@)?\[?[\w:][\w.:%-]*\]?"  # user@host; nothing that ssh would take for an option
_LINE = re.compile(rf"({_NAME})(?:\s+slots\s*=\s*(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as the user names it. slots: ranks on it; None is one for each of its GPUs."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The name without the user that ssh logs in as."""
        return self.name.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether the name means another machine on each machine."""
        if self.address == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return False

    @property
    def is_this_machine(self) -> bool:
        """Whether an address of the name is one of this machine; with a user, it is reached by ssh like any other."""
        if "@" in self.name:
            return False
        if self.is_loopback or self.address == socket.gethostname():
            return True
        try:
            found = socket.getaddrinfo(self.address, None, type=socket.SOCK_DGRAM)
        except OSError:
            return False  # a name that only ssh's own configuration knows
        return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def read_hostfile(path: Path) -> list[Host]:
    """One host a line, `worker-0 slots=8` or `worker-0`; `#` begins a comment. Raises ShardcError naming the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise mistake(f"--hostfile {path}: {reason}", "name a file with one host a line: worker-0 slots=8") from None
    hosts: dict[str, tuple[Host, int]] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        slots = int(match[2]) if match and match[2] else None
        if match is None or slots == 0:
            raise mistake(
                f"{path}, line {number}: {text!r} is no host; valid: HOST, or HOST slots=N with N of 1 or more",
                "correct the line; # begins a comment",
            )
        name = _plain(match[1])
        if name in hosts:
            raise mistake(
                f"{path}, line {number}: {name} is on line {hosts[name][1]} already; valid: each host once",
                f"delete one of the lines; {name} slots=N starts N ranks",
            )
        hosts[name] = Host(name, slots), number
    if not hosts:
        raise mistake(f"{path}: it names no host", "write one host a line: worker-0 slots=8")
    return [host for host, _ in hosts.values()]


def hosts_of(names: str) -> list[Host]:
    """The hosts of --host h1,h2."""
    parts = _split("--host", names)
    for name in parts:
        if not re.fullmatch(_NAME, name, re.ASCII):
            raise mistake(f"--host: {name!r} is no name of a host", "write --host worker-0,worker-1")
    return [Host(_plain(name)) for name in parts]


def choose(hosts: Sequence[Host], source: str, include: str | None, exclude: str | None) -> list[Host]:
    """The hosts that --include names, or those that --exclude does not; in their own order. source: where they are."""
    option, names = ("--include", include) if include is not None else ("--exclude", exclude)
    if names is None:
        return list(hosts)
    wanted, valid = _split(option, names), [host.name for host in hosts]
    for name in wanted:
        if name not in valid:
            raise mistake(f"{option}: {name} is not in {source}; valid: {', '.join(valid)}", "correct the name")
    chosen = [host for host in hosts if (host.name in wanted) == (include is not None)]
    if not chosen:
        raise mistake(f"{option} {names} leaves no host of {source}: {', '.join(valid)}", "leave one in")
    return chosen


def _plain(name: str) -> str:
    """Without the brackets of an IPv6 address, which ssh does not take."""
    return name.replace("[", "").replace("]", "")


def _split(option: str, names: str) -> list[str]:
    parts = [part.strip() for part in names.split(",")]
    if not all(parts):
        raise mistake(f"{option} {names!r}: a name is empty", f"write {option} worker-0,worker-1")
    for part in parts:
        if parts.count(part) > 1:
            raise mistake(f"{option} {names}: {part} is there twice; valid: each host once", "delete one of them")
    return parts
