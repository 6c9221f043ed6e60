"""Policy -> the dict of plan.json and the YAML that the user may edit."""

import json

from shardc.policy.types import AUTO, Policy


def policy_to_dict(policy: Policy) -> dict:
    """Plain data for plan.json: what the file says, without line numbers."""
    return {
        "file": policy.file,
        "models": list(policy.models),
        "rules": [{"pattern": r.pattern, "role": r.role, "optional": r.optional} for r in policy.rules],
        "pipeline": {"blocks": policy.blocks, "cuts": AUTO if policy.cuts == AUTO else list(policy.cuts)},
    }


def policy_to_yaml(policy: Policy) -> str:
    """The policy as a file: `parse_policy` of the text gives the same rules, blocks and cuts."""
    lines = [f"models: [{', '.join(policy.models)}]"] if policy.models else []
    lines.append("rules:")
    for rule in policy.rules:
        role = f"{{role: {rule.role}, optional: true}}" if rule.optional else rule.role
        lines.append(f"  {json.dumps(rule.pattern)}: {role}")
    cuts = AUTO if policy.cuts == AUTO else list(policy.cuts)
    if policy.blocks is not None:
        lines.append(f"pipeline: {{blocks: {json.dumps(policy.blocks)}, cuts: {cuts}}}")
    elif cuts != AUTO:
        lines.append(f"pipeline: {{cuts: {cuts}}}")
    return "\n".join(lines) + "\n"
