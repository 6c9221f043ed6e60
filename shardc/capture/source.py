"""Which statement of the model's author is running: the names and lines that errors and emitted code use."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
from types import CodeType

import torch

from shardc.capture.graph import Source

_TORCH = torch.__path__[0] + "/"
_TORCH_LAYERS = _TORCH + "nn/modules/"
_OURS = __file__.rsplit("/", 1)[0] + "/"
# Plumbing of transformers around the author's own forward: their statements explain nothing.
_PLUMBING = (
    "modeling_layers.py",
    "utils/generic.py",
    "utils/deprecation.py",
    "utils/output_capturing.py",
    "hub_kernels.py",
)
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Assert, ast.Raise)


def running_statement() -> Source | None:
    """The innermost running statement outside torch's core, transformers' plumbing and this package."""
    frame = sys._getframe(1)
    while frame and not _is_author(frame.f_code.co_filename):
        frame = frame.f_back
    return _statement_at(frame.f_code, frame.f_lineno) if frame else None


@functools.cache
def _is_author(path: str) -> bool:
    if path.startswith(_TORCH_LAYERS):
        return not path.endswith("/module.py")
    return not path.startswith((_TORCH, _OURS, "<")) and not path.endswith(_PLUMBING) and "/contextlib.py" not in path


@functools.cache
def _statement_at(code: CodeType, line: int) -> Source:
    path = code.co_filename
    around = [s for s in _statements(code) if s[0] <= line <= s[1]]
    first, last, name = min(around, key=lambda s: s[1] - s[0], default=(line, line, None))
    return Source(path, first, last, name)


@functools.cache
def _statements(code: CodeType) -> list[tuple[int, int, str | None]]:
    """First line, last line and assigned name of each statement of one function; only its own text is parsed."""
    lines = linecache.getlines(code.co_filename)
    offset = max(code.co_firstlineno - 1, 0)
    try:
        text = textwrap.dedent("".join(inspect.getblock(lines[offset:])))
        tree = ast.parse(text)
    except (SyntaxError, IndentationError):  # a lambda inside an expression, or no file: parse the whole of it
        offset, tree = 0, ast.parse("".join(lines))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _STATEMENTS):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = target.id if isinstance(target, ast.Name) else None
            found.append((node.lineno + offset, node.end_lineno + offset, name))
    return found
