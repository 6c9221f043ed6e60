"""shardc verify: a plan beside the single-process model, on CPU ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardc.cli import options
from shardc.cli.output import new_table, print_json, stdout, steps

if TYPE_CHECKING:
    from shardc.plan.verification import VerifyResult

_ROWS = 8  # parameters in the table, the worst first


def verify_command(
    folder: Annotated[str | None, typer.Argument(metavar="DIR", help="A plan folder; or give --model.")] = None,
    model: options.Model = None,
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    dp: Annotated[int, typer.Option("--dp", help="Data parallel: replicas that share the rows of a batch.")] = 1,
    sp: options.Sp = False,
    padding: Annotated[str, typer.Option(help="Side of the rows that holds padding: none, left or right.")] = "none",
    schedule: options.Schedule = "1f1b",
    microbatches: options.Microbatches = None,
    policy: options.Policy = None,
    sets: options.Sets = None,
    keep: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep the small plan that ran in this folder.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Run one training step on dp * pp * tp CPU processes and compare it with plain transformers; exit 1 if unequal.

    The model is made small (its kind of layers, heads per KV head, ties and biases stay) and computes in float32. The
    model.py of DIR is what runs, hand edits included, with its sizes exchanged for the small ones. The loss and the
    gradient of every parameter must be equal up to rounding.
    """
    if (folder is None) == (model is None):
        raise typer.BadParameter("give a plan folder or --model, one of them; for example: shardc verify plans/x")
    from shardc.models import parse_set
    from shardc.plan.verification import verify

    with steps("verify") as progress:
        result = verify(
            folder or model,
            tp=tp,
            pp=pp,
            dp=dp,
            sp=sp,
            padding=padding,
            schedule=schedule,
            microbatches=microbatches,
            policy=policy,
            overrides=parse_set(sets or []),
            keep=keep,
            progress=progress,
        )
    if json:
        print_json(result.to_dict())
    else:
        _print(result)
    if not result.ok:
        raise typer.Exit(1)


def _print(result: VerifyResult) -> None:
    layout = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    stdout.print(f"ran {result.ran}", markup=False)
    if result.config:
        fields = {key: value for key, value in result.config.items() if isinstance(value, (int, float, str))}
        stdout.print(f"config: {', '.join(f'{key}={value}' for key, value in fields.items())}", markup=False)
    stdout.print(f"layout: {layout}")
    numbers = ("plan", "reference", "error / bound")
    table = new_table("", *numbers, right=numbers)
    table.add_row("loss", f"{result.loss:.7f}", f"{result.loss_ref:.7f}", f"{result.loss_error / 1e-5:.3f}")
    table.add_row("gradient norm", f"{result.grad_norm:.6f}", f"{result.grad_norm_ref:.6f}", "")
    for row in result.gradients[:_ROWS]:
        table.add_row(row.name, f"error {row.error:.2e}", f"bound {row.bound:.2e}", f"{row.ratio:.3f}")
    stdout.print(table)
    rest = len(result.gradients) - _ROWS
    if rest > 0:
        stdout.print(f"and {rest} gradients that are closer")
    worst = result.worst
    if result.ok:
        stdout.print(f"exact: loss and {len(result.gradients)} gradients, the worst {worst.name}", markup=False)
    else:
        stdout.print(
            f"NOT exact: {sum(g.ratio > 1 for g in result.gradients)} gradients differ, the worst {worst.name}"
        )
