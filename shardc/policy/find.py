"""Which policy a model gets when the user names none: the bundled file of its type, else its own plan."""

import functools
from importlib import resources
from typing import Any

from shardc.errors import ShardcError
from shardc.policy.hf_plan import policy_from_hf_plan
from shardc.policy.load import parse_policy
from shardc.policy.types import Policy

_ADVICE = "write one (CONTRIBUTING.md, A policy) and give it by --policy my_model.yaml"


def bundled_policies() -> tuple[str, ...]:
    """Names of the bundled policy files without their ending, sorted."""
    return tuple(sorted(path.name[:-5] for path in resources.files("shardc.policies").iterdir() if _is_policy(path)))


@functools.cache
def load_bundled(name: str) -> Policy:
    """The bundled policy file `name` ("qwen3"). Raises ShardcError for an unknown name."""
    if name not in bundled_policies():
        problem = f"policy {name!r} is not bundled; bundled: {', '.join(bundled_policies())}"
        raise ShardcError(problem, "give a file of your own by --policy")
    text = (resources.files("shardc.policies") / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_policy(text, f"{name}.yaml")


def policy_for(config: Any) -> Policy:
    """The policy of an HF config: bundled by model_type, else converted from its base_model_tp_plan.

    Raises ShardcError where there is neither, or no config (a plain nn.Module)."""
    if config is None:
        raise ShardcError("a model that is not from transformers has no bundled policy", _ADVICE)
    names = sorted(bundled_policies(), key=lambda name: name != config.model_type)  # the file of that name first
    for name in names:
        if config.model_type in load_bundled(name).models:
            return load_bundled(name)
    if policy := policy_from_hf_plan(config):
        return policy
    raise ShardcError(f"model_type {config.model_type!r} has no bundled policy and no plan of its own", _ADVICE)


def _is_policy(path: Any) -> bool:
    return path.name.endswith(".yaml")
