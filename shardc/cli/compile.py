"""shardc compile: a model's name in, a plan folder out."""

from __future__ import annotations

import time
from math import prod
from typing import Annotated

import typer

from shardc.cli import options
from shardc.cli.output import billions, print_json, print_times, stdout, steps


def compile_command(
    model: Annotated[str, options.Model.__metadata__[0]],
    out: Annotated[str, typer.Option("-o", "--out", help="Folder that the plan is written to.")],
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    sp: options.Sp = False,
    schedule: options.Schedule = "1f1b",
    microbatches: options.Microbatches = None,
    policy: options.Policy = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32: what the model computes in.")] = "bf16",
    sets: options.Sets = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the time of each pass.")] = False,
    json: options.Json = False,
) -> None:
    """Turn a model into a plan: readable source for every stage, with a proof of its gradients.

    Reads the model's config only, no weights. The plan trains on tp * pp ranks, or any multiple of that.
    """
    start = time.perf_counter()
    from shardc.models import parse_set
    from shardc.plan.compile import compile_plan
    from shardc.plan.folder import write_plan

    with steps("compile") as progress:
        plan = compile_plan(
            model,
            tp=tp,
            pp=pp,
            sp=sp,
            schedule=schedule,
            microbatches=microbatches,
            policy=policy,
            dtype=dtype,
            overrides=parse_set(sets or []),
            progress=progress,
        )
        progress("write")
        folder = write_plan(plan, out)
    seconds = time.perf_counter() - start
    if verbose:
        print_times(plan.seconds)
    certificate = plan.sharded.certificate
    params = sum(prod(p.shape) for p in plan.sharded.parameters.values())
    if json:
        print_json(
            {
                "plan": str(folder),
                "seconds": round(seconds, 3),
                "params": params,
                "stages": len(plan.stages),
                "proved": certificate.proved,
                "opaque": certificate.opaque,
            }
        )
        return
    facts = sum(certificate.obligations.values())
    state = "proved" if certificate.proved else f"proved, trusting the opaque modules {', '.join(certificate.opaque)}"
    stdout.print(f"{plan.source.name}: {billions(params)} parameters, tp {tp}, pp {pp}, {state} ({facts} facts)")
    if plan.sharded.propagated:
        stdout.print(f"sharded though no rule names them: {', '.join(plan.sharded.propagated)}")
    stdout.print(f"written to {out} in {seconds:.1f} s; next: shardc show {out}")
