"""A model's own base_model_tp_plan -> Policy, for architectures without a bundled file."""

from typing import Any

from shardc.errors import ShardcError
from shardc.models.hf import causal_lm_class
from shardc.policy.types import AUTO, Policy, Rule

# Styles of transformers' plans -> roles. Where a plan gathers what it just split, the module may as well stay whole.
_ROLES = {
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "colwise_gather_output": "replicate",
    "rowwise_split_input": "replicate",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": None,  # norms between column and row: propagation finds their reductions
}


def policy_from_hf_plan(config: Any) -> Policy | None:
    """The policy that the model's classes declare, or None where they declare none.

    Errors cite "Config.base_model_tp_plan" and the entry's number. Raises ShardcError for a style without a role."""
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return None
    model_class = causal_lm_class(config)
    prefix = f"{model_class.base_model_prefix}." if model_class.base_model_prefix else ""
    file = f"{type(config).__name__}.base_model_tp_plan"
    entries = [(prefix + path, style, _ROLES) for path, style in plan.items()]
    entries += [(path, style, _ROLES | {"colwise_gather_output": "vocab"}) for path, style in _head(model_class)]
    rules = [_rule(file, line, *entry) for line, entry in enumerate(entries, start=1)]
    rules += [Rule(prefix + path, "vocab", True, file, 1) for path in _embeddings(config, plan)]
    stack = next((key for key in config.base_model_pp_plan or {} if key in ("layers", "h", "blocks")), None)
    return Policy((config.model_type,), tuple(r for r in rules if r), stack and f"{prefix}{stack}.*", AUTO, file)


def _rule(file: str, line: int, path: str, style: str, roles: dict[str, str | None]) -> Rule | None:
    if style not in roles:
        raise ShardcError(
            f"{file}:{line}: {path} has the style {style}, for which shardc has no role",
            "write a policy (CONTRIBUTING.md, A policy) and give it by --policy",
        )
    return Rule(path, roles[style], True, file, line) if roles[style] else None


def _head(model_class: type) -> list[tuple[str, str]]:
    """The entries that the causal language model adds to its base model's plan: the head."""
    return list((getattr(model_class, "_tp_plan", None) or {}).items())


def _embeddings(config: Any, plan: dict[str, str]) -> list[str]:
    """Input embeddings, which plans leave whole: split by vocabulary like the head, to which they may be tied."""
    return [key for key in config.base_model_pp_plan or {} if key.startswith("embed") and key not in plan]
