"""The bundled presets: published configs, one JSON file each, that resolve without a network."""

import difflib
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from shardc.errors import ShardcError

_FOLDER = Path(__file__).parent / "presets"
_OWN_KEYS = ("hub_id", "published_params")


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model: its config.json fields, where it was published, and how large it is said to be."""

    name: str
    hub_id: str
    published_params: int | str  # exact count, or rounded as published: "8.03B"
    fields: dict

    def params_match(self, count: int) -> bool:
        """Whether `count` (tied weights once) is the published figure, to the last digit that was published."""
        if isinstance(self.published_params, int):
            return count == self.published_params
        digits, unit = self.published_params[:-1], {"M": 10**6, "B": 10**9}[self.published_params[-1]]
        half_a_unit_in_the_last_place = 0.5 * unit / 10 ** len(digits.partition(".")[2])
        return abs(count - float(digits) * unit) <= half_a_unit_in_the_last_place


@functools.cache
def list_presets() -> tuple[str, ...]:
    """Names of the bundled presets, in natural order (Qwen3-4B before Qwen3-14B)."""
    return tuple(sorted((path.stem for path in _FOLDER.glob("*.json")), key=_natural_key))


def load_preset(name: str) -> Preset | None:
    """The preset called `name`, in upper or lower case, or published on the hub as `name`; None if there is none."""
    wanted = name.lower()
    by_name = {preset.lower(): preset for preset in list_presets()}
    if wanted in by_name:
        return _read(by_name[wanted])
    base = by_name.get(wanted.rpartition("/")[2])
    candidates = [base] if base else list_presets() if "/" in wanted else ()
    return next((p for p in map(_read, candidates) if p.hub_id.lower() == wanted), None)


def near_presets(name: str) -> list[str]:
    """Up to four preset names that resemble `name`, best first."""
    by_lower = {preset.lower(): preset for preset in list_presets()}
    wanted = name.rpartition("/")[2].lower()
    return [by_lower[match] for match in difflib.get_close_matches(wanted, by_lower, n=4, cutoff=0.5)]


def _read(name: str) -> Preset:
    path = _FOLDER / f"{name}.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    if missing := [key for key in _OWN_KEYS if key not in fields]:
        raise ShardcError(f"preset {path.name}: missing {', '.join(missing)}", "see CONTRIBUTING.md, A preset")
    hub_id, published = (fields.pop(key) for key in _OWN_KEYS)
    return Preset(name, hub_id, published, fields)


def _natural_key(name: str) -> list:
    """Splits "Qwen3-14B" into text and numbers, so that numbers compare as numbers."""
    return [
        (0, float(part), "") if i % 2 else (1, 0.0, part.lower())
        for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))
    ]
