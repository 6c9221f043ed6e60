"""Plans that boost compiled, kept on disk by their keys."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path


class PlanCache:
    """Folders under $SHARDC_CACHE, or ~/.cache/shardc. Where that cannot be written, plans last for the process.

    A plan of forty layers takes half a MiB; nothing is ever removed, and the folder may be deleted at any time
    between two jobs."""

    def __init__(self) -> None:
        place = os.path.expanduser(os.environ.get("SHARDC_CACHE") or "~/.cache/shardc")
        # A user id without a home, as in a container: ~ would be a folder of the working directory.
        self.plans = None if place.startswith("~") else Path(place) / "plans"

    def read(self, key: str | None) -> dict[str, bytes] | None:
        """The files of a plan; None where there is none, or not all of it as it was written."""
        if key is None:
            return None
        kept = None if self.plans is None else _read(self.plans / key)
        return kept or _read(_place_in_process(key))

    def write(self, key: str | None, files: Mapping[str, bytes]) -> None:
        """Keep a plan, in the place of a damaged one. Does nothing, but warn, where the folder cannot be written."""
        if key is None or self.read(key) is not None:  # another job wrote it meanwhile, and may be reading it
            return
        try:
            if self.plans is None:
                raise OSError("there is no home folder")
            self.plans.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.plans / key, ignore_errors=True)
            self._put(key, files)
        except OSError as error:
            warnings.warn(
                f"plans are not kept: {error}; set SHARDC_CACHE to a folder that can be written", stacklevel=2
            )

    def folder(self, key: str | None, files: Mapping[str, bytes]) -> Path:
        """A folder of this machine that holds these files: of the cache if they are there, else of this process."""
        if key is not None and self.plans is not None and _read(self.plans / key) == dict(files):
            return self.plans / key
        place = _place_in_process(key or hashlib.sha256(files["plan.json"]).hexdigest())
        if not place.is_dir():
            place.mkdir(parents=True)
            _write(place, files)
        return place

    def _put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Whole or not at all, from a folder of its own: another job may write the same plan at this moment."""
        partial = Path(tempfile.mkdtemp(prefix=f".{key[:8]}.", dir=self.plans))
        try:
            _write(partial, files)
            os.rename(partial, self.plans / key)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if self.read(key) is None:  # not that the other job was first
                raise


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory:
    """It goes with the process."""
    return tempfile.TemporaryDirectory(prefix="shardc_plans_")


def _place_in_process(key: str) -> Path:
    return Path(_folder_of_process().name, key)


def _read(folder: Path) -> dict[str, bytes] | None:
    try:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        expected = json.loads(files["plan.json"])["sha256"]
        whole = all(hashlib.sha256(files[name]).hexdigest() == digest for name, digest in expected.items())
    except (OSError, KeyError, ValueError):
        return None
    return files if whole else None


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
