"""What decides the plan of a live model, as a key to keep it by."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from shardc.models.source import hf_config

_LIBRARIES = ("torch", "transformers", "peft")  # of a model's code, which changes with their version alone
_TOOLS = ("jinja2", "networkx")  # of the compiler
_PLACES = ("name_or_path", "_name_or_path")  # where a model was loaded from: another copy of it has the same plan
_WITHOUT_EFFECT = ("training", *_PLACES)


def key_of(model: nn.Module, settings: Mapping[str, Any], policy: str | None) -> str | None:
    """Hash of all that decides the plan of a model, but the values of its parameters. policy: the text of a file.

    None, so that the plan is not kept, where code of another origin than torch, transformers and peft takes part: it
    may change between two runs, or read what does, and only a capture shows what it computes."""
    if next(foreign_code(model), None) is not None:
        return None
    digest = hashlib.sha256()
    for part in _parts(model, settings, policy):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _parts(model: nn.Module, settings: Mapping[str, Any], policy: str | None) -> Iterator[Any]:
    yield _own_sources()
    yield sys.version_info[:2]
    for library in (*_LIBRARIES, *_TOOLS):
        yield library, _version(library)
    yield sorted(settings.items())
    yield policy
    config = hf_config(model)
    fields = {} if config is None else json.loads(config.to_json_string(use_diff=False))
    yield sorted((key, value) for key, value in fields.items() if key not in _PLACES)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), parameter.requires_grad, first.setdefault(id(parameter), name)
    for name, buffer in model.named_buffers():
        yield name, tuple(buffer.shape), str(buffer.dtype)
        if not buffer.is_meta:  # a plan keeps the values of those that no checkpoint holds
            yield hashlib.sha256(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    for path, module in model.named_modules():
        simple = sorted((key, x) for key, x in vars(module).items() if _is_simple(x) and key not in _WITHOUT_EFFECT)
        yield path, type(module).__module__, type(module).__qualname__, simple


def _is_simple(value: Any) -> bool:
    """Numbers and names among a module's attributes, tuples and dicts of them (an adapter's scaling)."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(item, (int, float, str)) for item in value)
    return value is None or isinstance(value, (int, float, str))


# -- code --------------------------------------------------------------------------------------------------------------
def foreign_code(model: nn.Module) -> Iterator[str]:
    """Names of the classes and functions that are neither Python's nor a library's: the model's own, and those that
    were put in the place of a library's: in a module, in its class, or beside it (`modeling_llama.apply_rotary...`)."""
    yield from replaced_functions(model)
    kinds = {type(module) for module in model.modules()}
    for base in {base for kind in kinds for base in kind.__mro__}:
        if _is_foreign(base):
            yield base.__qualname__
        yield from (f"{base.__qualname__}.{key}" for key, value in vars(base).items() if _is_foreign(value))
    for home in {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}:
        yield from (f"{home}.{key}" for key, value in vars(sys.modules[home]).items() if _is_foreign(value))


def replaced_functions(model: nn.Module) -> Iterator[str]:
    """Names of the functions of other origin that were set on a single module: "model.norm.forward"."""
    for path, module in model.named_modules():
        yield from (f"{path}.{key}".lstrip(".") for key, value in vars(module).items() if _is_foreign(value))


def _is_foreign(value: Any) -> bool:
    if isinstance(value, type):
        return not _is_known(value.__module__)
    if isinstance(value, property):
        return _is_foreign(value.fget)
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return _is_foreign(value.__func__)
    if isinstance(value, FunctionType):  # what wraps another calls itself as that does: its globals tell
        return not _is_known(value.__globals__["__name__"]) or _is_foreign(getattr(value, "__wrapped__", None))
    return False


def _is_known(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


# -- versions ----------------------------------------------------------------------------------------------------------
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
