"""Plans that boost compiled, kept on disk by what they were made from."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardc.models.source import hf_config

_LIBRARIES = ("torch", "transformers", "peft")  # whose classes change with their version alone


class PlanCache:
    """Folders under $SHARDC_CACHE, or ~/.cache/shardc. Where that cannot be written, plans last for the process."""

    def __init__(self) -> None:
        place = os.environ.get("SHARDC_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "shardc")
        self.plans = Path(place) / "plans"

    def read(self, key: str | None) -> dict[str, bytes] | None:
        """The files of a plan; None where there is none, or not all of it as it was written."""
        if key is None:
            return None
        try:
            files = {path.name: path.read_bytes() for path in (self.plans / key).iterdir() if path.is_file()}
            expected = json.loads(files["plan.json"])["sha256"]
            whole = all(hashlib.sha256(files[name]).hexdigest() == digest for name, digest in expected.items())
        except (OSError, KeyError, ValueError):
            return None
        return files if whole else None

    def write(self, key: str | None, files: Mapping[str, bytes]) -> None:
        """Keep a plan, in the place of a damaged one. Does nothing, but warn, where the folder cannot be written."""
        if key is None:
            return
        try:
            self.plans.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.plans / key, ignore_errors=True)
            self._put(key, files)
        except OSError as error:
            warnings.warn(
                f"plans are not kept: {error}; set SHARDC_CACHE to a folder that can be written", stacklevel=2
            )

    def folder(self, key: str | None, files: Mapping[str, bytes]) -> Path:
        """A folder of this machine that holds these files: of the cache if they are there, else of this process."""
        if key is not None and self.read(key) == dict(files):
            return self.plans / key
        place = Path(_folder_of_process().name, key or hashlib.sha256(files["plan.json"]).hexdigest())
        if not place.is_dir():
            place.mkdir(parents=True)
            _write(place, files)
        return place

    def _put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Whole or not at all; another job may write the same plan meanwhile."""
        partial = Path(tempfile.mkdtemp(prefix=f".{key[:8]}.", dir=self.plans))
        _write(partial, files)
        try:
            os.rename(partial, self.plans / key)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)


def key_of(model: nn.Module, settings: Mapping[str, Any], policy: str | Path | None) -> str | None:
    """Hash of all that decides the plan of a model, but the values of its parameters.

    None, so that the plan is not kept, where a class is neither of torch, transformers nor peft: its code may change
    between two runs."""
    if any(_library_of(type(module)) is None for module in model.modules()):
        return None
    digest = hashlib.sha256()
    for part in _parts(model, settings, policy):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _parts(model: nn.Module, settings: Mapping[str, Any], policy: str | Path | None) -> Iterator[Any]:
    yield _own_sources()
    for library in _LIBRARIES:
        yield library, _version(library)
    yield sorted(settings.items())
    yield None if policy is None else Path(policy).read_text()
    config = hf_config(model)
    yield None if config is None else config.to_json_string(use_diff=False)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), parameter.requires_grad, first.setdefault(id(parameter), name)
    for name, buffer in model.named_buffers():
        yield name, tuple(buffer.shape), str(buffer.dtype)
        if not buffer.is_meta:  # a plan keeps the values of those that no checkpoint holds
            yield hashlib.sha256(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    for path, module in model.named_modules():
        simple = sorted((key, value) for key, value in vars(module).items() if _is_simple(value) and key != "training")
        yield path, type(module).__module__, type(module).__qualname__, simple


def _is_simple(value: Any) -> bool:
    """Numbers and names among a module's attributes, tuples and dicts of them (an adapter's scaling)."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(item, (int, float, str)) for item in value)
    return value is None or isinstance(value, (int, float, str))


def _library_of(kind: type) -> str | None:
    name = kind.__module__.partition(".")[0]
    return name if name in _LIBRARIES else None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@functools.cache
def _own_sources() -> str:
    """Digest of the compiler: its code, policies and templates decide what a plan is."""
    digest = hashlib.sha256()
    for package in ("shardc", "shardc.runtime", "shardc.policies", "shardc.templates"):
        for root in find_spec(package).submodule_search_locations:
            for path in sorted(Path(root).rglob("*")):
                if path.is_file() and path.suffix != ".pyc":
                    digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory:
    """It goes with the process."""
    return tempfile.TemporaryDirectory(prefix="shardc_plans_")


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
