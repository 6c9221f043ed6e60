"""A graph that went through plan.json is the same graph."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from shardc.capture import CapturedModel, Repeat, Variant, capture
from shardc.capture.symbols import DEVICE, MODEL_DTYPE, TRAINING, Axis, B, S, ShardSize, Size, WhileTraining
from shardc.errors import ShardcError
from shardc.models import resolve
from shardc.plan.graph_json import graphs_from_json, graphs_to_json
from shardc.plan.json_text import Line, to_text
from shardc.plan.literals import decode, encode
from tests.pipeline.run_stage import run_stage

SMALL = {"num_hidden_layers": 3, "vocab_size": 97}
MODELS = {
    "gpt2": ({"n_layer": 3, "vocab_size": 97, "n_embd": 24, "n_head": 2}, None),
    "Qwen3-0.6B": ({**SMALL, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48}, None),
    "gemma-2-2b": ({**SMALL, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "sliding_window": 24}, 24),
}


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest) -> CapturedModel:
    overrides, window = MODELS[request.param]
    return capture(resolve(request.param, overrides).make, window=window)


def _through_text(captured: CapturedModel) -> tuple[str, dict]:
    text = to_text(graphs_to_json(captured.variants))
    return text, graphs_from_json(json.loads(text), captured.plain.constants)


def test_graphs_come_back_and_give_the_same_text(captured: CapturedModel) -> None:
    text, back = _through_text(captured)
    assert to_text(graphs_to_json(back)) == text
    assert {*back} == {*captured.variants}
    for variant, graph in captured.variants.items():
        twin = back[variant]
        twin.graph.lint()
        assert [str(n.meta.get("value")) for n in twin.graph.nodes] == [
            str(n.meta.get("value")) for n in graph.graph.nodes
        ]
        for node, other in zip(graph.graph.nodes, twin.graph.nodes, strict=True):
            assert node.target == other.target
            assert repr((node.name, node.args, node.kwargs)) == repr((other.name, other.args, other.kwargs))
        assert twin.parameters == graph.parameters
        assert twin.blocks == graph.blocks
        assert {p: c.__name__ for p, c in twin.module_classes.items()} == {
            p: c.__name__ for p, c in graph.module_classes.items()
        }
        assert [*twin.outputs] == [*graph.outputs]


def test_the_text_is_one_line_a_node_and_names_no_machine(captured: CapturedModel) -> None:
    text, _ = _through_text(captured)
    lines = text.splitlines()
    for node in captured.plain.graph.nodes:
        if node.op != "output":
            assert sum(line.lstrip().startswith(f'{{"name": "{node.name}", ') for line in lines) >= 1
    assert "/site-packages" not in text


def test_a_graph_that_came_back_computes_the_same(captured: CapturedModel) -> None:
    _, back = _through_text(captured)
    plain = Variant()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(p.shape, generator=generator) * 0.1
        if p.dtype is MODEL_DTYPE
        else captured.plain.constants[name]
        for name, p in captured.plain.parameters.items()
        if not p.is_buffer or name in captured.plain.constants
    }
    ids = torch.randint(0, 97, (2, 9), generator=generator)
    batch = {"input_ids": ids, "labels": ids, "num_targets": torch.tensor(16.0)}
    expected = run_stage(captured.plain, batch, tensors.__getitem__)
    found = run_stage(back[plain], batch, tensors.__getitem__)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


numbers = st.integers(-9, 9)
offsets = st.one_of(numbers, st.builds(Size, numbers.filter(bool), st.just(0), st.just(1), numbers))
sizes = st.builds(Size, numbers.filter(bool), st.just(1), st.integers(0, 1), offsets)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), sizes, st.builds(ShardSize, sizes, st.just("tp")),
    st.sampled_from([
        DEVICE, MODEL_DTYPE, TRAINING, B, S, Axis("tp.kv"), Ellipsis, WhileTraining(0.1), Repeat("h.0", "h.1"),
        torch.float32, torch.channels_last, torch.strided, torch.device("meta"), float("-inf"),
        ShardSize(Size(1, 0, 1), "tp"),
    ]),
)  # fmt: skip
items = st.recursive(
    leaves, lambda x: st.one_of(st.lists(x, max_size=3), st.tuples(x, x), st.builds(slice, x, x, x)), max_leaves=6
)


@given(items)
def test_every_argument_comes_back(item: Any) -> None:
    data = json.loads(json.dumps(encode(item)))
    assert repr(decode(data, {})) == repr(item)


def test_an_argument_that_is_a_node_is_written_by_name() -> None:
    node = fx.Graph().placeholder("x")
    assert encode((node, 1.0, "sum")) == ["%x", 1.0, "'sum"]
    assert decode(["%x", 1.0, "'sum"], {"x": node}) == (node, 1.0, "sum")


def _set(key: str, value: Any) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        data["variants"]["plain"]["nodes"][-1][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set("target", "os.system"), "plan.json: a graph calls 'os.system', which is no operation"),
        (_set("target", "torch.no_such"), "plan.json: a graph calls 'torch.no_such', which is no operation"),
        (_set("args", ["%no_such"]), "plan.json: '%no_such' is no argument of a graph"),
        (_set("args", [{"eval": 1}]), "plan.json: {'eval': 1} is no argument of a graph"),
        (_set("call", 999), "plan.json: its graphs cannot be read (IndexError: list index out of range)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_graph_is_refused(captured: CapturedModel, change: Callable[[dict], None], problem: str) -> None:
    data = json.loads(to_text(graphs_to_json(captured.variants)))
    change(data)
    with pytest.raises(ShardcError) as error:
        graphs_from_json(data, captured.plain.constants)
    assert error.value.problem == problem


def test_short_containers_stand_on_one_line_and_keys_are_sorted() -> None:
    data = {"b": [1, 2], "a": {"y": 1, "x": None}, "rows": [Line(z=1, a=2)]}
    assert to_text(data) == (
        '{\n  "a": {"x": null, "y": 1},\n  "b": [1, 2],\n  "rows": [\n    {"z": 1, "a": 2}\n  ]\n}\n'
    )
