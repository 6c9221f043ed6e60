"""One forward from the bodies of several variants: equal lines once, the others under the arguments that decide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardc.emit.lines import Line
from shardc.emit.variants import CallKey
from shardc.emit.wrap import WIDTH, wrap
from shardc.errors import ShardcError


@dataclass(slots=True)
class Branch:
    """`if test:` then, else otherwise. Variants say who goes where."""

    test: str
    negated: str
    then: list[Line | Branch]
    otherwise: list[Line | Branch]
    then_variants: frozenset[CallKey]
    else_variants: frozenset[CallKey]


@dataclass(frozen=True, slots=True)
class Test:
    """A condition of the emitted code and the variants for which it holds. flag: an argument that it needs."""

    text: str
    negated: str
    holds: frozenset[CallKey]
    flag: str | None = None
    cost: int = 0
    axis: str | None = None  # a mesh axis that the text reads


@dataclass(slots=True)
class Merged:
    """The forward's lines, the flags (`packed`) and the mesh axes that its tests read."""

    lines: list[str]
    flags: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)

    @property
    def too_wide(self) -> frozenset[str]:
        return frozenset(line.strip() for line in self.lines if len(line) > WIDTH)


class _Inseparable(Exception):
    """No test separates these variants."""

    def __init__(self, variants: Sequence[CallKey], line: Line):
        super().__init__()
        self.variants = variants
        self.line = line


Bodies = Mapping[CallKey, Sequence[Line]]


class Merger:
    """absent: names that are None in a variant until it assigns them. none_names: names that it must set to None."""

    def __init__(
        self,
        absent: Mapping[CallKey, frozenset[str]],
        none_names: Mapping[CallKey, set[str]],
        formals: Sequence[str],
        flags: Sequence[Test],
        where: str,
    ):
        self.absent = absent
        self.none_names = none_names
        self.formals = formals
        self.flags = flags
        self.where = where

    def merge(self, bodies: Bodies) -> Merged:
        try:
            tree = self._merge(bodies, {variant: frozenset() for variant in bodies})
        except _Inseparable as error:
            kinds = ", ".join(dict.fromkeys(key.variant.name for key in error.variants))
            raise ShardcError(
                f"{self.where}: {kinds} batches run different code here "
                f"({error.line.text[0].strip()}), and no argument of the module tells them apart",
                "pass the mask or the position ids to the module, or mark it `opaque`",
            ) from None
        self._place_nones(tree, dict(self.none_names))
        merged = Merged([])
        self._print(tree, 8, merged)
        return merged

    # -- the tree -------------------------------------------------------------------------------------------------
    def _merge(self, bodies: Bodies, defined: Mapping[CallKey, frozenset[str]]) -> list[Line | Branch]:
        variants = list(bodies)
        first = bodies[variants[0]]
        if all(bodies[v] == first for v in variants[1:]):
            return list(first)
        start = 0
        while all(len(bodies[v]) > start and bodies[v][start] == first[start] for v in variants):
            start += 1
        end = 0
        while all(len(bodies[v]) - start > end and bodies[v][-1 - end] == first[-1 - end] for v in variants):
            end += 1
        head = list(first[:start])
        tail = list(first[len(first) - end :])
        middle = {v: bodies[v][start : len(bodies[v]) - end] for v in variants}
        defined = {v: defined[v] | _names(head) for v in variants}
        if start or end:
            return head + self._merge(middle, defined) + tail
        options = [option for test in self._tests(variants, defined) for option in self._options(test, middle, defined)]
        if not options:
            raise _Inseparable(variants, next(line for v in variants for line in bodies[v]))
        return min(options, key=lambda option: option[0])[1]

    def _options(
        self, test: Test, bodies: Bodies, defined: Mapping[CallKey, frozenset[str]]
    ) -> list[tuple[int, list[Line | Branch]]]:
        """Split for good, or only until both sides have the same to do again."""
        yes = {v: body for v, body in bodies.items() if v in test.holds}
        no = {v: body for v, body in bodies.items() if v not in test.holds}

        def branch(then: list[Line | Branch], otherwise: list[Line | Branch]) -> Branch:
            return Branch(test.text, test.negated, then, otherwise, frozenset(yes), frozenset(no))

        options = []
        with contextlib.suppress(_Inseparable):
            options.append([branch(self._merge(yes, defined), self._merge(no, defined))])
        heads = {v: head for side in (yes, no) for head in [_common_start(side.values())] for v in side}
        rest = {v: body[len(heads[v]) :] for v, body in bodies.items()}
        if any(heads.values()) and any(rest.values()):
            later = {v: defined[v] | _names(heads[v]) for v in bodies}
            part = branch(list(heads[next(iter(yes))]), list(heads[next(iter(no))]))
            with contextlib.suppress(_Inseparable):
                options.append([part, *self._merge(rest, later)])
        return [(_size(option) + test.cost, option) for option in options]

    def _tests(self, variants: Sequence[CallKey], defined: Mapping[CallKey, frozenset[str]]) -> list[Test]:
        found = []
        for name in self.formals:
            none = frozenset(v for v in variants if name in self.absent[v] and name not in defined[v])
            if none and len(none) < len(variants):
                found.append(Test(f"{name} is None", f"{name} is not None", none))
        for flag in self.flags:
            holds = frozenset(variants) & flag.holds
            if holds and len(holds) < len(variants):
                found.append(Test(flag.text, flag.negated, holds, flag.flag, flag.cost))
        return found

    def _place_nones(self, tree: list[Line | Branch], wanted: dict[CallKey, set[str]]) -> None:
        """`mask = None` where the other side of a branch computes the mask; at the top where no branch does."""
        for name in sorted({name for names in wanted.values() for name in names}):
            variants = {v for v, names in wanted.items() if name in names}
            left = self._place_none(tree, name, variants)
            if left:
                tree.insert(0, Line((f"{name} = None",), frozenset((name,))))

    def _place_none(self, tree: list[Line | Branch], name: str, variants: set[CallKey]) -> set[CallKey]:
        for part in tree:
            if not isinstance(part, Branch) or name not in _names([part]):
                continue
            for side, inside in ((part.then, part.then_variants), (part.otherwise, part.else_variants)):
                here = variants & inside
                if not here:
                    continue
                if name in _names(side):
                    variants = variants - (here - self._place_none(side, name, here))
                else:
                    side.insert(0, Line((f"{name} = None",), frozenset((name,))))
                    variants = variants - here
            if not variants:
                break
        return variants

    # -- text -------------------------------------------------------------------------------------------------------
    def _print(self, tree: list[Line | Branch], indent: int, merged: Merged) -> None:
        pad = " " * indent
        for part in tree:
            if isinstance(part, Line):
                for text in part.text:
                    merged.lines.extend(wrap(text.lstrip(), indent + len(text) - len(text.lstrip())))
                continue
            for flag in self.flags:
                if flag.text == part.test:
                    merged.flags |= {flag.flag} - {None}
                    merged.axes |= {flag.axis} - {None}
            then, otherwise, test = part.then, part.otherwise, part.test
            if not then or (_is_branch(then) and otherwise and not _is_branch(otherwise)):
                then, otherwise, test = otherwise, then, part.negated
            merged.lines.append(f"{pad}if {test}:")
            self._print(then, indent + 4, merged)
            if _is_branch(otherwise):
                self._print_elif(otherwise[0], indent, merged)
            elif otherwise:
                merged.lines.append(f"{pad}else:")
                self._print(otherwise, indent + 4, merged)

    def _print_elif(self, branch: Branch, indent: int, merged: Merged) -> None:
        start = len(merged.lines)
        self._print([branch], indent, merged)
        merged.lines[start] = merged.lines[start].replace("if ", "elif ", 1)


def _is_branch(tree: Sequence[Line | Branch]) -> bool:
    return len(tree) == 1 and isinstance(tree[0], Branch)


def _names(parts: Sequence[Line | Branch]) -> frozenset[str]:
    found: set[str] = set()
    for part in parts:
        if isinstance(part, Line):
            found |= part.defines
        else:
            found |= _names(part.then) | _names(part.otherwise)
    return frozenset(found)


def _common_start(bodies: object) -> list[Line]:
    bodies = list(bodies)
    found = []
    for lines in zip(*bodies, strict=False):
        if any(line != lines[0] for line in lines):
            break
        found.append(lines[0])
    return found


def _size(tree: Sequence[Line | Branch]) -> int:
    """Lines of the printed tree, with branches dearer than lines."""
    return sum(1 if isinstance(part, Line) else 2 + _size(part.then) + _size(part.otherwise) for part in tree)


def branch_on(
    text: str, holds: Callable[[CallKey], bool], variants: Sequence[CallKey], negated: str, **rest: object
) -> Test:
    return Test(text, negated, frozenset(v for v in variants if holds(v)), **rest)
