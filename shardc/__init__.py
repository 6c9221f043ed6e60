"""Compile a Hugging Face model for many GPUs, prove its gradients, train it.

`import shardc` loads neither torch nor transformers: each name below is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.lazy import lazy_init
    from shardc.plan import compile_plan, load_plan, verify
    from shardc.runtime.errors import ShardcError
    from shardc.runtime.launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
    from shardc.runtime.mesh import Mesh

_HOMES = {
    "Mesh": "shardc.runtime.mesh",
    "ShardcError": "shardc.runtime.errors",
    "compile_plan": "shardc.plan",
    "launch": "shardc.runtime.launch",
    "launch_from_openmpi": "shardc.runtime.launch",
    "launch_from_slurm": "shardc.runtime.launch",
    "launch_from_torch": "shardc.runtime.launch",
    "lazy_init": "shardc.lazy",
    "load_plan": "shardc.plan",
    "verify": "shardc.plan",
}

__all__ = [
    "Mesh",
    "ShardcError",
    "compile_plan",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "lazy_init",
    "load_plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardc' has no attribute {name!r}")
