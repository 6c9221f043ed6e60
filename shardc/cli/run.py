"""shardc run: start a script on several ranks by torch.distributed.run."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

_PLACES = ("--nnodes", "--node_rank", "--node-rank", "--master", "--rdzv", "--standalone")  # options that name a place


def run_command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[--nproc_per_node N] [OPTIONS] SCRIPT [ARGS]...", help="As torchrun takes them."),
    ],
) -> None:
    """Start SCRIPT on several ranks of this machine, or of several: torchrun's options, passed on as they are.

    For example: shardc run --nproc_per_node 4 train.py --lr 1e-3. See also torchrun --help.
    """
    launch(arguments)


def launch(arguments: list[str]) -> NoReturn:
    """Become torch.distributed.run with these arguments; its exit status is ours.

    On one machine it looks for a free port by itself, so that two jobs do not collide."""
    position = script_position(arguments)
    options, script = arguments[:position], arguments[position:]
    alone = [] if any(option.startswith(_PLACES) for option in options) else ["--standalone"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    # "--" ends torchrun's own options: without it, it would take a script's --log for an abbreviation of its --log-dir.
    separated = ["--", *script] if script and script[0] != "--" else script
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *alone, *options, *separated])


def script_position(arguments: list[str]) -> int:
    """Index of the script: the first argument that neither is an option nor follows one that takes a value."""
    flags = ("--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "--module", "-m", "--help", "-h")
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        takes_value = "=" not in arguments[position] and arguments[position] not in flags
        position += 2 if takes_value else 1
    return min(position, len(arguments))
