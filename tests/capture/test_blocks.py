"""Equal blocks are held once, whatever the depth; blocks that differ in anything are not folded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardc.capture import CapturedModel, Repeat, capture, repeat_block
from shardc.models import source_from_config
from tests.capture import families
from tests.capture.plain import Tiny, tiny_batch
from tests.capture.replay import assert_bit_equal, perturb, run_graph, run_model


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * self.scale


class Stack(Tiny):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def body(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.proj(hidden)


def operations(captured: CapturedModel) -> list[str]:
    return [node.name for node in captured.plain.operations() if node.target is not repeat_block]


def exact(make: Callable[[], nn.Module]) -> CapturedModel:
    """The capture of a model, which is bit-equal to it."""
    captured = capture(make)
    torch.manual_seed(0)
    model = perturb(make())
    assert_bit_equal(run_graph(captured.plain, model, tiny_batch()), run_model(model, tiny_batch()))
    return captured


def test_the_graph_does_not_grow_with_the_depth() -> None:
    shallow = exact(lambda: Stack([Block() for _ in range(2)]))
    deep = exact(lambda: Stack([Block() for _ in range(9)]))
    assert operations(deep) == operations(shallow)
    assert deep.plain.blocks == {"layers.0": [f"layers.{i}" for i in range(9)]}


def test_the_graph_of_a_real_family_does_not_grow_with_the_depth() -> None:
    graphs = []
    for depth in (2, 7):
        config = copy.deepcopy(families.config("qwen3"))
        config.num_hidden_layers, config.layer_types = depth, ["full_attention"] * depth
        graphs.append(capture(source_from_config(config, "qwen3").make))
    assert operations(graphs[0]) == operations(graphs[1])
    repeats = [node.args[0] for node in graphs[1].plain.graph.nodes if node.target is repeat_block]
    assert repeats == [Repeat("model.layers.0", f"model.layers.{i}") for i in range(1, 7)]


class Hidden(Block):
    """Keeps an attribute that this computation does not show."""

    def __init__(self, limit: object) -> None:
        super().__init__()
        self.limit = limit


@pytest.mark.parametrize(
    "blocks",
    [
        lambda: [Block(1.0), Block(2.0), Block(1.0)],
        lambda: [Hidden(3), Hidden(4), Hidden(3)],
        lambda: [Hidden([1, 2]), Hidden([1, 3]), Hidden([1, 2])],
        lambda: [Hidden({"window": 1}), Hidden({"window": 2}), Hidden({"window": 1})],
        lambda: [Hidden(torch.float32), Hidden(torch.bfloat16), Hidden(torch.float32)],
        lambda: [Block(), Hidden(3), Block()],
    ],
    ids=["a literal", "an attribute", "a list", "a dict", "a dtype", "a class"],
)
def test_blocks_that_differ_are_not_folded(blocks: Callable[[], list[nn.Module]]) -> None:
    captured = exact(lambda: Stack(blocks()))
    assert captured.plain.blocks == {"layers.0": ["layers.0", "layers.2"], "layers.1": ["layers.1"]}


class Tabled(Block):
    """Has a buffer that no checkpoint holds, of another value in each block."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(first, first + 8), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * self.table.to(hidden.dtype))


def test_each_repeat_has_its_own_constants() -> None:
    captured = exact(lambda: Stack([Tabled(0.0), Tabled(1.0), Tabled(2.0)]))
    assert captured.plain.blocks == {"layers.0": ["layers.0", "layers.1", "layers.2"]}
    assert [table[0].item() for table in captured.plain.constants.values()] == [0.0, 1.0, 2.0]


def test_gemma_3_folds_each_kind_of_layer() -> None:
    config = copy.deepcopy(families.config("gemma3"))
    config.num_hidden_layers = 6
    config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    blocks = capture(source_from_config(config, "gemma3").make, window=families.WINDOW).plain.blocks
    names = [[path.removeprefix("model.layers.") for path in each] for each in blocks.values()]
    assert names == [["0", "1", "3", "4"], ["2", "5"]]


class Twice(Stack):
    """Runs its two blocks twice, in another order the second time."""

    def body(self, hidden: Tensor) -> Tensor:
        for layer in (*self.layers, *reversed(self.layers)):
            hidden = layer(hidden)
        return self.proj(hidden)


class Shared(Stack):
    """One block at every depth, as ALBERT has it."""

    def __init__(self) -> None:
        super().__init__([Block(), Block()])
        self.layers[1] = self.layers[0]


class Single(Tiny):
    """One block, not in a list, applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def body(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = self.block(hidden)
        return hidden


class Borrowed(Stack):
    """The second and third block use the first one's weight."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(3)])
        self.layers[1].linear.weight = self.layers[2].linear.weight = self.layers[0].linear.weight


class Alternating(Stack):
    """Equal blocks, but every second one is run without gradients."""

    def body(self, hidden: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with torch.set_grad_enabled(i % 2 == 0):
                hidden = layer(hidden)
        return self.proj(hidden)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Twice([Block(), Block()]),
        lambda: Twice([Block(1.0), Block(2.0)]),
        Shared,
        Single,
        Borrowed,
        lambda: Alternating([Block() for _ in range(4)]),
    ],
    ids=["twice", "twice, unequal", "shared", "single", "borrowed weight", "alternating gradients"],
)
def test_one_module_called_twice_is_exact(make: Callable[[], nn.Module]) -> None:
    exact(make)
