"""Write a folder, or a file, in the place of an older one, whole or not at all."""

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
    with _removed_on_error(partial):
        yield partial
    for path in partial.iterdir():
        _flush(path)
    shutil.rmtree(old, ignore_errors=True)  # not before: of a write that was killed it may be the only whole one
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def replacing_file(path: str | Path) -> Iterator[Path]:
    """Gives the name of a file beside `path`, which takes its place at the end."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with _removed_on_error(partial):
        yield partial
    _flush(partial)
    os.replace(partial, path)


@contextmanager
def _removed_on_error(partial: Path) -> Iterator[None]:
    """A disk that is full has its space back."""
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    """Wait until the disk has it: otherwise a crash soon after the rename could leave the new name without content."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
