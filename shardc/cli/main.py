"""The command `shardc`. Importing it loads neither torch nor transformers."""

from __future__ import annotations

import os
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
    if arguments is None:
        arguments = sys.argv[1:]
        if arguments[:1] != ["run"]:  # which hands its environment on to the script
            _fix_hash_seed()
    try:
        if arguments[:1] == ["run"]:
            run.launch(arguments[1:])  # around typer, which would read options meant for the script
        app(arguments)
    except Exception as error:
        sys.exit(_report(error))


def _fix_hash_seed() -> None:
    """Start this command again under a fixed hash seed, unless the user chose one.

    Models go through sets of strings (Gemma-3 through its layer types), whose order the seed decides, and with it the
    order of lines in model.py: the same input must give the same bytes."""
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
