"""JSON as people read and diff it: sorted keys, two-space indent, and what fits on a line on one line."""

from __future__ import annotations

import json
from typing import Any

_WIDTH = 100


class Line(dict):
    """A dict that is always written on one line, in its own order of keys."""


def to_text(data: Any) -> str:
    """The text of a JSON file, newline at the end. The same data gives the same bytes."""
    return _text(data, "") + "\n"


def _text(data: Any, indent: str) -> str:
    if isinstance(data, Line):
        return json.dumps(data, ensure_ascii=False)
    flat = json.dumps(data, sort_keys=True, ensure_ascii=False) if _is_short(data) else None
    if flat is not None and len(flat) + len(indent) <= _WIDTH:
        return flat
    inner = indent + "  "
    if isinstance(data, dict):
        rows = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {_text(data[key], inner)}" for key in sorted(data)]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(data, (list, tuple)):
        return "[\n" + ",\n".join(inner + _text(item, inner) for item in data) + f"\n{indent}]"
    return json.dumps(data, ensure_ascii=False)


def _is_short(data: Any) -> bool:
    """Whether it is worth trying on one line: a scalar, or a container of few items that holds no Line."""
    if isinstance(data, dict):
        return len(data) <= 12 and not isinstance(data, Line) and all(map(_is_short, data.values()))
    if isinstance(data, (list, tuple)):
        return len(data) <= 40 and all(map(_is_short, data))
    return not isinstance(data, Line)
