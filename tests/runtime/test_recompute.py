"""Recomputation changes what is kept, and no bit of loss or gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc.models import source_from_config
from shardc.plan import compile_plan, write_plan
from shardc.runtime import PlanModule, ShardcError, load_plan
from shardc.runtime.blocks import blocks_of
from shardc.runtime.compile_blocks import compile_blocks
from shardc.runtime.recompute import Recompute, attention_of, disable_recompute, enable_recompute
from tests.end_to_end.exact import Layout, small
from tests.runtime import toy
from tests.sharding.families import FAMILIES, tiny_config
from tests.workers import Workers

HERE = "tests.runtime.test_recompute"
DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
Step = tuple[Tensor, dict[str, Tensor], Counter]


def step(
    module: PlanModule, batch: dict[str, Tensor], settings: Recompute | None = None, *, count: bool = True
) -> Step:
    """The loss, this rank's gradients, and how often each module without children ran, by name.

    count: False sets no hooks, for which compiled code would be compiled again."""
    if settings is not None:
        enable_recompute(module, settings)
    ran: Counter[str] = Counter()
    leaves = [(name, part) for name, part in module.named_modules() if count and not [*part.children()]]
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: ran.update([name])) for name, part in leaves]
    torch.manual_seed(5)
    loss = module(**batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = None
    for hook in hooks:
        hook.remove()
    disable_recompute(module)
    return loss.detach(), gradients, ran


def assert_same(one: Step, other: Step) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert [name for name, gradient in one[1].items() if not torch.equal(gradient, other[1][name])] == []


def inside(module: PlanModule, found: Callable[[nn.Module], list[nn.Module]]) -> set[str]:
    """Names of the modules without children inside what `found` takes from each block."""
    names = {id(part): name for name, part in module.named_modules()}
    blocks = [block for stage in module.pipeline.modules.values() for block in blocks_of(stage).values()]
    parts = [part for block in blocks for outer in found(block) for part in outer.modules()]
    return {names[id(part)] for part in parts if not [*part.children()]}


def ids(rows: int, length: int, vocabulary: int = 101) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_recomputes_blocks_or_their_attention_bit_for_bit(family: str, tmp_path: Path) -> None:
    """In training mode, with dropout of 0.1 wherever the config has one."""
    config = copy.deepcopy(tiny_config(family))
    for name in vars(config):
        if name.endswith(("_pdrop", "dropout")) and isinstance(getattr(config, name), (int, float)):
            setattr(config, name, 0.1)
    plan = compile_plan(source_from_config(config, family), dtype="float32")
    module = load_plan(write_plan(plan, tmp_path / "plan")).build(seed=3, device="cpu").train()
    blocks = blocks_of(module.pipeline.modules[0])
    assert len(blocks) == module.spec.stages[0].num_blocks == config.num_hidden_layers
    assert [len(attention_of(block)) for block in blocks.values()] == [1] * len(blocks)
    plain, whole, attention = (step(module, ids(3, 8), s) for s in (None, Recompute(), Recompute(attention_only=True)))
    assert_same(plain, whole)
    assert_same(plain, attention)
    for ran, twice in ((whole[2], inside(module, lambda b: [b])), (attention[2], inside(module, attention_of))):
        again = {name for name in ran if ran[name] == 2 * plain[2][name]}
        assert again == twice
        assert all(ran[name] == plain[2][name] for name in ran.keys() - again)


def train(folder: str, batch: dict[str, Tensor], settings: Recompute, dtype: torch.dtype | None = None) -> set[int]:
    """Holds a step with recomputation to one without; returns how often a module of a block ran more than before."""
    torch.manual_seed(0)
    module = load_plan(folder).build(seed=3, dtype=dtype, device="cpu").train()
    plain, recomputed = step(module, batch), step(module, batch, settings)
    assert_same(plain, recomputed)
    blocks = inside(module, attention_of if settings.attention_only else lambda block: [block])
    return {recomputed[2][name] - plain[2][name] for name in blocks}


@pytest.mark.parametrize("settings", [Recompute(), Recompute(layers_per_stage=(2, 1))], ids=["all", "2 and 1"])
def test_micro_batches_of_a_pipeline_recompute(settings: Recompute, workers: Workers, tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path / "plan", pp=2, microbatches=4)
    batch = toy.batch_of(5, 9, seed=0, padding="left")
    ran = workers.run(2, f"{HERE}:train", str(folder), batch, settings, torch.float64)
    assert ran == [{4}, {4} if settings.layers_per_stage is None else {0, 4}]


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_collectives_run_again(parallel: dict[str, Any], workers: Workers, tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path / "plan", microbatches=2, **parallel)
    ran = workers.run(2, f"{HERE}:train", str(folder), toy.batch_of(3, 9, seed=0), Recompute(), torch.float64)
    assert ran == [{2}, {2}]


@pytest.mark.parametrize("attention_only", [False, True], ids=["blocks", "attention"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_ranks_draw_their_dropout_again(layout: Layout, attention_only: bool, workers: Workers, tmp_path: Path) -> None:
    """Over tp the attention's masks are of the rank's own stream, and the residual's are equal on both."""
    source = small("gpt2", layout, **DROPOUT, num_hidden_layers=2)
    plan = compile_plan(source, tp=layout.tp, pp=layout.pp, dtype="float32")
    folder = write_plan(plan, tmp_path / "plan")
    settings = Recompute(attention_only=attention_only)
    ran = workers.run(2, f"{HERE}:train", str(folder), ids(5, 9), settings)
    assert ran == [{plan.settings.microbatches}] * 2


def build(folder: Path, **options: Any) -> PlanModule:
    return load_plan(toy.write_plan(folder / "plan", **options)).build(seed=3, dtype=torch.float64, device="cpu")


def bytes_kept(module: PlanModule, batch: dict[str, Tensor]) -> int:
    """Bytes of what one forward keeps for its backward, parameters left out."""
    parameters = {p.data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(**batch).loss
    assert loss.requires_grad
    return sum(kept.values())


def test_blocks_keep_their_inputs_alone(tmp_path: Path) -> None:
    module, batch = build(tmp_path, microbatches=1), toy.batch_of(4, 16, seed=0)
    before = bytes_kept(module, batch)
    enable_recompute(module, Recompute(0.5))
    half = bytes_kept(module, batch)
    enable_recompute(module, Recompute())
    whole = bytes_kept(module, batch)
    disable_recompute(module)
    assert whole < before / 3
    assert abs(half - (before + whole) / 2) < before / 10
    assert bytes_kept(module, batch) == before


def test_the_first_blocks_are_those_that_recompute(tmp_path: Path) -> None:
    module, batch = build(tmp_path, microbatches=1), toy.batch_of(2, 5, seed=0)
    for settings, expected in [
        (Recompute(0), 0),
        (Recompute(0.25), 1),
        (Recompute(0.26), 2),
        (Recompute(layers_per_stage=(3,)), 3),
        (Recompute(ratio=0.25, layers_per_stage=(4,)), 4),
    ]:
        _, _, ran = step(module, batch, settings)
        assert [ran[f"stages.0.blocks.{i}.gate_up"] for i in range(4)] == [2] * expected + [1] * (4 - expected)
    assert Recompute(0.1).count(0, 30) == 3


def test_without_gradients_nothing_is_computed_twice(tmp_path: Path) -> None:
    module, batch = build(tmp_path), toy.batch_of(2, 5, seed=0)
    ran = []
    module.stages["0"].blocks["0"].gate_up.register_forward_pre_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        expected = module(**batch)
        enable_recompute(module, Recompute())
        found = module(**batch)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)
    assert len(ran) == 4  # two micro-batches, twice


def test_evaluation_mode_recomputes_too(tmp_path: Path) -> None:
    module, batch = build(tmp_path).eval(), toy.batch_of(3, 5, seed=0)
    plain, recomputed = step(module, batch), step(module, batch, Recompute())
    assert_same(plain, recomputed)
    assert recomputed[2]["stages.0.blocks.0.gate_up"] == 2 * plain[2]["stages.0.blocks.0.gate_up"]


def test_hooks_of_a_block_stay_outside(tmp_path: Path) -> None:
    """Forward hooks run once; one on the gradient of the block's output runs before the block is computed again."""
    module, batch = build(tmp_path, microbatches=1), toy.batch_of(2, 5, seed=0)
    enable_recompute(module, Recompute())
    block, events = module.stages["0"].blocks["1"], []
    block.register_forward_pre_hook(lambda *_: events.append("before"))
    block.gate_up.register_forward_pre_hook(lambda *_: events.append("computes"))

    def watch_output(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        output.register_hook(lambda _: events.append("gradient"))

    block.register_forward_hook(watch_output)
    module(**batch).loss.backward()
    assert events == ["before", "computes", "gradient", "computes"]


def test_disable_gives_back_the_forward_that_was_there(tmp_path: Path) -> None:
    module = build(tmp_path)
    blocks = module.stages["0"].blocks
    blocks["1"].forward = own = lambda *args: args[0]
    enable_recompute(module, Recompute())
    enable_recompute(module, Recompute(0.5))
    assert ["forward" in vars(block) for block in blocks.values()] == [True, True, False, False]
    disable_recompute(module)
    assert ["forward" in vars(block) for block in blocks.values()] == [False, True, False, False]
    assert blocks["1"].forward is own


@pytest.mark.parametrize("attention_only", [False, True], ids=["blocks", "attention"])
def test_compiled_forwards_run_again_as_they_ran(attention_only: bool, tmp_path: Path) -> None:
    """Micro-batches of two sizes, with dropout: each size has a graph of its own, which draws its masks again."""
    plan = compile_plan(small("gpt2", Layout(), **DROPOUT), microbatches=2, dtype="float32")
    module = load_plan(write_plan(plan, tmp_path / "plan")).build(seed=3, device="cpu").train()
    runs: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        runs["compiled"] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    if attention_only:
        for block in blocks_of(module.pipeline.modules[0]).values():
            for part in attention_of(block):
                part.forward = torch.compile(part.forward, dynamic=False, backend=backend)
    else:
        compile_blocks(module, backend=backend)
    batch = ids(5, 9)
    plain = step(module, batch, count=False)
    compiled = runs["compiled"]
    assert compiled >= 2
    assert_same(plain, step(module, batch, Recompute(attention_only=attention_only), count=False))
    assert runs["compiled"] == compiled


def test_recomputed_attention_in_a_compiled_block(tmp_path: Path) -> None:
    plan = compile_plan(small("Qwen3-4B", Layout()), microbatches=2, dtype="float32")
    module = load_plan(write_plan(plan, tmp_path / "plan")).build(seed=3, device="cpu").train()
    batch = ids(5, 9)
    plain = step(module, batch, count=False)
    enable_recompute(module, Recompute(attention_only=True))
    compile_blocks(module, backend="aot_eager")
    compiled = step(module, batch, count=False)
    torch.testing.assert_close(compiled[1], plain[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recomputes_first", [False, True])
def test_blocks_that_recompute_are_compiled_inside(recomputes_first: bool, tmp_path: Path) -> None:
    plan = compile_plan(small("Qwen3-4B", Layout()), microbatches=2, dtype="float32")
    module = load_plan(write_plan(plan, tmp_path / "plan")).build(seed=3, device="cpu").train()
    batch = ids(5, 9)
    plain = step(module, batch, count=False)
    runs: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        runs["compiled"] += 1

        def run(*args: Tensor) -> Any:
            runs["runs"] += 1
            return graph(*args)

        return run

    steps = [lambda: enable_recompute(module, Recompute()), lambda: compile_blocks(module, backend=backend)]
    for prepare in steps if recomputes_first else reversed(steps):
        prepare()
    assert_same(plain, step(module, batch, count=False))
    blocks = len(blocks_of(module.pipeline.modules[0]))
    assert runs["compiled"] == 2, "equal blocks share a graph of each of the two sizes"
    assert runs["runs"] == 2 * 2 * blocks
    disable_recompute(module)
    assert_same(plain, step(module, batch, count=False))
    assert runs["runs"] == 3 * 2 * blocks, "still compiled"


REFUSED = [
    (
        lambda: Recompute(1.5),
        "Recompute: ratio=1.5; valid: a number from 0 to 1",
        "1.0 is every block",
    ),
    (
        lambda: Recompute(layers_per_stage=(1, -1)),
        "Recompute: layers_per_stage=[1, -1]; valid: numbers from 0 on",
        "0 recomputes nothing in that stage",
    ),
    (
        lambda: Recompute(layers_per_stage=(1, 1)),
        "Recompute: layers_per_stage=[1, 1] has 2 numbers, the plan has 1 stages",
        "give one number for each stage",
    ),
    (
        lambda: Recompute(layers_per_stage=(5,)),
        "Recompute: layers_per_stage=[5], but stage 0 has 4 blocks",
        "give stage 0 at most 4",
    ),
    (
        lambda: Recompute(attention_only=True),
        "Recompute: attention_only, but no module inside blocks.0 (Block) calls scaled_dot_product_attention, "
        "or softmax and a matrix product",
        "leave attention_only out, to recompute whole blocks",
    ),
]


@pytest.mark.parametrize(("make", "problem", "advice"), REFUSED, ids=[row[1][:60] for row in REFUSED])
def test_settings_that_do_not_fit_are_refused(make: Callable, problem: str, advice: str, tmp_path: Path) -> None:
    module = build(tmp_path)
    with pytest.raises(ShardcError) as error:
        enable_recompute(module, make())
    assert str(error.value) == f"{problem}\n  {advice}"
    assert all("forward" not in vars(part) for part in module.modules())


def refused_on_rank(folder: str) -> str:
    module = load_plan(folder).build(seed=3, device="cpu")
    with pytest.raises(ShardcError) as error:
        enable_recompute(module, Recompute(layers_per_stage=(1, 2)))
    return error.value.problem


def test_a_count_too_large_for_one_stage_is_refused_on_all_ranks(workers: Workers, tmp_path: Path) -> None:
    plan = compile_plan(small("gpt2", Layout(pp=2), num_hidden_layers=2), pp=2, dtype="float32")
    folder = write_plan(plan, tmp_path / "plan")
    problem = "Recompute: layers_per_stage=[1, 2], but stage 1 has 1 blocks"
    assert workers.run(2, f"{HERE}:refused_on_rank", str(folder)) == [problem] * 2


class Router(nn.Module):
    """Takes a softmax, and attends to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


def weigh(scores: Tensor, values: Tensor) -> Tensor:
    return torch.matmul(scores.softmax(-1), values)


class ByFunction(nn.Module):
    """Attends in a function of the same file."""

    def forward(self, x: Tensor) -> Tensor:
        return weigh(x @ x.mT, x)


class ByMethod(ByFunction):
    """Attends in a method, with ByFunction inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ByFunction()

    def attend(self, x: Tensor) -> Tensor:
        return [torch.softmax(row @ row.mT, -1) for row in x]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


def test_attention_is_known_by_what_its_forward_calls() -> None:
    block = nn.Module()
    block.router, block.by_function, block.by_method, block.dense = Router(), ByFunction(), ByMethod(), nn.Linear(1, 1)
    block.wrapper = nn.Module()
    block.wrapper.attention = nn.MultiheadAttention(2, 1)
    assert attention_of(block) == [block.by_function, block.by_method, block.wrapper.attention]


def test_single_layers_of_a_list_are_no_blocks() -> None:
    stage = nn.Module()
    stage.model = nn.ModuleDict({"wte": nn.Embedding(2, 2), "h": nn.ModuleDict({"4": ByMethod(), "5": ByMethod()})})
    stage.head = nn.ModuleList([nn.Linear(1, 1), nn.GELU()])
    stage.model["h"]["4"].experts = nn.ModuleList([ByMethod()])
    assert list(blocks_of(stage)) == ["model.h.4", "model.h.5"]
