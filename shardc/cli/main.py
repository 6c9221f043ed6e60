"""The command `shardc`. Importing it loads neither torch nor transformers."""

from __future__ import annotations

import sys

import typer

from shardc.cli import check, compile, policy, run, show, verify

app = typer.Typer(
    help="Compile a Hugging Face model for many GPUs: readable parallel source, with a proof of its gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("compile")(compile.compile_command)
app.command("show")(show.show_command)
app.command("check")(check.check_command)
app.command("verify")(verify.verify_command)
app.add_typer(policy.app, name="policy")
app.command("run")(run.run_command)


def main(arguments: list[str] | None = None) -> None:
    """Run one command; exit with 2 for a user's mistake, 1 for a plan that is refuted or unequal."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"] and arguments[1:] and arguments[1] not in ("--help", "-h"):
        run.launch(arguments[1:])  # around typer, which would read options meant for the script
    try:
        app(arguments)
    except Exception as error:
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Print a user's mistake and return the exit status; anything else is a fault of ours and keeps its traceback."""
    from shardc.errors import ShardcError  # loads torch: not before something has failed
    from shardc.plan.refuted import Refuted

    if not isinstance(error, ShardcError):
        raise error
    print(f"ShardcError: {error}", file=sys.stderr)
    return 1 if isinstance(error, Refuted) else 2


if __name__ == "__main__":
    main()
