"""shardc show: who holds what in a plan, and what passes between the stages."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table

from shardc.cli import options
from shardc.cli.output import billions, gib, new_table, print_json, stdout


def show_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder that `shardc compile` wrote.")],
    json: options.Json = False,
) -> None:
    """Print what each stage of a plan holds, sends and computes, and how parameters are shared."""
    from shardc.plan.summary import summarize

    summary = summarize(folder)
    if json:
        print_json(summary)
        return
    mesh = summary["mesh"]
    sequence = ", sequence parallel" if mesh["sequence_parallel"] else ""
    sub_axes = f" ({' * '.join(f'{n} {name}' for name, n in mesh['sub_axes'].items())})" if mesh["sub_axes"] else ""
    proved = "proved" if summary["proved"] else "not proved"
    stdout.print(
        f"{summary['model']}: {billions(summary['parameters'])} parameters in {summary['dtype']}, "
        f"tp {mesh['tp']}{sub_axes}, pp {mesh['pp']}{sequence}; {proved}"
    )
    stdout.print(_stages(summary))
    schedule = summary["schedule"]
    stdout.print(
        f"schedule {schedule['name']}, {schedule['microbatches']} micro-batches: "
        f"{summary['bubble']:.0%} of the time a rank waits (the bubble)"
    )
    for tie in summary["ties"]:
        stages = " and ".join(map(str, tie["stages"]))
        stdout.print(f"{tie['parameter']} is held by stages {stages}; its gradient is summed over them")
    stdout.print(_layouts(summary["layouts"]))
    stdout.print(_attention(summary["attention"]))


def _stages(summary: dict[str, Any]) -> Table:
    numbers = ("stage", "blocks", "parameters", "GiB", "of the work", "micro-batches alive")
    columns = ("stage", "blocks", "from", *numbers[2:], "receives")
    table = new_table(*columns, title="What a rank of each stage holds", right=numbers)
    total = sum(stage["flops_per_token"] for stage in summary["stages"]) or 1
    for stage in summary["stages"]:
        table.add_row(
            str(stage["index"]),
            str(stage["blocks"]),
            stage["first_block"] or "the input",
            billions(stage["parameters"]),
            gib(stage["parameter_bytes"]),
            f"{stage['flops_per_token'] / total:.1%}",
            str(stage["microbatches_alive"]),
            ", ".join(_tensor(sent) for sent in stage["receives"]) or "the batch",
        )
    return table


def _tensor(sent: dict[str, Any]) -> str:
    return f"{sent['name']} [{', '.join(map(str, sent['shape']))}]"


def _layouts(rows: list[dict[str, Any]]) -> Table:
    columns = ("parameter", "number", "shape", "a rank keeps", "gradient summed over")
    table = new_table(*columns, title="How parameters are shared", right=("number",))
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        table.add_row(row["pattern"], str(row["count"]), shape, _kept(row["shard"]), ", ".join(row["grad_reduce"]))
    return table


def _kept(shard: dict[str, Any] | None) -> str:
    """ "dim 0 over tp", with the factors where the split is not of the whole dim."""
    if shard is None:
        return "all"
    axes = ", ".join(dict.fromkeys(axis for segment in shard["segments"] for _, axis in segment["splits"]))
    parts = " | ".join("*".join(map(str, segment["sizes"])) for segment in shard["segments"])
    return f"dim {shard['dim']} over {axes} ({parts})"


def _attention(calls: list[dict[str, Any]]) -> Table | str:
    if not calls:
        return "attention: written out by the model, no scaled_dot_product_attention"
    table = new_table("batch", "calls", "is_causal", "enable_gqa", title="Attention kernels", right=("calls",))
    counts = Counter((call["variant"], call["is_causal"], call["enable_gqa"]) for call in calls)
    for (variant, causal, grouped), count in counts.items():
        table.add_row(variant, str(count), str(causal), str(grouped))
    return table
