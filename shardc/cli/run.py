"""shardc run: start a script on several ranks, by torchrun, of this machine or of several."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer


def run_command(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGS]...")] = None,
) -> None:
    """Start SCRIPT on several ranks, of this machine or of several."""
    launch(arguments or [])


def launch(arguments: list[str]) -> NoReturn:
    """Run the command line `shardc run ARGUMENTS`; exits with its status. Raises ShardcError for wrong hosts."""
    from shardc.launcher.launch import launch as start
    from shardc.launcher.options import parse

    sys.exit(start(parse(arguments)))
