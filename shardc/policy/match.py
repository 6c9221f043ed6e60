"""Policy and module paths -> the rule of each module, or an error that names the line."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from shardc.errors import ShardcError
from shardc.policy.patterns import block_regex, expand_braces, path_regex
from shardc.policy.types import AUTO, LEAVES, ROLES, Policy, Rule


def module_classes(model: Any) -> dict[str, str]:
    """Path -> class name of each module of an nn.Module; a subclass of Linear, Conv1D or Embedding counts as that."""
    return {
        path: next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in LEAVES), type(module).__name__)
        for path, module in model.named_modules()
        if path
    }


def match(policy: Policy, modules: Mapping[str, str], blocks: Sequence[str] | None = None) -> dict[str, Rule]:
    """The rule of each module that the policy names, in the order of `modules` (as `module_classes` gives them).

    A `replicate` rule may name a module that holds others: all parameters below it stay whole.
    blocks: paths as `find_blocks` gives them; where given, the policy's cuts must fall between them.
    Raises ShardcError, with file and line, for a rule that matches nothing (unless optional), a module that cannot
    take its role, two rules that disagree about a module, and a cut beyond the last block.
    """
    found: dict[str, Rule] = {}
    for rule in policy.rules:
        regex = path_regex(rule.pattern)
        named = [path for path in modules if regex.fullmatch(path)]
        if not named and not rule.optional:
            _fail_unmatched(rule, modules)
        for path in named:
            for leaf in _leaves(rule, path, modules):
                _record(found, leaf, rule)
    if blocks is not None and policy.cuts != AUTO and policy.cuts and policy.cuts[-1] >= len(blocks):
        raise ShardcError(
            f"{policy.place}: cut {policy.cuts[-1]} is beyond the last of {len(blocks)} blocks",
            f"valid cuts: 1 to {len(blocks) - 1}",
        )
    return {path: found[path] for path in modules if path in found}


def find_blocks(policy: Policy, modules: Mapping[str, str]) -> list[str]:
    """Paths of the repeated blocks, in model order; empty where the policy names none.

    Raises ShardcError if the policy's glob finds nothing."""
    if policy.blocks is None:
        return []
    regex = block_regex(policy.blocks)
    blocks = [path for path in modules if regex.fullmatch(path)]
    if not blocks:
        lists = [path for path, kind in modules.items() if kind == "ModuleList"]
        near = ", ".join(f"{path}.*" for path in lists) or "none"
        raise ShardcError(
            f'{policy.place}: blocks "{policy.blocks}" matches no module', f"lists of modules here: {near}"
        )
    return blocks


def _record(found: dict[str, Rule], path: str, rule: Rule) -> None:
    earlier = found.setdefault(path, rule)
    if earlier.role != rule.role:
        raise ShardcError(
            f'{path}: {earlier.role} by "{earlier.pattern}" ({earlier.place}), but {rule.role} by "{rule.pattern}" '
            f"({rule.place})",
            "narrow one of the two patterns",
        )


def _leaves(rule: Rule, path: str, modules: Mapping[str, str]) -> list[str]:
    """The parameter-holding modules that `rule` means by `path`: itself, or for replicate all that lie below it."""
    kind = modules[path]
    if kind in ROLES[rule.role]:
        return [path]
    below = [other for other in modules if other.startswith(f"{path}.")]
    holds = [other for other in below if modules[other] in LEAVES]
    if rule.role == "replicate":
        return holds or [path]
    inside = f"; it holds {', '.join(holds[:4])}{', ...' if len(holds) > 4 else ''}" if holds else ""
    raise ShardcError(
        f'{rule.place}: "{rule.pattern}" gives {path} the role {rule.role}, but its class is {kind}{inside}',
        f"{rule.role} is for {' and '.join(ROLES[rule.role])}",
    )


def _fail_unmatched(rule: Rule, modules: Mapping[str, str]) -> None:
    """Names the modules whose last names resemble those of the pattern, one path for each."""
    example = {path.rpartition(".")[2]: path for path, kind in reversed(modules.items()) if kind in LEAVES}
    wanted = [glob.rpartition(".")[2] for glob in expand_braces(rule.pattern)]
    near = dict.fromkeys(name for one in wanted for name in difflib.get_close_matches(one, example, n=3))
    shown = ", ".join(example[name] for name in near) or ", ".join(sorted(example)) or "none"
    raise ShardcError(
        f'{rule.place}: "{rule.pattern}" matches no module; near: {shown}',
        "correct the pattern, or write {role: " + rule.role + ", optional: true} if some models lack the module",
    )
