"""A user's mistake, for a package that starts without torch."""

from __future__ import annotations


def mistake(problem: str, advice: str) -> Exception:
    """A ShardcError; its module is loaded with torch, so not before there is something to say."""
    from shardc.errors import ShardcError

    return ShardcError(problem, advice)
