"""The error of a user's mistake, for the compiler's modules."""

from shardc.runtime.errors import ShardcError

__all__ = ["ShardcError"]
