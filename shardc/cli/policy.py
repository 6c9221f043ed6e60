"""shardc policy: the bundled policy files."""

from __future__ import annotations

from typing import Annotated

import typer

from shardc.cli import options
from shardc.cli.output import print_json, stdout

app = typer.Typer(help="List and print the bundled policies: how layers are shared.", no_args_is_help=True)


@app.command("list")
def list_command(json: options.Json = False) -> None:
    """List the bundled policies and the model types that they are for."""
    from shardc.policy import bundled_policies, load_bundled

    models = {name: list(load_bundled(name).models) for name in bundled_policies()}
    if json:
        print_json(models)
        return
    width = max(map(len, models))
    for name, types in models.items():
        stdout.print(f"{name:<{width}}  {', '.join(types)}")


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `shardc policy list` prints.")],
    json: options.Json = False,
) -> None:
    """Print a bundled policy as a file to start your own from."""
    from shardc.policy import load_bundled, policy_to_dict, policy_to_yaml

    policy = load_bundled(name)
    if json:
        print_json(policy_to_dict(policy))
    else:
        stdout.print(policy_to_yaml(policy), end="", markup=False)
