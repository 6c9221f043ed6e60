"""Adapters (LoRA) that peft put into a model: what the model was before, and the roles of what was added.

peft puts `base_model.model.` before every path, moves a module that it adapts to `<path>.base_layer`, and adds
`<path>.lora_dropout.<adapter>`, `<path>.lora_A.<adapter>` and `<path>.lora_B.<adapter>` beside it. A policy goes on
naming the modules of the model as its author wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardc.policy.types import INSIDE, Rule

# Role of an adapted module -> roles of its adapter. A column adds no collective: A lies inside the parallel region that
# the module enters anyway, and B is split like the module's own output. A row adds one, over r features: A gives a
# partial sum of its own, which is reduced before the whole B; B has no role, so it may work on a shard of the sequence.
_ROLES: dict[str, dict[str, str]] = {
    "column": {"lora_dropout": INSIDE, "lora_A": INSIDE, "lora_B": "column"},
    "vocab": {"lora_dropout": INSIDE, "lora_A": INSIDE, "lora_B": "vocab"},
    "row": {"lora_A": "row"},
    "replicate": {"lora_A": "replicate", "lora_B": "replicate"},
}
_PREFIX = "base_model.model."
_BASE = ".base_layer"


def paths_without_adapters(modules: Mapping[str, str]) -> dict[str, str]:
    """Path of each module in the model without adapters -> its path in this one: the same where there are none."""
    adapted = {path.removesuffix(_BASE) for path in modules if path.endswith(_BASE)}
    prefix = _PREFIX if adapted and all(path.startswith(_PREFIX) for path in adapted) else ""
    found = {}
    for path in modules:
        if path in adapted:
            found[path.removeprefix(prefix)] = path + _BASE
        elif f"{path}.".startswith(prefix) and not _is_below(path, adapted) and path != prefix[:-1]:
            found[path.removeprefix(prefix)] = path
    return found


def roles_with_adapters(roles: Mapping[str, Rule], modules: Mapping[str, str]) -> dict[str, Rule]:
    """The rules of a model without adapters, by the paths of this one, with rules for its adapters; in its order."""
    paths = paths_without_adapters(modules)
    found = {paths[path]: rule for path, rule in roles.items()}
    for path in modules:
        owner, _, part = path.rpartition(".")[0].rpartition(".")
        rule = found.get(owner + _BASE)
        if rule is not None and part in _ROLES[rule.role]:
            found[path] = replace(rule, role=_ROLES[rule.role][part])
    return {path: found[path] for path in modules if path in found}


def _is_below(path: str, owners: set[str]) -> bool:
    """Whether a module lies inside one of the adapted ones."""
    while path := path.rpartition(".")[0]:
        if path in owners:
            return True
    return False
