"""Globs over module paths: fnmatch, where * crosses dots, with {a,b} for alternatives."""

import fnmatch
import re

_BRACES = re.compile(r"\{([^{}]*)\}")


def expand_braces(pattern: str) -> list[str]:
    """ "*.{q,k}_proj" -> ["*.q_proj", "*.k_proj"]; innermost braces first, so they may nest."""
    found = _BRACES.search(pattern)
    if not found:
        return [pattern]
    heads = [pattern[: found.start()] + choice + pattern[found.end() :] for choice in found.group(1).split(",")]
    return [whole for head in heads for whole in expand_braces(head)]


def path_regex(pattern: str) -> re.Pattern[str]:
    """A rule's glob as a regular expression over whole module paths."""
    return re.compile("|".join(fnmatch.translate(glob) for glob in expand_braces(pattern)))


def block_regex(pattern: str) -> re.Pattern[str]:
    """A blocks glob as a regular expression: "model.layers.*" names model.layers.3 and nothing inside it."""
    return re.compile("|".join(re.escape(glob).replace(r"\*", r"[^.]+") for glob in expand_braces(pattern)))
