"""Write a folder in the place of an older one, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Gives an empty folder beside `folder`, which takes its place at the end: a killed write leaves the old one whole.

    Files of the old one go with it; the caller copies those that should stay."""
    folder = Path(folder).absolute()
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(old, ignore_errors=True)  # not before: of a write that was killed it may be the only whole one
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
