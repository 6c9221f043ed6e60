"""fully_shard as a placement: it trains as one process does, and as zero3, and holds what it says."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from shardc.plan.verification import RELATIVE, compare_gradients, reference_step
from shardc.runtime import PlanModule, ShardcError, load_plan
from shardc.runtime.fsdp import check_layout
from shardc.runtime.memory import MemoryEngine
from shardc.runtime.recompute import Recompute, disable_recompute, enable_recompute
from shardc.runtime.state import Piece, StateOptions
from shardc.runtime.weights import SeedWeights
from tests.end_to_end.exact import Layout, prepare, small
from tests.runtime import toy
from tests.runtime.test_training import check_gradients, dp_part
from tests.runtime.test_training import train as train_like_one_process
from tests.workers import Workers

HERE = "tests.runtime.test_fsdp"
TRAINING = "tests.runtime.test_training"
MEMORY = "tests.runtime.test_memory"
CALLS = [(4, 8, "none"), (4, 9, "left"), (3, 5, "right")]
DOUBLE = torch.float64


def build(folder: str, placement: str = "fsdp", dtype: torch.dtype = DOUBLE, **options: Any) -> PlanModule:
    return load_plan(folder).build(
        seed=3, dtype=dtype, device="cpu", placement=placement, options=StateOptions(**options)
    )


def dense_of(folder: str) -> toy.Dense:
    return toy.dense_model(load_plan(folder), seed=3)


def forget(module: PlanModule, dense: toy.Dense) -> None:
    module.zero_grad()
    for parameter in dense.values.values():
        parameter.grad = None


# -- as one process ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "microbatches", "frozen"),
    [(2, 1, ()), (4, 1, ()), (2, 3, ()), (4, 3, ()), (2, 1, ("embed", "blocks.0", "blocks.2")), (2, 2, ("embed",))],
    ids=str,
)
def test_training_equals_one_process(
    workers: Workers, tmp_path: Path, ranks: int, microbatches: int, frozen: tuple[str, ...]
) -> None:
    """Scaled and repeated backward, a result that is thrown away, evaluation; 101, 6, 3 and 2 rows over the ranks."""
    folder = toy.write_plan(tmp_path / "plan", microbatches=microbatches, frozen=frozen)
    workers.run(ranks, f"{TRAINING}:train", str(folder), CALLS, frozen, "cpu", "fsdp")


def test_one_process_without_torch_distributed_trains_too(tmp_path: Path) -> None:
    """There is nothing to split: chunks keep the state."""
    folder = str(toy.write_plan(tmp_path / "plan", microbatches=1))
    assert not dist.is_initialized()
    train_like_one_process(folder, CALLS, (), "cpu", "fsdp")
    assert isinstance(build(folder).state, MemoryEngine)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_dp_ranks_with_unequal_numbers_of_micro_batches(workers: Workers, tmp_path: Path, microbatches: int) -> None:
    folder = toy.write_plan(tmp_path / "plan", microbatches=microbatches)
    workers.run(2, f"{MEMORY}:uneven", str(folder), "fsdp")


def hugging_face(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of two calls, the second with recomputation; then saves."""
    module = load_plan(folder / "plan").build(folder / "weights", device="cpu", placement="fsdp")
    losses, gradients = [], {}
    for call in range(2):
        loss = module.eval()(**dp_part(module, load_file(folder / f"batch_{call}.safetensors"))).loss
        loss.backward()
        losses.append(loss.item())
        module.reduce_gradients()
        gradients |= {f"{call}: {name}": grad for name, grad in module.gather_gradients().items()}
        module.zero_grad()
        enable_recompute(module, Recompute(attention_only=True))
    module.save_pretrained(folder / "saved")
    return losses, gradients


@pytest.mark.parametrize("preset", ["Qwen3-0.6B", "gpt2"])
def test_every_gradient_is_that_of_the_hugging_face_model(workers: Workers, tmp_path: Path, preset: str) -> None:
    """GQA with tied weights, and biases with learned positions; padded rows. What is saved, transformers opens."""
    layout = Layout(dp=4, microbatches=1)
    trial = prepare(small(preset, layout, vocab_size=131), tmp_path, layout)
    batches = [trial.batch(9, padding="left"), trial.batch(8)]
    trial.write_batches(batches)
    (losses, found), *others = workers.run(4, f"{HERE}:hugging_face", tmp_path)
    assert all(other == (losses, {}) for other in others)
    for call, batch in enumerate(batches):
        expected, reference = reference_step(trial.model, batch)
        assert losses[call] == pytest.approx(expected, rel=RELATIVE)
        of_call = {name.removeprefix(f"{call}: "): g for name, g in found.items() if name.startswith(f"{call}: ")}
        worst = compare_gradients(of_call, reference)[0]
        assert worst.ratio <= 1, worst
        trial.model.zero_grad()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    expected = trial.model.state_dict()
    assert saved.keys() == expected.keys()
    assert [name for name in saved if not torch.equal(saved[name], expected[name])] == []


# -- steps -------------------------------------------------------------------------------------------------------------
def five_steps(module: PlanModule, folder: str) -> list[Tensor]:
    """AdamW, the gradients scaled in the step; each beside one process."""
    dense = dense_of(folder)
    optimizer = torch.optim.AdamW(module.state.masters(0), lr=1e-2)
    reference = torch.optim.AdamW(dense.values.values(), lr=1e-2)
    losses = []
    for step in range(5):
        batch = toy.batch_of(4, 6, seed=step)
        loss, expected = module(**dp_part(module, batch)).loss, dense.loss(**batch)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-7, atol=0)
        loss.backward()
        (expected / 2).backward()
        module.reduce_gradients()
        module(**dp_part(module, batch))  # leaves something gathered
        module.state.step(optimizer, torch.tensor(0.5))
        reference.step()
        forget(module, dense)
        losses.append(loss.detach())
    found = module.gather_parameters()
    if module.mesh.rank == 0:
        for name, value in dense.values.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-8)
    return losses


def steps(folder: str) -> None:
    """fully_shard and zero3 beside one process; then what each rank holds."""
    for reshards in (True, False):
        ours = build(folder, reshard_after_forward=reshards)
        first = five_steps(ours, folder)
    theirs = five_steps(build(folder, "zero3"), folder)
    torch.testing.assert_close(first, theirs, rtol=1e-9, atol=0)
    held = {parameter.to_local().untyped_storage().data_ptr() for parameter in ours.parameters()}
    assert {master.untyped_storage().data_ptr() for master in ours.state.masters(0)} == held
    everywhere = torch.tensor(sum(master.numel() for master in ours.state.masters(0)))
    dist.all_reduce(everywhere)
    assert everywhere == sum(torch.Size(spec.shape).numel() for spec in ours.spec.parameters.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_equal_one_process_and_zero3(workers: Workers, tmp_path: Path, ranks: int) -> None:
    workers.run(ranks, f"{HERE}:steps", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def accumulation(folder: str) -> None:
    """Three calls, none or two of them in no_sync; a step right after no_sync; a loss or two backward at once."""
    module, dense = build(folder), dense_of(folder)
    batches = [toy.batch_of(4, 6, seed=step) for step in range(3)]

    def call(batch: dict[str, Tensor]) -> None:
        module(**dp_part(module, batch)).loss.backward()
        dense.loss(**batch).backward()

    def check() -> None:
        module.reduce_gradients()
        check_gradients(module, dense)
        forget(module, dense)

    for batch in batches:
        call(batch)
    check()
    with module.state.no_sync():
        for batch in batches[:2]:
            call(batch)
        assert module.state.gradients.sums == {}  # nothing was reduced
    call(batches[2])
    check()
    with module.state.no_sync():
        call(batches[0])
        with torch.no_grad():
            module(**dp_part(module, batches[1]))
        call(batches[1])
    check()
    with module.state.no_sync():
        call(batches[0])
    forget(module, dense)  # what waits is forgotten too
    call(batches[2])
    check()
    with module.state.no_sync():
        call(batches[0])
        with module.state.collect(1) as kept:
            module(**dp_part(module, batches[1])).loss.backward()
    kept.release(torch.tensor(2.0))
    (2 * dense.loss(**batches[1])).backward()
    check()
    one, two = (module(**dp_part(module, batch)).loss for batch in batches[:2])
    dense.loss(**batches[0]).backward()
    with torch.no_grad():
        module(**dp_part(module, batches[2]))
    one.backward(retain_graph=True)
    (one + two).backward()
    (dense.loss(**batches[0]) + dense.loss(**batches[1])).backward()
    check()


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_add_up_over_calls_whether_they_wait_or_not(workers: Workers, tmp_path: Path, ranks: int) -> None:
    workers.run(ranks, f"{HERE}:accumulation", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def kept_apart(folder: str) -> None:
    """Micro-batches: a loss waits until after zero_grad; a call inside no_sync; a second backward is refused."""
    module, dense = build(folder), dense_of(folder)
    first, second = (toy.batch_of(6, 6, seed=step) for step in range(2))
    loss = module(**dp_part(module, first)).loss
    with module.state.no_sync():
        module(**dp_part(module, second)).loss.backward()
    forget(module, dense)
    (2 * loss).backward(retain_graph=True)
    (2 * dense.loss(**first)).backward()
    module.reduce_gradients()
    check_gradients(module, dense)
    with pytest.raises(ShardcError, match="backward was called twice"):
        loss.backward()


def test_gradients_of_micro_batches_are_kept_apart(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:kept_apart", str(toy.write_plan(tmp_path / "plan", microbatches=3)))


# -- gradients that some ranks do not have -----------------------------------------------------------------------------
def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], lines: dict[str, str] | None = None) -> str:
    """The toy's plan with another plan.json, and other lines of model.py: old to new."""
    source = (folder / "model.py").read_text()
    for old, new in (lines or {}).items():
        assert old in source
        source = source.replace(old, new)
    data = json.loads((folder / "plan.json").read_text())
    change(data)
    data["sha256"]["model.py"] = hashlib.sha256(source.encode()).hexdigest()
    (folder / "model.py").write_text(source)
    (folder / "plan.json").write_text(json.dumps(data))
    return str(folder)


def partly_used(folder: str, synced: bool) -> None:
    """`gain` is used where a mask is given. On rank 1 alone: its gradient is that rank's. On none: a step leaves it."""
    batch = toy.batch_of(4, 6, seed=0)
    mask = (torch.arange(6) < 5).repeat(2, 1).long()
    for is_used in (True, False):
        plain, module = load_plan(folder).build(seed=3, dtype=DOUBLE, device="cpu"), build(folder)
        inputs = dp_part(module, batch) | ({"attention_mask": mask} if is_used and module.mesh.rank == 1 else {})
        for one in (plain, module):
            with module.state.no_sync() if one is module and not synced else nullcontext():
                for _ in range(2):
                    one(**inputs).loss.backward()
            one.reduce_gradients()
        expected, found, before = plain.gather_gradients(), module.gather_gradients(), module.gather_parameters()
        masters = module.state.masters(0)
        module.state.step(torch.optim.AdamW(masters, lr=0.1, weight_decay=0.5))
        after = module.gather_parameters()
        if module.mesh.rank == 0:
            left_alone = set() if is_used else {name for name in expected if name.endswith("gain")}
            assert expected.keys() - found.keys() == left_alone
            assert {name for name in expected if torch.equal(before[name], after[name])} == left_alone
            torch.testing.assert_close(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("synced", [True, False], ids=["each reduced", "reduced at the step"])
@pytest.mark.parametrize("frozen", [(), ("embed",)], ids=["all trained", "embedding frozen"])
def test_parameters_without_gradient_on_one_rank_or_on_all(
    workers: Workers, tmp_path: Path, synced: bool, frozen: tuple[str, ...]
) -> None:
    """Ranks reduce the same tensors whatever autograd reached on each; with a frozen embedding at the very end."""
    folder = toy.write_plan(tmp_path / "plan", microbatches=1, frozen=frozen)
    gain = "        x = (x.unflatten(-1, (-1, 3)) * self.gain).flatten(-2)\n"
    lines = {
        gain: gain.replace("        x", "        if attention_mask is not None:\n            x", 1),
        # Blocks have two inputs that backward reaches.
        "block(hidden_states, attention_mask)": "block(hidden_states, attention_mask, memory)",
        "forward(self, hidden_states, attention_mask):\n        x = hidden_states * self.norm": (
            "forward(self, hidden_states, attention_mask, memory):\n        x = (hidden_states + memory) * self.norm"
        ),
    }
    workers.run(2, f"{HERE}:partly_used", rewrite(folder, lambda data: None, lines), synced)


# -- ties, groups, precision -------------------------------------------------------------------------------------------
def tied_blocks(folder: str) -> None:
    """Blocks 1 and 2 share a gain: they are gathered with the stage, the others by themselves."""
    module, dense = build(folder), dense_of(folder)
    dense.values["blocks.2.gain"] = dense.values["blocks.1.gain"]
    assert [*module.stages["0"].blocks.values()][::3] == module.state.blocks
    batch = toy.batch_of(4, 6, seed=0)
    module(**dp_part(module, batch)).loss.backward()
    dense.loss(**batch).backward()
    module.reduce_gradients()
    del dense.values["blocks.2.gain"]
    check_gradients(module, dense)


def test_blocks_that_share_a_parameter(workers: Workers, tmp_path: Path) -> None:
    def tie(data: dict[str, Any]) -> None:
        del data["parameters"]["blocks.2.gain"]
        data["parameters"]["blocks.1.gain"]["aliases"] = ["blocks.2.gain"]

    folder = toy.write_plan(tmp_path / "plan", microbatches=1)
    workers.run(2, f"{HERE}:tied_blocks", rewrite(folder, tie))


def in_groups(folder: str) -> None:
    """Biases and gains at one rate, matrices at another, blocks.0 left out."""
    plan = load_plan(folder)
    names = [name for name in plan.spec.parameters if not name.startswith("blocks.0")]
    groups = {name: int(len(plan.spec.parameters[name].shape) > 1) for name in names}
    module, dense = build(folder, groups=groups), dense_of(folder)
    assert {name: p.requires_grad for name, p in module.named_parameters()} == {
        name: name in groups for name in plan.spec.parameters
    }
    rates = (0.1, 0.01)
    ours = torch.optim.SGD([{"params": module.state.masters(i), "lr": rate} for i, rate in enumerate(rates)])
    params = [[dense.values[name] for name in names if groups[name] == i] for i in range(2)]
    theirs = torch.optim.SGD([{"params": params[i], "lr": rate} for i, rate in enumerate(rates)])
    for step in range(2):
        batch = toy.batch_of(4, 6, seed=step)
        module(**dp_part(module, batch)).loss.backward()
        dense.loss(**batch).backward()
        module.reduce_gradients()
        check_gradients(module, dense, ("blocks.0",))
        module.state.step(ours)
        theirs.step()
        forget(module, dense)
    found = module.gather_parameters()
    if module.mesh.rank == 0:
        torch.testing.assert_close(found, {name: value.detach() for name, value in dense.values.items()})


def test_parameter_groups_and_parameters_in_none(workers: Workers, tmp_path: Path) -> None:
    workers.run(4, f"{HERE}:in_groups", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def low_precision(folder: str) -> None:
    """bfloat16 as zero3 has it, bit for bit, at a count that bfloat16 rounds; masters keep what it rounds away."""
    trained = {name: 0 for name in load_plan(folder).spec.parameters if not name.startswith("blocks.3")}
    runs = {}
    for placement in ("fsdp", "zero3"):
        module = build(folder, placement, torch.bfloat16, groups=trained)
        before = torch.get_rng_state()
        optimizer = torch.optim.SGD(module.state.masters(0), lr=1e-4)
        seen: list[Tensor] = []
        for step in range(4):
            batch = dp_part(module, toy.batch_of(4, 6, seed=step))
            loss = module(**batch, num_items_in_batch=257).loss
            loss.backward()
            module.reduce_gradients()
            seen += [loss.detach(), *(module.gather_gradients().values() if step == 0 else ())]
            module.state.step(optimizer)
            module.zero_grad()
        with torch.no_grad():
            seen.append(module(**batch).logits)
        assert torch.equal(before, torch.get_rng_state())
        runs[placement] = [*seen, *module.gather_parameters().values()]
        assert {master.dtype for master in module.state.masters(0)} == {torch.float32}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*runs.values(), strict=True))
    ours = build(folder, dtype=torch.bfloat16, groups=trained).state
    assert {name for name, shard in ours.shards.items() if shard.dtype == torch.bfloat16} == (
        ours.shards.keys() - trained.keys()
    )


def test_low_precision_equals_zero3_bit_for_bit(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:low_precision", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def rounds_to(tensors: dict[str, Tensor], dtype: torch.dtype) -> bool:
    return all(torch.equal(tensor, tensor.to(dtype).to(tensor.dtype)) for tensor in tensors.values())


def reduction_dtypes(folder: str) -> None:
    """Gradients are reduced in their own dtype or a given one, and add up in float32 where parameters are bfloat16."""
    batch = toy.batch_of(4, 6, seed=0)
    for options, rounded in (({}, True), ({"communication_dtype": torch.float32}, False)):
        module = build(folder, dtype=torch.bfloat16, **options)
        module(**dp_part(module, batch)).loss.backward()
        assert rounds_to(module.state.gradients.sums, torch.bfloat16) == rounded
    module = build(folder, dtype=torch.float32, communication_dtype=torch.bfloat16)
    module(**dp_part(module, batch)).loss.backward()
    assert rounds_to(module.state.gradients.sums, torch.bfloat16)
    module = build(folder, dtype=torch.bfloat16, master_weights=False)
    masters = module.state.masters(0)
    assert {master.dtype for master in masters} == {torch.bfloat16}
    for _ in range(3):
        module(**dp_part(module, batch)).loss.backward()
    assert {total.dtype for total in module.state.gradients.sums.values()} == {torch.float32}
    module.reduce_gradients()
    before = [master.clone() for master in masters]
    module.state.step(torch.optim.SGD(masters, lr=0.1))
    assert sum(torch.equal(a, b) for a, b in zip(before, masters, strict=True) if a.numel()) == 0


def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:reduction_dtypes", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def views(folder: str) -> None:
    """Blocks that return a view, as OPT's: torch warns of what a plan never does."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, dense = build(folder), dense_of(folder)
        batch = toy.batch_of(4, 6, seed=0)
        module(**dp_part(module, batch)).loss.backward()
        dense.loss(**batch).backward()
        module.reduce_gradients()
        check_gradients(module, dense)


def test_blocks_that_return_views_train_without_a_warning(workers: Workers, tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path / "plan", microbatches=1)
    old = "return hidden_states + self.down(x.cumsum(1) / 4)\n"
    new = "x = hidden_states + self.down(x.cumsum(1) / 4)\n        return x.flatten().view(x.shape)\n"
    workers.run(2, f"{HERE}:views", rewrite(folder, lambda data: None, {old: new}))


# -- what is gathered, and when ----------------------------------------------------------------------------------------
def recomputed(folder: str) -> None:
    """Recomputation runs a block again, gathered, and changes no bit; off, it runs once."""
    module = build(folder)
    batch = dp_part(module, toy.batch_of(6, 6, seed=0))
    ran: Counter[str] = Counter()
    for name, block in module.stages["0"].blocks.items():
        block.gate_up.register_forward_hook(lambda *_, name=name: ran.update([name]))
    runs = []
    for settings in (None, Recompute(layers_per_stage=(3,)), None):
        disable_recompute(module) if settings is None else enable_recompute(module, settings)
        ran.clear()
        loss = module(**batch).loss
        loss.backward()
        module.reduce_gradients()
        runs.append((loss.item(), module.gather_gradients(), [ran[name] for name in "0123"]))
        module.zero_grad()
    (loss, gradients, once), (again_loss, again, twice), (_, _, off) = runs
    assert loss == again_loss
    assert [name for name, gradient in gradients.items() if not torch.equal(gradient, again[name])] == []
    assert (twice, off) == ([2 * count for count in once[:3]] + once[3:], once)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_blocks_recompute_gathered(workers: Workers, tmp_path: Path, microbatches: int) -> None:
    workers.run(2, f"{HERE}:recomputed", str(toy.write_plan(tmp_path / "plan", microbatches=microbatches)))


def gathered(folder: str) -> None:
    """Blocks are freed between forward and backward as asked for; in evaluation too; nothing is left after a step."""
    for reshards in (True, False):
        module = build(folder, reshard_after_forward=reshards)
        first = module.stages["0"].blocks["0"]
        batch = dp_part(module, toy.batch_of(4, 6, seed=0))
        later: list[bool] = []
        module.stages["0"].blocks["2"].register_forward_hook(partial(note_whole, later, first))
        with torch.no_grad():
            module(**batch)
        assert (later, is_whole(first)) == ([not reshards], False)
        loss = module(**batch).loss
        assert is_whole(first) == (not reshards)
        loss.backward()
        assert not is_whole(first)
        module(**batch)
        module.reduce_gradients()
        assert not any(is_whole(part) for part in (first, module.stages["0"].embed))


def is_whole(part: nn.Module) -> bool:
    return all(not isinstance(parameter, DTensor) for parameter in part.parameters())


def note_whole(seen: list[bool], part: nn.Module, *_: Any) -> None:
    seen.append(is_whole(part))


def test_blocks_are_gathered_while_they_are_needed(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, f"{HERE}:gathered", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


# -- what ranks hold ---------------------------------------------------------------------------------------------------
def pieces(folder: str) -> None:
    """Rows by torch.chunk: 101 are 26, 26, 26, 23; 3 are 1, 1, 1, 0. Of one's own it gives the master."""
    state, here = build(folder, groups={"embed.weight": 0, "blocks.1.gain": 0}).state, dist.get_rank()
    found = [state.piece("embed.weight", coord) for coord in range(4)]
    assert [(piece.offset, piece.numel) for piece in found] == [(0, 156), (156, 156), (312, 156), (468, 138)]
    assert [piece.master is None for piece in found] == [coord != here for coord in range(4)]
    own = state.piece("embed.weight")
    assert own == Piece(own.master, 0, 156 * here, found[here].numel)
    whole = SeedWeights(3).shard(state.spec.parameters["embed.weight"], state.mesh.tp, DOUBLE, torch.device("cpu"))
    assert torch.equal(own.master.detach(), whole.view(-1)[own.offset : own.offset + own.numel])
    assert state.piece("blocks.1.gain", 3) is None
    assert state.piece("blocks.0.gain") is None  # frozen


def test_pieces_say_what_each_rank_holds(workers: Workers, tmp_path: Path) -> None:
    workers.run(4, f"{HERE}:pieces", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


def loaded(folder: str) -> None:
    """Other values: modules and masters have them, moments stay."""
    module = build(folder)
    optimizer = torch.optim.AdamW(module.state.masters(0))
    batch = dp_part(module, toy.batch_of(4, 6, seed=0))
    module(**batch).loss.backward()
    module.reduce_gradients()
    module.state.step(optimizer)
    module(**batch)  # leaves something gathered
    moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    module.state.load(SeedWeights(8))
    dense = toy.dense_model(load_plan(folder), seed=8)
    with torch.no_grad():
        expected = dense.loss(**toy.batch_of(4, 6, seed=0))
        torch.testing.assert_close(module(**batch).loss, expected)
    found = module.gather_parameters()
    if module.mesh.rank == 0:
        torch.testing.assert_close(found, {name: value.detach() for name, value in dense.values.items()})
    assert all(map(torch.equal, moments, (entry["exp_avg"] for entry in optimizer.state.values())))


def test_other_weights_are_loaded(workers: Workers, tmp_path: Path) -> None:
    workers.run(4, f"{HERE}:loaded", str(toy.write_plan(tmp_path / "plan", microbatches=1)))


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "sizes"),
    [({"tp": 2}, "tp=2, pp=1, 1 stage"), ({"pp": 2}, "tp=1, pp=2, 2 stage"), ({"stages": 2}, "tp=1, pp=1, 2 stage")],
    ids=str,
)
def test_plans_that_are_split_otherwise_are_refused_before_ranks_meet(
    tmp_path: Path, plan: dict[str, int], sizes: str
) -> None:
    if "stages" in plan:
        plan = plan | {"ranks": toy.interleaved(1, 4, 2)}
    with pytest.raises(ShardcError, match=rf"toy is compiled for {sizes}.*\n.*HybridParallelPlugin\(zero_stage=3\)"):
        build(str(toy.write_plan(tmp_path / "plan", **plan)))


def test_a_parameter_without_dims_is_refused_by_name(tmp_path: Path) -> None:
    spec = load_plan(toy.write_plan(tmp_path / "plan")).spec
    scalar = replace(spec.parameters["blocks.1.gain"], shape=())
    with pytest.raises(ShardcError, match=r"blocks.1.gain has no dim that could be split"):
        check_layout(replace(spec, parameters={**spec.parameters, "blocks.1.gain": scalar}))


def test_an_unknown_placement_is_told_of_this_one(tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match="placement 'fsdp2' is unknown; valid: ddp, zero1, zero2, zero3, fsdp"):
        build(str(toy.write_plan(tmp_path / "plan")), "fsdp2")
