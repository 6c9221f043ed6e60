"""Long lines, broken as `ruff format` breaks them."""

from __future__ import annotations

import re

WIDTH = 120
_ONE_CALL = re.compile(r"(return |def |[\w., ]+ = )?[\w.]*[(\[{]")
_OPEN, _CLOSE = "([{", ")]}"


def wrap(line: str, indent: int) -> list[str]:
    """A statement that is one call, indented; broken at its bracket where it is longer than WIDTH.

    Any other statement comes back as it is: who writes it has to keep it short."""
    pad = " " * indent
    if len(pad + line) <= WIDTH or not line.endswith(tuple(_CLOSE)):
        return [pad + line]
    start = _last_bracket(line)
    head, body, tail = line[: start + 1], line[start + 1 : -1], line[-1]
    if not _ONE_CALL.fullmatch(head):
        return [pad + line]
    is_call = len(head) > 1 and (head[-2].isalnum() or head[-2] == "_")
    if is_call and len(body) + indent + 4 <= WIDTH:
        return [pad + head, f"{pad}    {body}", pad + tail]
    return [pad + head, *(f"{pad}    {part}," for part in split_arguments(body)), pad + tail]


def _last_bracket(line: str) -> int:
    """Index of the bracket that the last character closes."""
    depth = 0
    for i in range(len(line) - 1, -1, -1):
        depth += (line[i] in _CLOSE) - (line[i] in _OPEN)
        if depth == 0:
            return i
    raise AssertionError(line)


def split_arguments(body: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(body):
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and depth == 0:
            parts.append(body[start:i].strip())
            start = i + 1
    return [*parts, rest] if (rest := body[start:].strip()) else parts
