"""Which environment variables the ranks of other machines get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from shardc.launcher.mistake import mistake

SENT = (
    "PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "CUDA_*",
    "HF_*",
    "NCCL_*",
    "SHARDC_*",
    "TORCH_*",
)
OF_ONE_MACHINE = (  # names of its own devices and files: never sent, except by --env
    "CUDA_VISIBLE_DEVICES",
    "NCCL_HOSTID",
    "NCCL_IB_HCA",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_FILE",
)


def sent(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this machine that every machine gets."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_ONE_MACHINE and any(fnmatchcase(name, pattern) for pattern in SENT)
    }


def named(options: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of --env NAME=VALUE, and of --env NAME with the value that it has here."""
    variables = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise mistake(
                f"--env {option!r}: {name!r} is no name of a variable", "write --env NAME or --env NAME=VALUE"
            )
        if not equals and name not in environment:
            raise mistake(f"--env {name}: it is not set here", f"set it, or write --env {name}=VALUE")
        variables[name] = value if equals else environment[name]
    return variables
