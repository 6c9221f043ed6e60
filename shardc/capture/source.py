"""Which statement of the model's author is running: the names and lines that errors and emitted code use."""

from __future__ import annotations

import ast
import functools
import sys

import torch

from shardc.capture.graph import Source

_TORCH = torch.__path__[0] + "/"
_TORCH_LAYERS = _TORCH + "nn/modules/"
_OURS = __file__.rsplit("/", 1)[0] + "/"
# Plumbing of transformers around the author's own forward: their statements explain nothing.
_PLUMBING = ("modeling_layers.py", "utils/generic.py", "utils/deprecation.py", "utils/output_capturing.py", "hub_kernels.py")


@functools.cache
def _is_author(path: str) -> bool:
    if path.startswith(_TORCH_LAYERS):
        return not path.endswith("/module.py")
    return not path.startswith((_TORCH, _OURS, "<")) and not path.endswith(_PLUMBING) and "/contextlib.py" not in path


@functools.cache
def _statements(path: str) -> list[tuple[int, int, str | None]]:
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            found.append((node.lineno, node.end_lineno, target.id if isinstance(target, ast.Name) else None))
    return found


@functools.cache
def _statement_at(path: str, line: int) -> Source:
    around = [s for s in _statements(path) if s[0] <= line <= s[1]]
    first, last, name = min(around, key=lambda s: s[1] - s[0], default=(line, line, None))
    return Source(path, first, last, name)


def running_statement() -> Source | None:
    """The innermost running statement outside torch's core, transformers' plumbing and this package."""
    frame = sys._getframe(2)
    while frame and not _is_author(frame.f_code.co_filename):
        frame = frame.f_back
    return _statement_at(frame.f_code.co_filename, frame.f_lineno) if frame else None
