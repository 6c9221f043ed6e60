"""The mesh axis that a file under proof is given: what it says is what every rank is told."""

from __future__ import annotations

import sys
from typing import Any

from shardc.emit.unseen import Unseen
from shardc.runtime.mesh import MeshAxis

# The same on all ranks; of shard_size, an uneven dim has two answers, and the file is traced for both.
_ASKED_FREELY = frozenset({"name", "size", "sub", "shard_size"})
_TRUSTED = ("shardc.", "torch.")


class TracedAxis(MeshAxis):
    """An abstract axis that refuses to tell the file which rank it is on: a trace follows one branch of one rank.

    The layers and collectives of the runtime may ask, they are proved by their own tests. Raises Unseen."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name not in _ASKED_FREELY and not name.startswith("__"):
            caller = sys._getframe(1)
            if not caller.f_globals.get("__name__", "").startswith(_TRUSTED):
                raise Unseen(f"model.py:{caller.f_lineno}", f"asks for `{name}` of the mesh axis")
        return super().__getattribute__(name)
