"""Which rule each module gets, and the full text of each refusal."""

from dataclasses import dataclass

import pytest
from torch import nn

from shardc import ShardcError
from shardc.policy import find_blocks, match, module_classes, parse_policy

# A tiny decoder's module paths and classes.
MODULES = {
    "model": "Decoder",
    "model.embed_tokens": "Embedding",
    "model.layers": "ModuleList",
    **{
        f"model.layers.{i}{path}": kind
        for i in range(3)
        for path, kind in {
            "": "Block",
            ".self_attn": "Attention",
            ".self_attn.q_proj": "Linear",
            ".self_attn.o_proj": "Linear",
            ".norm": "RMSNorm",
        }.items()
    },
    "lm_head": "Linear",
}


def policy(*lines: str, pipeline: str = ""):
    return parse_policy("rules:\n" + "".join(f"  {line}\n" for line in lines) + pipeline, "p.yaml")


def roles(found):
    return {path: rule.role for path, rule in found.items()}


def test_braces_and_stars_name_modules_at_any_depth_in_model_order():
    found = match(policy('"lm_head": vocab', '"*.{q,o}_proj": replicate', '"*.embed_tokens": vocab'), MODULES)
    attention = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qo"]
    assert list(found) == ["model.embed_tokens", *attention, "lm_head"]
    assert found["lm_head"].place == "p.yaml:2"


def test_replicate_reaches_what_lies_below_and_may_name_a_norm():
    assert roles(match(policy('"*.1.self_attn": replicate', '"*.0.norm": replicate'), MODULES)) == {
        "model.layers.0.norm": "replicate",
        "model.layers.1.self_attn.q_proj": "replicate",
        "model.layers.1.self_attn.o_proj": "replicate",
    }


def test_two_rules_that_agree_are_no_conflict_and_an_optional_one_may_match_nothing():
    found = match(
        policy('"*.q_proj": column', '"*.0.*.q_proj": column', '"score": {role: row, optional: true}'), MODULES
    )
    assert set(roles(found).values()) == {"column"} and len(found) == 3


def test_blocks_are_the_modules_of_the_list_and_nothing_inside_them():
    one = policy('"lm_head": vocab', pipeline='pipeline: {blocks: "model.layers.*"}')
    assert find_blocks(one, MODULES) == [f"model.layers.{i}" for i in range(3)]
    assert find_blocks(policy('"lm_head": vocab'), MODULES) == []


def test_subclasses_count_as_the_class_whose_weight_they_hold():
    class Scaled(nn.Embedding):
        pass

    model = nn.Sequential(Scaled(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert module_classes(model) == {
        "0": "Embedding",
        "1": "Sequential",
        "1.0": "Linear",
        "1.1": "Tanh",
    }


@dataclass
class Refusal:
    name: str
    lines: tuple
    message: str
    pipeline: str = ""


REFUSALS = [
    Refusal(
        "a rule that matches nothing names near modules",
        ('"lm_head": vocab', '"*.o_porj": row'),
        'p.yaml:3: "*.o_porj" matches no module; near: model.layers.0.self_attn.o_proj, '
        "model.layers.0.self_attn.q_proj\n"
        "  correct the pattern, or write {role: row, optional: true} if some models lack the module",
    ),
    Refusal(
        "a rule like nothing here names all modules",
        ('"*.c_attn": row',),
        'p.yaml:2: "*.c_attn" matches no module; near: embed_tokens, lm_head, o_proj, q_proj\n'
        "  correct the pattern, or write {role: row, optional: true} if some models lack the module",
    ),
    Refusal(
        "two rules that disagree",
        ('"*.q_proj": column', '"*.{q,o}_proj": row'),
        'model.layers.0.self_attn.q_proj: column by "*.q_proj" (p.yaml:2), but row by "*.{q,o}_proj" (p.yaml:3)\n'
        "  narrow one of the two patterns",
    ),
    Refusal(
        "a role for a module that holds others",
        ('"*.self_attn": column',),
        'p.yaml:2: "*.self_attn" gives model.layers.0.self_attn the role column, but its class is Attention; it holds '
        "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.o_proj\n  column is for Linear and Conv1D",
    ),
    Refusal(
        "a role for a norm",
        ('"*.norm": row',),
        'p.yaml:2: "*.norm" gives model.layers.0.norm the role row, but its class is RMSNorm\n'
        "  row is for Linear and Conv1D",
    ),
    Refusal(
        "column for an embedding",
        ('"*.embed_tokens": column',),
        'p.yaml:2: "*.embed_tokens" gives model.embed_tokens the role column, but its class is Embedding\n'
        "  column is for Linear and Conv1D",
    ),
    Refusal(
        "a cut beyond the last block",
        ('"lm_head": vocab',),
        "p.yaml:3: cut 3 is beyond the last of 3 blocks\n  valid cuts: 1 to 2",
        'pipeline: {blocks: "model.layers.*", cuts: [1, 3]}',
    ),
    Refusal(
        "blocks that are not there",
        ('"lm_head": vocab',),
        'p.yaml:3: blocks "transformer.h.*" matches no module\n  lists of modules here: model.layers.*',
        'pipeline: {blocks: "transformer.h.*"}',
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refusal(case):
    one = policy(*case.lines, pipeline=case.pipeline)
    with pytest.raises(ShardcError) as caught:
        match(one, MODULES, find_blocks(one, MODULES))
    assert str(caught.value) == case.message
