"""policy.yaml -> Policy, and the full text of each refusal (issue 2: seeded mistakes)."""

from dataclasses import dataclass

import pytest

from shardc import ShardcError
from shardc.policy import AUTO, Policy, Rule, bundled_policies, load_bundled, load_policy, parse_policy, policy_to_yaml

EXAMPLE = """\
models: [qwen3]
rules:
  "*.self_attn.{q,k,v}_proj": column
  # a comment
  "lm_head": {role: vocab, optional: true}
pipeline: {blocks: "model.layers.*", cuts: [12, 24]}
"""
ROLES = "\n  roles: column, row, vocab, replicate"
CUTS = "\n  cuts: auto, or block indices that begin a stage: cuts: [18]"


def test_a_policy_keeps_file_and_line_of_each_rule(tmp_path):
    (tmp_path / "mine.yaml").write_text(EXAMPLE)
    assert load_policy(tmp_path / "mine.yaml") == Policy(
        models=("qwen3",),
        rules=(
            Rule("*.self_attn.{q,k,v}_proj", "column", False, "mine.yaml", 3),
            Rule("lm_head", "vocab", True, "mine.yaml", 5),
        ),
        blocks="model.layers.*",
        cuts=(12, 24),
        file="mine.yaml",
        pipeline_line=6,
    )


def test_pipeline_and_models_may_be_absent():
    policy = parse_policy('rules: {"fc1": column}', "mine.yaml")
    assert (policy.models, policy.blocks, policy.cuts) == ((), None, AUTO)


@pytest.mark.parametrize("name", bundled_policies())
def test_a_policy_written_out_reads_back_the_same(name):
    policy = load_bundled(name)
    again = parse_policy(policy_to_yaml(policy), policy.file)
    said = lambda p: ([(r.pattern, r.role, r.optional) for r in p.rules], p.models, p.blocks, p.cuts)  # noqa: E731
    assert said(again) == said(policy)


@dataclass
class Refusal:
    name: str
    text: str
    message: str


def rules(line: str) -> str:
    return f"rules:\n  {line}\n"


def pipeline(line: str) -> str:
    return f'rules: {{"fc": row}}\npipeline:\n  blocks: "model.layers.*"\n  {line}\n'


REFUSALS = [
    Refusal("empty", "", "p.yaml:1: the policy is empty\n  it needs rules: a module glob and a role on each line"),
    Refusal(
        "no rules",
        "models: [llama]",
        "p.yaml:1: the policy has no rules\n  it needs rules: a module glob and a role on each line",
    ),
    Refusal("not a mapping", "- a", "p.yaml:1: a policy is a list\n  a policy is written as key: value lines"),
    Refusal(
        "an unquoted glob",
        rules("*.o_proj: row"),
        "p.yaml:2: not YAML: expected alphabetic or numeric character, but found '.'\n"
        '  put globs in quotes: "*.o_proj": row',
    ),
    Refusal(
        "a Python tag",
        rules('"fc": !!python/object/apply:os.system ["ls"]'),
        "p.yaml:2: YAML tag !!python/object/apply:os.system is not allowed\n"
        "  a policy holds text, numbers, lists and mappings only",
    ),
    Refusal(
        "a tag of one's own at the top",
        "!policy\nrules: {}",
        "p.yaml:1: YAML tag !policy is not allowed\n  a policy holds text, numbers, lists and mappings only",
    ),
    Refusal("a misspelt role", rules('"fc": colum'), "p.yaml:2: unknown role 'colum'; did you mean column?" + ROLES),
    Refusal("a role to come", rules('"fc": expert'), "p.yaml:2: role expert is not supported yet" + ROLES),
    Refusal("no role", rules('"fc": {optional: true}'), 'p.yaml:2: rule "fc" has no role' + ROLES),
    Refusal("a number for a role", rules('"fc": 3'), "p.yaml:2: the role of \"fc\" is '3'\n  it should be text"),
    Refusal("a role left out", rules('"fc":'), 'p.yaml:2: the role of "fc" is empty\n  it should be text'),
    Refusal(
        "optional is not a bool",
        rules('"fc": {role: row, optional: maybe}'),
        "p.yaml:2: optional is 'maybe'\n  optional: true or optional: false",
    ),
    Refusal(
        "a misspelt key of a rule",
        rules('"fc": {role: row, optinal: true}'),
        'p.yaml:2: rule "fc" has no key \'optinal\'; did you mean optional?\n  keys of rule "fc": role, optional',
    ),
    Refusal(
        "a misspelt section",
        'rule: {"fc": row}',
        "p.yaml:1: a policy has no key 'rule'; did you mean rules?\n  keys of a policy: models, rules, pipeline",
    ),
    Refusal(
        "the same glob twice",
        rules('"fc": row\n  "fc": column'),
        'p.yaml:3: "fc" stands already at line 2\n  keep one of the two',
    ),
    Refusal(
        "a cut inside a block",
        pipeline('cuts: ["model.layers.3.mlp"]'),
        "p.yaml:4: cut model.layers.3.mlp is inside the block model.layers.3: a block stays on one stage" + CUTS,
    ),
    Refusal(
        "a cut by path",
        pipeline('cuts: ["model.layers.3"]'),
        "p.yaml:4: cut 'model.layers.3' is not a block index" + CUTS,
    ),
    Refusal("cuts that fall", pipeline("cuts: [4, 2]"), "p.yaml:4: cuts [4, 2] do not rise from 1" + CUTS),
    Refusal("a cut before the first block", pipeline("cuts: [0]"), "p.yaml:4: cuts [0] do not rise from 1" + CUTS),
    Refusal("cuts as a number", pipeline("cuts: 4"), "p.yaml:4: cuts is '4'" + CUTS),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refusal(case):
    with pytest.raises(ShardcError) as caught:
        parse_policy(case.text, "p.yaml")
    assert str(caught.value) == case.message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ShardcError) as caught:
        load_policy(tmp_path / "no.yaml")
    assert str(caught.value) == (
        f"policy {tmp_path}/no.yaml: No such file or directory\n  `shardc policy list` shows the bundled ones"
    )
