"""LoRA by peft: loss and every adapter's gradient are those of the PeftModel in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from shardc.booster.lora import save_adapter
from shardc.errors import ShardcError
from shardc.models import ModelSource, reduced_config, resolve
from shardc.models.hf import causal_lm_class
from shardc.models.live import source_from_module
from shardc.models.source import build_from_config
from shardc.plan.check import check_folder
from shardc.plan.folder import read_folder
from shardc.plan.verification import RELATIVE, compare_gradients, reference_step, relative_error
from shardc.policy import load_policy
from tests.end_to_end.exact import Layout, check, compile_layout, prepare
from tests.end_to_end.masks import Inject
from tests.end_to_end.test_dropout import masks_of_one_process, run
from tests.workers import Workers

QV, ALL = ["q_proj", "v_proj"], "all-linear"
TP2, PP2, TP2_PP2, SP = Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, sp=True)
LAYERS = "base_model.model.model.layers"


def adapted(preset: str, layout: Layout, targets: list[str] | str, **options: Any) -> ModelSource:
    """A preset made small, with adapters, as a user's script builds it."""
    config = copy.deepcopy(reduced_config(resolve(preset).config, layout.pp, layout.tp))
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **options)
    with torch.device("meta"):
        model = build_from_config(causal_lm_class(config), config)
        return source_from_module(peft.get_peft_model(model, lora), preset)


CASES = [
    ("Qwen3-4B", TP2, ALL, {}),
    ("Qwen3-4B", PP2, QV, {}),
    ("Llama-3.1-8B", TP2, QV, {}),
    ("Llama-3.1-8B", TP2_PP2, ALL, {}),
    # Sequence parallelism, where one collective gathers a column's input for its adapter too; shared KV heads
    ("Qwen3-4B", Layout(tp=2, pp=2, sp=True), ALL, {}),
    ("Llama-3.1-8B", Layout(tp=4), ALL, {}),
    ("Qwen3-4B", Layout(tp=2, dp=2), ALL, {"use_rslora": True}),
    # Fused weights, whose segments B has too; Conv1D; biases that are trained beside frozen weights
    ("Phi-3-mini-4k-instruct", TP2, ALL, {}),
    ("pythia-70m", TP2, ALL, {}),
    ("gpt2", TP2, ["c_attn", "c_proj"], {"fan_in_fan_out": True, "bias": "lora_only"}),
    ("gpt2", Layout(tp=2, pp=2, sp=True), ALL, {"fan_in_fan_out": True, "bias": "all", "lora_bias": True}),
    # A vocabulary that is split; a tied one is both
    ("Llama-3.1-8B", TP2_PP2, ["embed_tokens", "lm_head", "q_proj"], {}),
    ("Qwen3-4B", TP2, ["lm_head", "o_proj"], {}),
    # Stages on which nothing is trained, before and after those that are
    ("Qwen3-4B", TP2_PP2, ["down_proj"], {"layers_to_transform": [2]}),
    ("Qwen3-4B", TP2_PP2, ["down_proj"], {"layers_to_transform": [0]}),
]
GRID = [
    (preset, layout, targets, {})
    for preset in ("Qwen3-4B", "Llama-3.1-8B")
    for layout in (TP2, PP2, TP2_PP2)
    for targets in (QV, ALL)
    if (preset, layout, targets, {}) not in CASES
]


def _id(preset: str, layout: Layout, targets: list[str] | str, options: dict[str, Any]) -> str:
    words = [*([targets] if isinstance(targets, str) else targets), *(f"{key} {x}" for key, x in options.items())]
    return f"{preset} on {layout}: {' '.join(words)}"


@pytest.mark.parametrize(("preset", "layout", "targets", "options"), CASES, ids=[_id(*case) for case in CASES])
def test_adapters_are_exact(
    preset: str, layout: Layout, targets: list[str] | str, options: dict[str, Any], workers: Workers, tmp_path: Path
) -> None:
    check_adapters(preset, layout, targets, options, workers, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize(("preset", "layout", "targets", "options"), GRID, ids=[_id(*case) for case in GRID])
def test_adapters_are_exact_grid(
    preset: str, layout: Layout, targets: list[str] | str, options: dict[str, Any], workers: Workers, tmp_path: Path
) -> None:
    check_adapters(preset, layout, targets, options, workers, tmp_path)


def check_adapters(
    preset: str, layout: Layout, targets: list[str] | str, options: dict[str, Any], workers: Workers, tmp_path: Path
) -> None:
    source = adapted(preset, layout, targets, **options)
    trial = check(workers, tmp_path, source, layout, padding="none" if preset == "pythia-70m" else "left")
    found = load_file(tmp_path / "gradients_0.safetensors")
    assert set(found) == {name for name, p in trial.model.named_parameters() if p.requires_grad}
    assert not check_folder(tmp_path / "plan").findings


def test_the_plan_says_what_is_frozen_and_adds_no_collective_to_a_column(tmp_path: Path) -> None:
    trial = prepare(adapted("Qwen3-4B", TP2, ALL), tmp_path, TP2)
    folder = read_folder(tmp_path / "plan")
    parameters = folder.data["parameters"]
    assert set(parameters) == {name for name, _ in trial.model.named_parameters()}
    assert all(entry["requires_grad"] == ("lora_" in name) for name, entry in parameters.items())
    layer = {name.removeprefix(f"{LAYERS}.1."): x for name, x in parameters.items() if name.startswith(f"{LAYERS}.1.")}
    a, b = (layer[f"self_attn.q_proj.lora_{part}.default.weight"] for part in "AB")
    assert (a["shard"], a["grad_reduce"]) == (None, ["tp"])
    assert (b["shard"], b["grad_reduce"]) == (layer["self_attn.q_proj.base_layer.weight"]["shard"], [])
    a, b = (layer[f"mlp.down_proj.lora_{part}.default.weight"] for part in "AB")
    assert (a["shard"]["dim"], a["grad_reduce"], b["shard"], b["grad_reduce"]) == (1, [], None, [])
    # q, k and v share the one copy_to, gate and up theirs; o and down reduce r features beside their own sum.
    lines = folder.text.splitlines()
    assert sum("copy_to(" in line for line in lines) == 3  # with the head's
    added = [line for line in lines if "self.lora_B.default(" in line]
    assert [line.count("all_reduce(self.lora_A.default(") for line in added] == [0, 0, 1, 0, 1], (
        "q, k and v, o, up, down"
    )
    assert sum(line.startswith("class Qwen3DecoderLayer") for line in lines) == 1, "behind frozen embeddings too"


REPLICATED = """\
rules:
  "*.embed_tokens": vocab
  "*.self_attn.{q,k,v}_proj": column
  "*.self_attn.o_proj": row
  "*.mlp.{gate,up,down}_proj": replicate
  "lm_head": vocab
pipeline: {blocks: "model.layers.*"}
"""


@pytest.mark.parametrize("layout", [TP2_PP2, SP], ids=str)
def test_a_users_policy_names_the_modules_of_the_model_without_adapters(
    layout: Layout, workers: Workers, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(REPLICATED)
    policy = load_policy(tmp_path / "mine.yaml")
    check(workers, tmp_path, adapted("Llama-3.1-8B", layout, ALL), layout, policy=policy)


@pytest.mark.parametrize("layout", [TP2, SP, TP2_PP2], ids=str)
def test_dropout_before_adapters_gives_exact_gradients(layout: Layout, workers: Workers, tmp_path: Path) -> None:
    """The input of a column is whole and drops alike on all ranks, that of a row is a shard and drops by itself."""
    trial = prepare(adapted("Qwen3-4B", layout, ["q_proj", "o_proj", "down_proj"], lora_dropout=0.1), tmp_path, layout)
    trial.write_batches([trial.batch(8)])
    found = run(workers, trial)
    masks = masks_of_one_process(trial, found.masks)

    with Inject(masks):
        batch = load_file(trial.folder / "batch_0.safetensors")
        loss, gradients = reference_step(copy.deepcopy(trial.model).train(), batch)
    assert relative_error(found.loss, loss) <= RELATIVE
    worst = compare_gradients(found.gradients, gradients)[0]
    assert worst.ratio <= 1, worst
    drawn, whole = ({mask.shape[-1] for mask in some} for some in (found.masks[0], masks))
    assert len(drawn & whole) == 1 and len(drawn - whole) == 2, "q_proj drops the whole, o_proj and down_proj a shard"


def test_a_saved_adapter_is_read_by_peft(workers: Workers, tmp_path: Path) -> None:
    """What the ranks hold, gathered, gives the logits of the model that it was taken from."""
    trial = prepare(adapted("Qwen3-4B", TP2_PP2, ALL), tmp_path, TP2_PP2)
    workers.run(4, "tests.end_to_end.ranks:save", tmp_path)
    config = trial.model.peft_config["default"]
    save_adapter(tmp_path / "adapter", load_file(tmp_path / "saved" / "model.safetensors"), config)
    base = copy.deepcopy(trial.model).unload()
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = trial.batch(2)["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, trial.model(input_ids=ids).logits)


def test_a_size_that_does_not_divide_is_refused_as_without_adapters() -> None:

    with pytest.raises(ShardcError) as caught:
        compile_layout(adapted("Qwen3-4B", Layout(), QV), Layout(tp=3))
    assert caught.value.problem == (
        f"{LAYERS}.0.self_attn.q_proj.base_layer: tp=3 does not divide 8 query heads; valid: 1, 2, 4, 8 "
        "(above 2, the 2 KV heads are replicated)"
    )
