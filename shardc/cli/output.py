"""How commands speak: results on stdout, progress on a terminal's stderr only, JSON for machines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_WIDE = 200  # columns of a table that is written to a file or a pipe

stdout = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


@contextlib.contextmanager
def steps(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the name of the running step; on anything but a terminal it shows nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda name: progress.update(task, description=f"{title}: {name}")


def print_times(seconds: dict[str, float]) -> None:
    """The time of each pass, on stderr."""
    width = max(map(len, seconds))
    for name, time_s in seconds.items():
        print(f"{name:<{width}}  {time_s:8.3f} s", file=sys.stderr)


def new_table(*columns: str, title: str | None = None, right: Collection[str] = ()) -> Table:
    """A table without a frame; the columns named in `right` hold numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def billions(count: int) -> str:
    """ "4.02 B" parameters."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
