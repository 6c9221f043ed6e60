"""What the user calls a model -> ModelSource: preset, folder, config.json, hub id or my_file.py:function."""

import importlib.util
import json
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardc.errors import ShardcError
from shardc.models.hf import config_class
from shardc.models.overrides import apply_overrides, parse_value, warn_without_effect
from shardc.models.presets import load_preset, near_presets
from shardc.models.source import ModelSource, source_from_callable, source_from_config

_FORMS = "give a preset name, a local folder, a config.json, a hub id (org/name) or my_file.py:make_model"


def resolve(name: str | Callable[..., Any], overrides: dict[str, Any] | None = None, dtype: Any = None) -> ModelSource:
    """The model called `name`, not yet built.

    name: a preset ("Qwen3-4B", any case), a local HF folder, a config.json, "file.py:function", a function, a hub id.
    overrides: config fields to change (`--set`), or keyword arguments of the function; strings are parsed.
    dtype: written into the config (a torch.dtype or its name); `make()` builds in torch's default dtype all the same.
    Raises ShardcError if there is no such model, naming near presets, or no such field.
    """
    overrides = {key: parse_value(v) if isinstance(v, str) else v for key, v in (overrides or {}).items()}
    if callable(name):
        return source_from_callable(name, name.__name__, overrides)
    if ".py:" in name:
        return source_from_callable(_load_function(name), name, overrides)
    label, raw = _read_config(name)
    if dtype is not None:
        raw = {key: v for key, v in raw.items() if key != "torch_dtype"} | {"dtype": str(dtype).removeprefix("torch.")}
    return source_from_config(_build_config(raw, overrides, label), label)


def _read_config(name: str) -> tuple[str, dict]:
    """(name for the plan, config.json fields). A preset comes before a folder of its name; ./name is the folder."""
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return path.parent.name if path.name == "config.json" else path.stem, _read_json(path)
    if preset := load_preset(name):
        return preset.name, preset.fields
    if path.is_dir():
        return path.resolve().name, _read_json(path / "config.json")
    looks_local = name.startswith((".", "/", "~")) or path.suffix == ".json" or name.count("/") != 1
    return name.rpartition("/")[2], _read_json(_missing(name) if looks_local else _fetch(name))


def _missing(name: str) -> Path:
    near = ", ".join(near_presets(name)) or "none"
    raise ShardcError(f"model {name!r}: no such preset, folder or file; near presets: {near}", _FORMS)


def _fetch(hub_id: str) -> Path:
    """config.json of a hub id, from the local cache or the network."""
    import huggingface_hub

    if isinstance(cached := huggingface_hub.try_to_load_from_cache(hub_id, "config.json"), str):
        return Path(cached)
    try:
        _check_reachable(huggingface_hub.constants.ENDPOINT)
        return Path(huggingface_hub.hf_hub_download(hub_id, "config.json", etag_timeout=5))
    except Exception as error:  # the hub's client raises its own, httpx's and the operating system's errors
        near = ", ".join(near_presets(hub_id)) or "none"
        raise ShardcError(
            f"model {hub_id!r}: not a preset, and its config.json could not be fetched ({type(error).__name__}); "
            f"near presets: {near}",
            _FORMS,
        ) from error


def _check_reachable(endpoint: str) -> None:
    """Raises OSError at once where there is no network: the hub's client would retry for half a minute."""
    url = urllib.parse.urlsplit(endpoint)
    if not urllib.request.getproxies():
        socket.create_connection((url.hostname, url.port or 443), timeout=5).close()


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ShardcError(f"model {str(path.parent)!r}: the folder has no config.json", _FORMS)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardcError(
            f"{path}: not JSON: {error}", "it should be the config.json of a Hugging Face model"
        ) from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise ShardcError(f"{path}: has no model_type", "it should be the config.json of a Hugging Face model")
    return raw


def _build_config(raw: dict, overrides: dict[str, Any], label: str) -> Any:
    kind = config_class(raw["model_type"])
    fields = apply_overrides(raw, overrides, kind) if overrides else raw
    try:
        config = kind.from_dict(fields)
    except Exception as error:  # strict dataclasses raise their own classes, validators any
        reason = next(
            (line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
        )
        raise ShardcError(
            f"{label}: {kind.__name__} refuses these fields: {reason}", "see its config.json and --set"
        ) from error
    warn_without_effect(config, overrides)
    return config


def _import_file(path: Path) -> ModuleType:
    """Imports a user's file, which may import its neighbours, as if it were run from its own folder."""
    spec = importlib.util.spec_from_file_location(f"shardc_user_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _load_function(name: str) -> Callable[..., Any]:
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ShardcError(f"model {name!r}: no file {file}", "the form is path/to/my_file.py:make_model")
    module = _import_file(path)
    if not callable(getattr(module, function, None)):
        names = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        raise ShardcError(f"model {name!r}: {path.name} defines no function {function!r}; it defines: {names}", _FORMS)
    return getattr(module, function)
