"""From a model's name to a plan folder, and what is asked of a folder: prove it again, verify it by running it.

Importing this package loads neither torch nor transformers; `load_plan` and what it returns never load transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.plan.check import check_folder, load_plan
    from shardc.plan.compile import CompiledPlan, compile_plan
    from shardc.plan.folder import write_plan
    from shardc.plan.refuted import Refuted
    from shardc.plan.verification import verify

_HOMES = {
    "CompiledPlan": "shardc.plan.compile",
    "Refuted": "shardc.plan.refuted",
    "check_folder": "shardc.plan.check",
    "compile_plan": "shardc.plan.compile",
    "load_plan": "shardc.plan.check",
    "verify": "shardc.plan.verification",
    "write_plan": "shardc.plan.folder",
}

__all__ = ["CompiledPlan", "Refuted", "check_folder", "compile_plan", "load_plan", "verify", "write_plan"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardc.plan' has no attribute {name!r}")
