"""policy.yaml -> Policy, keeping the line of each rule. YAML tags are refused: a policy is data."""

import difflib
import itertools
from pathlib import Path

import yaml

from shardc.errors import ShardcError
from shardc.policy.patterns import block_regex
from shardc.policy.types import AUTO, ROLES, Policy, Rule

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "bool", "null", "float", "map", "seq")}
_NOT_YET = ("expert", "sequence", "opaque", "replace")


def load_policy(path: str | Path) -> Policy:
    """The policy in the file `path`. Raises ShardcError with file and line for whatever the format does not allow."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ShardcError(f"policy {path}: {error.strerror}", "`shardc policy list` shows the bundled ones") from error
    return parse_policy(text, path.name)


def parse_policy(text: str, file: str) -> Policy:
    """The policy written in `text`; `file` is the name that errors cite."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if getattr(error, "problem_mark", None) else 1
        problem = getattr(error, "problem", None) or str(error)
        raise ShardcError(f"{file}:{line}: not YAML: {problem}", 'put globs in quotes: "*.o_proj": row') from error
    if root is None:
        raise ShardcError(f"{file}:1: the policy is empty", "it needs rules: a module glob and a role on each line")
    return _Reader(file).policy(root)


class _Reader:
    """Walks the YAML nodes, which know their lines."""

    def __init__(self, file: str):
        self.file = file

    def policy(self, root: yaml.Node) -> Policy:
        top = self.mapping(root, "a policy", ("models", "rules", "pipeline"))
        if "rules" not in top:
            self.fail(root, "the policy has no rules", "it needs rules: a module glob and a role on each line")
        rules = self.items(top["rules"], "rules")
        pipeline = self.mapping(top["pipeline"], "pipeline", ("blocks", "cuts")) if "pipeline" in top else {}
        blocks = self.text(pipeline["blocks"], "blocks") if "blocks" in pipeline else None
        return Policy(
            models=self.models(top["models"]) if "models" in top else (),
            rules=tuple(self.rule(key, value) for key, value in rules),
            blocks=blocks,
            cuts=self.cuts(pipeline["cuts"], blocks) if "cuts" in pipeline else AUTO,
            file=self.file,
            pipeline_line=self.line(top["pipeline"]) if "pipeline" in top else 0,
        )

    def rule(self, key: yaml.Node, value: yaml.Node) -> Rule:
        pattern, optional, role_node = self.text(key, "a pattern"), False, value
        if isinstance(value, yaml.MappingNode):
            detail = self.mapping(value, f'rule "{pattern}"', ("role", "optional"))
            if "role" not in detail:
                self.fail(value, f'rule "{pattern}" has no role', f"roles: {', '.join(ROLES)}")
            role_node = detail["role"]
            optional = self.flag(detail["optional"]) if "optional" in detail else False
        role = self.text(role_node, f'the role of "{pattern}"')
        if role in _NOT_YET:
            self.fail(role_node, f"role {role} is not supported yet", f"roles: {', '.join(ROLES)}")
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1)
            did_you_mean = f"; did you mean {near[0]}?" if near else ""
            self.fail(role_node, f"unknown role {role!r}{did_you_mean}", f"roles: {', '.join(ROLES)}")
        return Rule(pattern, role, optional, self.file, self.line(key))

    def models(self, node: yaml.Node) -> tuple[str, ...]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(self.text(one, "models") for one in nodes)

    def cuts(self, node: yaml.Node, blocks: str | None) -> tuple[int, ...] | str:
        advice = "cuts: auto, or block indices that begin a stage: cuts: [18]"
        if isinstance(node, yaml.ScalarNode) and node.value == AUTO:
            return AUTO
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, f"cuts is {self.shown(node)}", advice)
        cuts = tuple(self.cut(one, blocks, advice) for one in node.value)
        if any(cut < 1 for cut in cuts) or any(b <= a for a, b in itertools.pairwise(cuts)):
            self.fail(node, f"cuts {list(cuts)} do not rise from 1", advice)
        return cuts

    def cut(self, node: yaml.Node, blocks: str | None, advice: str) -> int:
        if node.tag == "tag:yaml.org,2002:int":
            return int(node.value)
        if blocks and (block := block_regex(blocks).match(str(node.value))) and node.value != block.group():
            self.fail(node, f"cut {node.value} is inside the block {block.group()}: a block stays on one stage", advice)
        self.fail(node, f"cut {self.shown(node)} is not a block index", advice)

    def mapping(self, node: yaml.Node, what: str, known: tuple[str, ...]) -> dict[str, yaml.Node]:
        result = {self.text(key, f"a key of {what}"): (key, value) for key, value in self.items(node, what)}
        for name, (key, _) in result.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                did_you_mean = f"; did you mean {near[0]}?" if near else ""
                self.fail(key, f"{what} has no key {name!r}{did_you_mean}", f"keys of {what}: {', '.join(known)}")
        return {name: value for name, (_, value) in result.items()}

    def items(self, node: yaml.Node, what: str) -> list[tuple[yaml.Node, yaml.Node]]:
        self.plain(node)
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, f"{what} is {self.shown(node)}", f"{what} is written as key: value lines")
        first: dict[str, yaml.Node] = {}
        for key, value in node.value:
            self.plain(key)
            self.plain(value)
            if earlier := first.get(str(key.value)):
                self.fail(key, f'"{key.value}" stands already at line {self.line(earlier)}', "keep one of the two")
            first[str(key.value)] = key
        return node.value

    def text(self, node: yaml.Node, what: str) -> str:
        self.plain(node)
        if node.tag != "tag:yaml.org,2002:str":
            self.fail(node, f"{what} is {self.shown(node)}", "it should be text")
        return node.value

    def flag(self, node: yaml.Node) -> bool:
        if node.tag != "tag:yaml.org,2002:bool":
            self.fail(node, f"optional is {self.shown(node)}", "optional: true or optional: false")
        return node.value.lower() in ("true", "yes", "on")

    def plain(self, node: yaml.Node) -> None:
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.fail(node, f"YAML tag {tag} is not allowed", "a policy holds text, numbers, lists and mappings only")

    def shown(self, node: yaml.Node) -> str:
        kinds = {"map": "a mapping", "seq": "a list", "null": "empty"}
        return kinds.get(node.tag.rpartition(":")[2]) or repr(node.value)

    def line(self, node: yaml.Node) -> int:
        return node.start_mark.line + 1

    def fail(self, node: yaml.Node, problem: str, advice: str) -> None:
        raise ShardcError(f"{self.file}:{self.line(node)}: {problem}", advice)
