"""Whether a plan that the user brings is of the live model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardc.errors import ShardcError
from shardc.models.source import hf_config
from shardc.runtime.plan import Plan

# What a config says of how it was loaded, saved, or used for generation.
_NOT_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


def check_plan(plan: Plan, model: nn.Module) -> None:
    """Raises ShardcError where the plan has another config, or other parameters, ties or frozen ones than the model.

    What the model freezes and the plan trains is no difference: boost leaves it out of the optimizer."""
    config = hf_config(model)
    problems = [] if config is None else _other_fields(plan, config)
    problems = problems or list(_other_parameters(plan, model))
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ShardcError(
            f"boost: {'; '.join(problems[:4])}{more}",
            f"compile a plan of this model, or load the model of {plan.folder}",
        )


def _other_fields(plan: Plan, config: Any) -> list[str]:
    wanted = json.loads((plan.folder / "config.json").read_text())
    given = json.loads(config.to_json_string(use_diff=False))
    return [
        f"{name} is {given[name]!r}, the plan has {wanted[name]!r}"
        for name in sorted(wanted.keys() & given.keys())
        if name not in _NOT_OF_THE_MODEL and wanted[name] != given[name]
    ]


def _other_parameters(plan: Plan, model: nn.Module) -> Iterator[str]:
    live = dict(model.named_parameters(remove_duplicate=False))
    known = plan.spec.by_any_name()
    first: dict[int, str] = {}
    for name, spec in sorted(plan.spec.parameters.items()):
        found = {known_as: live[known_as] for known_as in (name, *spec.aliases) if known_as in live}
        if not found:
            yield f"{name} is missing in the model"
            continue
        value, *others = found.values()
        if tuple(value.shape) != spec.shape:
            yield f"{name} is {list(value.shape)}, the plan has {list(spec.shape)}"
        if any(other is not value for other in others):
            yield f"{' and '.join(found)} are one parameter in the plan, not in the model"
        same = first.setdefault(id(value), name)
        if same != name:
            yield f"{same} and {name} are one parameter in the model, not in the plan"
        if value.requires_grad and not spec.requires_grad:
            yield f"{name} is trained, the plan has it frozen"
    yield from (f"{name} is not in the plan" for name in live if name not in known)
