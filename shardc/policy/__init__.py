"""Policy files -> one role for each module that they name. Nothing here builds a model or knows a shape."""

from shardc.policy.adapters import paths_without_adapters, roles_with_adapters
from shardc.policy.dump import policy_to_dict, policy_to_yaml
from shardc.policy.find import bundled_policies, load_bundled, policy_for
from shardc.policy.hf_plan import policy_from_hf_plan
from shardc.policy.load import load_policy, parse_policy
from shardc.policy.match import find_blocks, match, module_classes
from shardc.policy.types import AUTO, ROLES, Policy, Rule

__all__ = [
    "AUTO",
    "ROLES",
    "Policy",
    "Rule",
    "bundled_policies",
    "find_blocks",
    "load_bundled",
    "load_policy",
    "match",
    "module_classes",
    "parse_policy",
    "paths_without_adapters",
    "policy_for",
    "policy_from_hf_plan",
    "policy_to_dict",
    "policy_to_yaml",
    "roles_with_adapters",
]
