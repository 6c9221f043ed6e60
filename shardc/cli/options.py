"""Options that several commands share."""

from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A preset (Qwen3-4B), a local Hugging Face folder, a config.json, a hub id, or my_file.py:make_model.",
    ),
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor parallel: how many ranks share the work inside each layer.")]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline parallel: into how many stages of layers the model is cut.")]
Sp = Annotated[bool, typer.Option("--sp", help="Sequence parallel: tp ranks also share the work between the layers.")]
Schedule = Annotated[str, typer.Option("--schedule", help="Order of micro-batches in the pipeline: 1f1b or gpipe.")]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", help="Parts of a batch that go through the pipeline one by one. [default: 2 * pp]"),
]
Policy = Annotated[
    str | None, typer.Option("--policy", help="YAML file that says how layers are shared. [default: bundled]")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the model's config; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
