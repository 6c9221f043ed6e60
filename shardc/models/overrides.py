"""`--set key=value`: reads the values and changes config fields before the config object is built."""

import difflib
import itertools
import json
import warnings
from collections.abc import Iterable
from dataclasses import fields as dataclass_fields
from typing import Any

from shardc.errors import ShardcError

_WORDS = {"true": True, "false": False, "none": None, "null": None}
_LEGACY_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "rope_local_base_freq")


def parse_set(items: Iterable[str]) -> dict[str, Any]:
    """["num_hidden_layers=4", "layer_types=[a,b]"] -> {"num_hidden_layers": 4, "layer_types": ["a", "b"]}."""
    pairs = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ShardcError(f"--set {item}: not of the form field=value", "for example --set num_hidden_layers=4")
        pairs[key.strip()] = parse_value(text.strip())
    return pairs


def parse_value(text: str) -> Any:
    """int, float, bool, None, a list of these, a JSON object, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float, json.loads):
        try:
            return read(text)
        except ValueError:
            continue
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(part.strip()) for part in text[1:-1].split(",")]
    return text


def apply_overrides(raw: dict, overrides: dict[str, Any], config_class: type) -> dict:
    """The config.json fields `raw` with `overrides` put in; a dotted key reaches into a nested object.

    An override of the number of layers cuts the per-layer lists that it does not set, or continues their pattern.
    Raises ShardcError for a field that neither the config class nor the file has, naming near matches.
    """
    result = json.loads(json.dumps(raw))
    alias = getattr(config_class, "attribute_map", {})
    known = {f.name for f in dataclass_fields(config_class)} | set(alias) | set(raw) | set(_LEGACY_ROPE_FIELDS)
    layers_key = alias.get("num_hidden_layers", "num_hidden_layers")
    set_keys = {alias.get(key, key) for key in overrides}
    if isinstance(result.get(layers_key), int) and layers_key in set_keys:
        layers = next(value for key, value in overrides.items() if alias.get(key, key) == layers_key)
        _check_layers(layers)
        for key in per_layer_lists(result, result[layers_key]):
            if key not in set_keys:
                result[key] = continue_pattern(result[key], layers)
    for key, value in overrides.items():
        name, _, rest = alias.get(key, key).partition(".")
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, sorted(known), n=4)) or "none"
            raise ShardcError(
                f"--set {key}: {config_class.__name__} has no such field; near names: {near}",
                "field names are those of the model's config.json",
            )
        _put(result, name, rest, value, key)
    return result


def warn_without_effect(config: Any, overrides: dict[str, Any]) -> None:
    """Warns of each override that the config does not hold (Qwen2's sliding_window without use_sliding_window)."""
    for key, value in overrides.items():
        if "." not in key and key not in _LEGACY_ROPE_FIELDS and (held := getattr(config, key, value)) != value:
            warnings.warn(f"--set {key}={value} has no effect: the config turns it into {held}", stacklevel=4)


def per_layer_lists(fields: dict, num_layers: int) -> list[str]:
    """Keys whose value is a list with one entry a layer: layer_types, no_rope_layers and their like."""
    return [
        key for key, value in fields.items() if "layer" in key and isinstance(value, list) and len(value) == num_layers
    ]


def pattern_length(rows: list) -> int:
    """Length of the shortest prefix whose repetition gives `rows`: 6 for Gemma-3, all of it where none repeats."""
    return next(n for n in range(1, len(rows) + 1) if all(row == rows[i % n] for i, row in enumerate(rows)))


def continue_pattern(rows: list, length: int) -> list:
    """`rows` cut to `length`, or continued by its repeating pattern."""
    return list(itertools.islice(itertools.cycle(rows[: pattern_length(rows)]), length))


def _check_layers(layers: Any) -> None:
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ShardcError(
            f"--set num_hidden_layers={layers}: not a positive number", "for example --set num_hidden_layers=4"
        )


def _put(result: dict, name: str, rest: str, value: Any, key: str) -> None:
    rope = result.get("rope_parameters")
    if name in _LEGACY_ROPE_FIELDS and isinstance(rope, dict) and name in rope:
        rope[name] = value
    elif not rest:
        result[name] = value
    elif isinstance(result.get(name), dict):
        _put(result[name], *rest.partition(".")[::2], value, key)
    else:
        raise ShardcError(
            f"--set {key}: {name} is not an object in this config", f"set {name} itself, as a JSON object"
        )
