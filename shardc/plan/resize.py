"""The text of a model.py at other sizes: its numbers exchanged for those of a smaller model, hand edits kept."""

from __future__ import annotations

import difflib
import io
import itertools
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardc.errors import ShardcError

_SILENT = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_ADVICE = "`shardc check` proves the edit at its own size; undo it to run the plan small"


@dataclass(frozen=True, slots=True)
class Resized:
    """line_of: for each line of `text` the line of the file that was resized. edited: lines of that file which are not
    as they were written. restated: those that have another form, not only other numbers, at the other sizes."""

    text: str
    line_of: list[int]
    edited: list[int]
    restated: list[int]


def resize(text: str, large: str, small: str) -> Resized:
    """`text` with the sizes of `small`.

    large, small: what is written for the same model at the sizes of `text` and at the others; `text` is `large`, or an
    edit of it. A number that stands unchanged in `text` becomes the one that stands in its place in `small`. In an edit
    it becomes what it is in the line that was moved, or what this number is everywhere in its function, class or file.
    Raises ShardcError with the line of the edit where the place or the number leaves a choice.
    """
    return _Resizer(_Source.of(text), _Source.of(large), _Source.of(small)).run()


@dataclass(frozen=True, slots=True)
class _Token:
    """before: the spaces, comments and line ends inside brackets in front of it. indent: of the first one in a line."""

    before: str
    text: str
    line: int
    is_number: bool
    indent: int | None
    scope: tuple[str, str]  # class and function


@dataclass(slots=True)
class _Source:
    """lines: logical ones, as ranges of tokens."""

    tokens: list[_Token] = field(default_factory=list)
    lines: list[range] = field(default_factory=list)
    end: str = ""

    @classmethod
    def of(cls, text: str) -> _Source:
        starts = [0]
        for line in io.StringIO(text):
            starts.append(starts[-1] + len(line))
        result = cls()
        position, first, names = 0, 0, ["", ""]
        indent: int | None = None
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _SILENT:
                continue
            start, stop = (starts[row - 1] + column for row, column in (token.start, token.end))
            if len(result.tokens) == first:
                indent = token.start[1]
                names = _scope(token, names)
            before = text[position:start]
            is_number = token.type == tokenize.NUMBER
            result.tokens.append(
                _Token(before, text[start:stop], token.start[0], is_number, indent, (names[0], names[1]))
            )
            position, indent = stop, None
            if token.type == tokenize.NEWLINE:
                result.lines.append(range(first, len(result.tokens)))
                first = len(result.tokens)
        result.end = text[position:]
        return result


def _scope(token: tokenize.TokenInfo, names: list[str]) -> list[str]:
    """The class and function in which a logical line stands that begins with `token`."""
    word, name = (*token.line.split("(")[0].split(":")[0].split(), "", "")[:2]
    column = token.start[1]
    if column == 0:
        return [name, ""] if word == "class" else ["", name if word == "def" else ""]
    return [names[0], name] if word == "def" and column == 4 else names


def _exact(token: _Token) -> tuple[Any, ...]:
    return (token.text, token.indent)


def _but_for_number(token: _Token) -> tuple[Any, ...]:
    return (None if token.is_number else token.text, token.indent)


def _pairs(one: _Source, other: _Source, key: Callable[[_Token], tuple[Any, ...]]) -> dict[int, int]:
    """Tokens of `one` that stand in `other` too: whole lines first, then within the lines that differ."""
    keys = [[key(token) for token in source.tokens] for source in (one, other)]
    lines = [[tuple(k[i] for i in line) for line in s.lines] for s, k in zip((one, other), keys, strict=True)]
    found: dict[int, int] = {}
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        a, b = ([t for line in s.lines[x:y] for t in line] for s, x, y in ((one, i, i_end), (other, j, j_end)))
        if tag == "equal":
            found.update(zip(a, b, strict=True))
        elif tag == "replace":
            words = ([k[t] for t in part] for k, part in zip(keys, (a, b), strict=True))
            for x, y, size in difflib.SequenceMatcher(None, *words, autojunk=False).get_matching_blocks():
                found.update(zip(a[x : x + size], b[y : y + size], strict=True))
    return found


@dataclass(frozen=True, slots=True)
class _Gap:
    """Tokens of the large text, maybe none, in whose place the small text has others. They stand before `end`."""

    large: range
    small: range


class _Resizer:
    def __init__(self, text: _Source, large: _Source, small: _Source):
        self.text, self.large, self.small = text, large, small
        self.written = _pairs(text, large, _exact)
        self.at = {j: i for i, j in self.written.items()}
        self.size_of: dict[int, str] = {}  # token of the large text -> what stands in its place in the small one
        self.gaps: dict[int, _Gap] = {}  # by the token of the large text that follows
        self._pair_with_small()

    def _pair_with_small(self) -> None:
        pairs = _pairs(self.large, self.small, _but_for_number)
        last_i = last_j = -1
        for i, j in (*pairs.items(), (len(self.large.tokens), len(self.small.tokens))):
            gap = _Gap(range(last_i + 1, i), range(last_j + 1, j))
            if len(gap.large) == 1 and self.large.tokens[gap.large[0]].is_number and gap.small:
                self.size_of[gap.large[0]] = _joined([self.small.tokens[k] for k in gap.small])
            elif gap.large or gap.small:
                self.gaps[i] = gap
            if j < len(self.small.tokens):
                self.size_of[i] = self.small.tokens[j].text
            last_i, last_j = i, j

    def run(self) -> Resized:
        written: list[tuple[str, str, int]] = []  # before, text, line of the file
        restated = set()
        assert len(self.large.tokens) not in self.gaps, "both texts end with the same token"
        inside = {k for gap in self.gaps.values() for k in gap.large}
        for gap in self.gaps.values():
            line = self._require_intact(gap)
            restated.update({line}, (self.text.tokens[self.at[k]].line for k in gap.large))
        for i, token in enumerate(self.text.tokens):
            j = self.written.get(i)
            if j in inside:
                continue
            before = token.before
            if j in self.gaps:
                small = self.gaps[j].small
                written += [(t.before, t.text, token.line) for t in self.small.tokens[small.start : small.stop]]
                if "#" not in before:
                    before = self.small.tokens[small.stop].before
            written.append((before, self._edit(token, i) if j is None else self.size_of[j], token.line))
        line_of, last = [], 1
        for before, text, line in written:
            line_of += [last] * before.count("\n")
            last = line
            line_of += [line] * text.count("\n")
        result = "".join(before + text for before, text, _ in written) + self.text.end
        return Resized(result, [*line_of, last], self._edited(), sorted(restated))

    def _require_intact(self, gap: _Gap) -> int:
        """The line of the file at which a gap stands; raises ShardcError where the file is edited there."""
        around = [k for k in range(gap.large.start - 1, gap.large.stop + 1) if 0 <= k < len(self.large.tokens)]
        here = [self.at.get(k) for k in around]
        found = [i for i in here if i is not None]
        if len(found) < len(here) or found[-1] - found[0] != len(found) - 1:
            line = self.text.tokens[found[0]].line if found else self._line_near(gap.large.start)
            raise ShardcError(
                f"model.py:{line}: the edit stands where the file has another form at the small sizes", _ADVICE
            )
        return self.text.tokens[found[0]].line

    def _line_near(self, index: int) -> int:
        """The line of the last token before `index` of the large text that the file still has."""
        return next((self.text.tokens[self.at[k]].line for k in range(index, -1, -1) if k in self.at), 1)

    def _edit(self, token: _Token, index: int) -> str:
        """A token that the file has and the large text has not, at this place."""
        if not token.is_number:
            return token.text
        for found in (self._of_moved_line(index), *self._of_equal_numbers(token)):
            if len(found) > 1:
                raise ShardcError(
                    f"model.py:{token.line}: the edit writes {token.text}, which at the small sizes is "
                    f"{' in one place and '.join(sorted(found))} in another",
                    "write it as the size of a tensor, x.shape[-1]; or only prove the edit: `shardc check`",
                )
            if found:
                return found.pop()
        return token.text

    def _of_moved_line(self, index: int) -> set[str]:
        """What the number becomes in the lines of the large text that read as the one in which it stands."""
        line = next(line for line in self.text.lines if index in line)
        words = [self.text.tokens[k].text for k in line]
        same = [
            other
            for other in self.large.lines
            if len(other) == len(line) and [self.large.tokens[k].text for k in other] == words
        ]
        found = {self.size_of.get(other[index - line.start]) for other in same} - {None}
        return found if len(found) == 1 else set()

    def _of_equal_numbers(self, token: _Token) -> list[set[str]]:
        """What this number becomes: in its function, in its class, in the file."""
        equal = [
            (other.scope, self.size_of[i])
            for i, other in enumerate(self.large.tokens)
            if other.is_number and other.text == token.text and i in self.size_of
        ]
        return [
            {size for scope, size in equal if scope == token.scope},
            {size for scope, size in equal if scope[0] == token.scope[0]},
            {size for _, size in equal},
        ]

    def _edited(self) -> list[int]:
        """Lines with a token that was not written there, and lines before which some were taken out."""
        lines = {token.line for i, token in enumerate(self.text.tokens) if i not in self.written}
        for last, following in itertools.pairwise(sorted(self.at)):
            if following > last + 1 and self.at[following] == self.at[last] + 1:
                lines.add(self.text.tokens[self.at[following]].line)
        return sorted(lines)


def _joined(tokens: list[_Token]) -> str:
    """Their text as it stands, but for what is in front of the first."""
    return tokens[0].text + "".join(token.before + token.text for token in tokens[1:])
