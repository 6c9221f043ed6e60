"""shardc run: start a script on several ranks, by torchrun, of this machine or of several."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer


def _show_help(wanted: bool) -> None:
    if wanted:
        launch(["--help"])


def run_command(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGS]...")] = None,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
) -> None:
    """Start SCRIPT on several ranks, of this machine or of several."""
    launch(arguments or [])


def launch(arguments: list[str]) -> NoReturn:
    """Run the command line `shardc run ARGUMENTS`; exits with its status."""
    from shardc.launcher.launch import launch as start
    from shardc.launcher.options import parse

    try:
        sys.exit(start(parse(arguments)))
    except Exception as error:
        from shardc.errors import ShardcError  # loads torch: not before something has failed

        if not isinstance(error, ShardcError):
            raise
        print(f"ShardcError: {error}", file=sys.stderr)
        sys.exit(2)
