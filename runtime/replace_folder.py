"""Write a folder, or a file, in the place of an older one, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardc.runtime.errors import ShardcError


@contextmanager
def replacing(folder: str | Path, *, is_old: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Gives an empty folder beside `folder`, which takes its place at the end: a killed write leaves the old one whole.

    What else lies in the old one, folders too, is kept; is_old: says of a name there that an earlier write left it,
    and that it goes. Raises ShardcError where `folder` is a file."""
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise ShardcError(f"{folder} is a file, not a folder", "give another name")
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with _removed_on_error(partial):
        yield partial
        for path in partial.iterdir():
            _flush(path)
        for path in folder.iterdir() if folder.exists() else ():
            if not (is_old(path.name) or (partial / path.name).exists()):
                _link(path, partial / path.name)
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


def _link(path: Path, other: Path) -> None:
    """The same file, or a folder of the same files, under another name: nothing is copied where the disk can link."""
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, other, symlinks=True, copy_function=_link_file)
    else:
        _link_file(path, other)


def _link_file(path: str | Path, other: str | Path) -> None:
    try:
        os.link(path, other, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, other, follow_symlinks=False)


def _flush(path: Path) -> None:
    """Wait until the disk has it: otherwise a crash soon after the rename could leave the new name without content."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
