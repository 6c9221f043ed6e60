"""From what the command line asks for to processes: torchrun here, or one on each host."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from shardc.launcher import environment
from shardc.launcher.hosts import Host, choose, hosts_of, read_hostfile
from shardc.launcher.job import Job, ssh_command
from shardc.launcher.mistake import mistake
from shardc.launcher.node import GPUS
from shardc.launcher.options import Request

DEFAULT_PORT = 29500  # torchrun's


def launch(request: Request) -> int:
    """Run it; returns the exit status, or becomes the process that holds this machine's ranks.

    Raises ShardcError where the hosts are wrong.
    """
    hosts = _hosts(request)
    os.environ.update(environment.named(request.env, os.environ))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not hosts:
        _become([*_places(request), *_words(request, None)])
    if request.node_rank is not None:
        rank = _checked_rank(request.node_rank, hosts)
        port = DEFAULT_PORT if request.master_port is None else request.master_port
        _become(_words_of_host(request, hosts, rank, port))
    if len(hosts) == 1 and request.ssh_port is None and hosts[0].is_this_machine:
        _become([*_places(request), *_words(request, hosts[0].slots)])
    _check_several(request, hosts)
    by_ssh = [request.ssh_port is not None or not host.is_this_machine for host in hosts]
    _check_ssh([host for host, needs_it in zip(hosts, by_ssh, strict=True) if needs_it])

    def words(rank: int, port: int) -> list[str]:
        if request.master_addr is None:
            _check_address(hosts[0])  # not before all hosts are reached: of one that is not, ssh knows more
        return _words_of_host(request, hosts, rank, port)

    return Job(
        list(zip(hosts, by_ssh, strict=True)),
        words=words,
        variables=environment.sent(os.environ) | environment.named(request.env, os.environ),
        port=request.master_port,
        ssh_port=request.ssh_port,
        connect_timeout_s=request.connect_timeout,
    ).run()


def _hosts(request: Request) -> list[Host]:
    """The chosen hosts; none where the command line names none."""
    if request.hostfile is not None:
        source, hosts = str(request.hostfile), read_hostfile(request.hostfile)
    elif request.host is not None:
        source, hosts = "--host", hosts_of(request.host)
    else:
        return []
    hosts = choose(hosts, source, request.include, request.exclude)
    if request.nnodes is None:
        return hosts
    if not request.nnodes.isdecimal() or not 1 <= int(request.nnodes) <= len(hosts):
        raise mistake(
            f"--nnodes {request.nnodes}: the number of hosts is {len(hosts)}; valid: 1 to {len(hosts)}",
            "leave --nnodes out to use all of them",
        )
    return hosts[: int(request.nnodes)]


def _checked_rank(rank: int, hosts: Sequence[Host]) -> int:
    if rank >= len(hosts):
        raise mistake(
            f"--node_rank {rank}: the number of hosts is {len(hosts)}; valid: 0 to {len(hosts) - 1}",
            "leave --node_rank out to start all hosts from here",
        )
    return rank


def _check_several(request: Request, hosts: Sequence[Host]) -> None:
    if request.gives("--standalone"):
        raise mistake(f"--standalone is one machine, and there are {len(hosts)} hosts", "leave one of them out")
    if request.master_addr is None and hosts[0].is_loopback and not all(host.is_loopback for host in hosts):
        others = ", ".join(host.name for host in hosts if not host.is_loopback)
        raise mistake(
            f"the first host is {hosts[0].name}, which {others} cannot reach by this name",
            "name this machine as the others do, or give --master_addr",
        )


def _check_address(host: Host) -> None:
    try:
        socket.getaddrinfo(host.address, None)
    except OSError:
        raise mistake(
            f"{host.name} is reached, but no address is found for it, and it is the host that all ranks connect to",
            "give its address: --master_addr ADDRESS",
        ) from None


def _check_ssh(hosts: Sequence[Host]) -> None:
    command = ssh_command()[0]
    if hosts and shutil.which(command) is None:
        raise mistake(
            f"no such command: {command}, which reaches {', '.join(host.name for host in hosts)}",
            "install ssh, or name another in SHARDC_SSH",
        )


def _places(request: Request) -> list[str]:
    """torchrun's words for where this machine stands; alone, it takes a free port, so that two jobs do not collide."""
    given = {
        "--nnodes": request.nnodes,
        "--node_rank": request.node_rank,
        "--master_addr": request.master_addr,
        "--master_port": request.master_port,
    }
    words = [f"{option}={value}" for option, value in given.items() if value is not None]
    return words if words or request.gives("--rdzv", "--standalone") else ["--standalone"]


def _words_of_host(request: Request, hosts: Sequence[Host], rank: int, port: int) -> list[str]:
    """torchrun's words for one of several hosts."""
    address = hosts[0].address if request.master_addr is None else request.master_addr
    master = [] if request.gives("--rdzv_endpoint") else [f"--master_addr={address}", f"--master_port={port}"]
    return [f"--nnodes={len(hosts)}", f"--node_rank={rank}", *master, *_words(request, hosts[rank].slots)]


def _words(request: Request, slots: int | None) -> list[str]:
    """The other words for torchrun.

    "--" ends its options: without it, it would take a script's --log for an abbreviation of its --log-dir."""
    ranks = request.nproc_per_node or slots or GPUS
    if request.nproc_per_node is None and slots is None and "PET_NPROC_PER_NODE" in os.environ:
        ranks = os.environ["PET_NPROC_PER_NODE"]  # torchrun's own way to set a default
    return [f"--nproc_per_node={ranks}", *request.torchrun, "--", *request.script]


def _become(words: list[str]) -> NoReturn:
    """The process that holds this machine's ranks, in place of this one."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "shardc.launcher.node", *words])
