"""Train a model under a plugin, in the script's own loop. Names and arguments are those of ColossalAI."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.booster.booster import Booster
    from shardc.booster.elementwise import declare_elementwise

_HOMES = {"Booster": "shardc.booster.booster", "declare_elementwise": "shardc.booster.elementwise"}

__all__ = ["Booster", "declare_elementwise"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardc.booster' has no attribute {name!r}")
