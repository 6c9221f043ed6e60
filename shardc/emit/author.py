"""The names that the model's author gave: targets of module calls, tuple targets, loop variables."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardc.capture.graph import Source


@dataclass(slots=True)
class AuthorNames:
    """What one class's forward says.

    arguments: in order; required: those without a default.
    results: attribute -> targets of `x, y = self.attribute(...)`.
    lines: attribute -> first lines of the statements in which it is called.
    loops: for `for layer in self.layers: x = layer(x)`, layers -> ("layer", ("x",)).
    aliases: for `residual = hidden_states`, hidden_states -> ("residual",).
    """

    arguments: list[str] = field(default_factory=list)
    required: list[str] = field(default_factory=list)
    results: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    loops: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)


@functools.cache
def names_in(module_class: type) -> AuthorNames:
    """Reads the source of `module_class.forward`; empty where there is none."""
    found = AuthorNames()
    try:
        forward = inspect.unwrap(module_class.forward)
        parameters = {name: p for name, p in inspect.signature(forward).parameters.items() if name != "self"}
        found.arguments = list(parameters)
        found.required = [
            name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        code = forward.__code__
        function = _functions(code.co_filename).get(code.co_firstlineno)
    except (AttributeError, OSError, TypeError, SyntaxError, ValueError):
        return found
    if function is not None:
        _read(function, found)
    return found


def _read(function: ast.FunctionDef, found: AuthorNames) -> None:
    loops = {}
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            attributes = [attribute for part in ast.walk(node.iter) if (attribute := _own_attribute(part))]
            targets = [part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)]
            if attributes and targets:
                loops[targets[-1]] = attributes[0]
                found.loops.setdefault(attributes[0], (targets[-1], ()))
    for statement in _simple_statements(function):
        for part in ast.walk(statement):
            if isinstance(part, ast.Call) and (attribute := _own_attribute(part.func)):
                found.lines.setdefault(attribute, set()).add(statement.lineno)
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        targets, value = _targets(statement), statement.value
        if isinstance(value, ast.Name):
            found.aliases[value.id] = tuple(dict.fromkeys((*found.aliases.get(value.id, ()), *targets)))
        elif isinstance(value, ast.Call) and targets:
            attribute = _own_attribute(value.func)
            if attribute:
                found.results.setdefault(attribute, targets)
            elif isinstance(value.func, ast.Name) and value.func.id in loops:
                found.loops[loops[value.func.id]] = (value.func.id, targets)


def _simple_statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
    return (node for node in ast.walk(function) if isinstance(node, kinds))


def _own_attribute(node: ast.AST) -> str | None:
    """`self.model.layers` -> "model.layers"."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if parts and isinstance(node, ast.Name) and node.id == "self" else None


def _targets(node: ast.Assign | ast.AnnAssign) -> tuple[str, ...]:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    names = tuple(part.id if isinstance(part, ast.Name) else "_" for part in parts)
    return names if any(isinstance(part, ast.Name) for part in parts) else ()


@functools.cache
def _file(path: str) -> ast.Module:
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


@functools.cache
def _functions(path: str) -> dict[int, ast.FunctionDef]:
    """Functions of a file by the line in which they begin, decorators included."""
    found = {}
    for node in ast.walk(_file(path)):
        if isinstance(node, ast.FunctionDef):
            found[min([node.lineno, *(d.lineno for d in node.decorator_list)])] = node
    return found


@functools.cache
def _tuple_targets(path: str) -> dict[int, tuple[str, ...]]:
    assignments = (node for node in ast.walk(_file(path)) if isinstance(node, ast.Assign))
    return {node.lineno: _targets(node) for node in assignments if isinstance(node.targets[0], ast.Tuple)}


def tuple_targets(source: Source | None) -> tuple[str, ...]:
    """Names that `query, key, value = ...` assigns; empty for any other statement."""
    if source is None or source.name is not None:
        return ()
    try:
        return _tuple_targets(source.file).get(source.line, ())
    except OSError:
        return ()
