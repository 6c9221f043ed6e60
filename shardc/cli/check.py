"""shardc check: the proof, obligation by obligation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from shardc.cli import options
from shardc.cli.output import new_table, print_json, stdout, steps

if TYPE_CHECKING:
    from shardc.sharding.prove import Certificate


def check_command(
    folder: Annotated[str | None, typer.Argument(metavar="DIR", help="A plan folder; or give --model.")] = None,
    model: options.Model = None,
    tp: options.Tp = 2,
    pp: options.Pp = 1,
    sp: options.Sp = False,
    policy: options.Policy = None,
    sets: options.Sets = None,
    json: options.Json = False,
) -> None:
    """Prove that a plan computes the loss and every gradient of its model; exit with 1 if it does not.

    A folder is judged as it lies there, hand edits included. With --model and --policy nothing is written.
    """
    if (folder is None) == (model is None):
        raise typer.BadParameter("give a plan folder or --model, one of them; for example: shardc check plans/x")
    with steps("check") as progress:
        if folder is not None:
            from shardc.plan.check import check_folder

            certificate = check_folder(folder, progress)
        else:
            certificate = _of_model(model, tp, pp, sp, policy, sets, progress)
    if json:
        findings = [{"obligation": f.obligation, "where": f.where, "what": f.what} for f in certificate.findings]
        print_json(
            {
                "proved": certificate.proved,
                "opaque": certificate.opaque,
                "obligations": certificate.obligations,
                "findings": findings,
            }
        )
    else:
        _print(certificate)
    if certificate.findings:
        raise typer.Exit(1)


def _of_model(
    model: str,
    tp: int,
    pp: int,
    sp: bool,
    policy: str | None,
    sets: list[str] | None,
    progress: Callable[[str], None],
) -> Certificate:
    from shardc.models import parse_set
    from shardc.plan.compile import compile_plan
    from shardc.plan.refuted import Refuted

    try:
        plan = compile_plan(
            model, tp=tp, pp=pp, sp=sp, policy=policy, overrides=parse_set(sets or []), progress=progress
        )
    except Refuted as refuted:
        return refuted.certificate
    return plan.sharded.certificate


def _print(certificate: Certificate) -> None:
    failed = {finding.obligation for finding in certificate.findings}
    table = new_table("obligation", "facts", "", right=("facts",))
    for name, facts in certificate.obligations.items():
        table.add_row(name, str(facts), "refuted" if name in failed else "holds")
    stdout.print(table)
    for finding in dict.fromkeys(map(str, certificate.findings)):
        stdout.print(f"refuted: {finding}", markup=False)
    for path in certificate.opaque:
        stdout.print(f"trusted, not proved: {path}", markup=False)
    stdout.print(
        "proved" if certificate.proved else "refuted" if certificate.findings else "proved but for opaque modules"
    )
