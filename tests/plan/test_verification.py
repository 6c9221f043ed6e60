"""`verify` says exact where loss and gradients are, and names what is not."""

import hashlib
import json
import math
import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.models import reduced_config, resolve, source_from_config
from shardc.plan import Refuted, check_folder, verify
from shardc.plan.small import small_config
from shardc.plan.verification import compare_gradients, make_batch, perturbed_model, reference_step
from tests.plan.conftest import SMALL


def test_a_gradient_is_held_to_its_own_size_or_to_the_models_largest() -> None:
    reference = {"large": torch.tensor([100.0]), "small": torch.tensor([0.001]), "lost": torch.tensor([1.0])}
    found = {"large": torch.tensor([100.0005]), "small": torch.tensor([0.0011]), "extra": torch.tensor([1.0])}
    rows = {row.name: row for row in compare_gradients(found, reference)}
    assert rows["large"].bound == pytest.approx(1e-3)
    assert rows["large"].ratio == pytest.approx(0.5, rel=0.05)
    assert rows["small"].bound == pytest.approx(1e-6)
    assert rows["small"].ratio == pytest.approx(100, rel=0.01)
    assert rows["lost"].ratio == math.inf
    assert rows["extra"].ratio == math.inf


def test_the_worst_parameter_comes_first_and_a_nan_is_the_worst() -> None:
    reference = {name: torch.ones(2) for name in "abc"}
    found = {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan]), "c": torch.ones(2) * 1.1}
    assert [row.name for row in compare_gradients(found, reference)] == ["b", "c", "a"]


@pytest.mark.parametrize("name", ["opt-125m", "Qwen2.5-0.5B"])
def test_rounding_of_the_reference_stays_far_below_every_bound(name: str) -> None:
    """Also of a gradient that is 0, the one of OPT's key bias: no error of a plan is excused by rounding."""
    source = source_from_config(reduced_config(resolve(name).config, pp=2, tp=2), name)
    model = perturbed_model(source)
    batch = make_batch(model, rows=9, vocabulary=101, padding="none")
    _, exact = reference_step(perturbed_model(source).double(), batch)
    rows = compare_gradients(reference_step(model, batch)[1], exact)
    assert rows[0].ratio < 1 / 3, rows[0]


def test_a_plan_folder_is_exact_on_its_own_layout(written: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    result = verify(written, padding="left", keep=tmp_path / "ran", progress=seen.append)
    assert result.ok, result.to_dict()
    assert result.settings["tp"] == result.settings["pp"] == 2
    assert result.settings["padding"] == "left"
    assert result.grad_norm == pytest.approx(result.grad_norm_ref, rel=1e-5)
    assert result.config["num_hidden_layers"] == 3
    data = result.to_dict()
    assert {"ok", "loss", "loss_ref", "max_grad_error", "worst_param", "config"} <= {*data}
    assert data["max_grad_error"] <= 1e-5
    assert (data["ran"], data["edited_lines"]) == (f"{written}/model.py with the sizes of the config below", [])
    assert seen[-1] == "4 ranks"
    texts = [(folder / "model.py").read_text() for folder in (written, tmp_path / "ran")]
    assert texts[0] != texts[1]
    assert _without_sizes(texts[0]) == _without_sizes(texts[1])
    assert (tmp_path / "ran" / "schedule.json").read_bytes() == (written / "schedule.json").read_bytes()


def _without_sizes(text: str) -> str:
    return re.sub(r"\b\d[\d.e-]*", "0", text)


# -- what runs is the folder's own model.py ----------------------------------------------------------------------------
VIEW = "return residual + hidden_states.view(*hidden_states.shape[:-1], 32)\n"  # 32: the hidden size, which gets small
HARMLESS = (
    ("variance", "mean_square"),
    ("        cos = emb.cos()\n        sin = emb.sin()\n", "        sin = emb.sin()\n        cos = emb.cos()\n"),
    ("return residual + hidden_states\n", VIEW),
)


def _edit(folder: Path, *edits: tuple[str, str]) -> list[int]:
    """The lines that are new."""
    path = folder / "model.py"
    before = text = path.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return [i for i, line in enumerate(text.splitlines(), 1) if line not in before.splitlines()]


def _change(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "plan.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_harmless_edit_is_what_the_ranks_run(folder: Path, tmp_path: Path) -> None:
    new = _edit(folder, *HARMLESS)
    result = verify(folder, keep=tmp_path / "ran")
    assert result.ok, result.to_dict()
    assert {*new} <= {*result.edited}
    assert result.ran.startswith(f"{folder}/model.py with the sizes of the config below, edited by hand in lines ")
    assert result.ran.endswith(", which was proved again")
    ran = (tmp_path / "ran" / "model.py").read_text()
    assert HARMLESS[1][1] in ran
    assert VIEW.replace("32", str(result.config["hidden_size"])) in ran
    assert "mean_square" in ran
    assert "variance" not in ran


DOUBLED = ("return residual + hidden_states\n", "return residual + hidden_states + hidden_states\n")


def _double(data: dict) -> None:
    """Adds the result of each block's MLP twice, in the graphs."""
    for graph in data["graphs"]["variants"].values():
        (out,) = [node for node in graph["nodes"] if node["name"] in _block_results(graph)]
        again = out | {"name": "again", "args": [f"%{out['name']}", out["args"][1]]}
        for node in graph["nodes"]:
            if node.get("target", "").endswith("block_output"):
                node["args"] = ["%again" if x == f"%{out['name']}" else x for x in node["args"]]
        graph["nodes"].insert(graph["nodes"].index(out) + 1, again)


def _block_results(graph: dict) -> set[str]:
    ends = [node for node in graph["nodes"] if node.get("target", "").endswith("block_output")]
    return {x.removeprefix("%") for node in ends for x in node["args"]}


@pytest.mark.parametrize("hash_too", [False, True], ids=["hash as it was", "hash changed too"])
def test_a_plan_whose_source_and_graphs_double_a_term_alike_is_refuted(folder: Path, hash_too: bool) -> None:
    line = max(_edit(folder, DOUBLED))
    _change(folder, _double)
    if hash_too:
        _change(folder, lambda data: data["sha256"].update({"model.py": _hash(folder / "model.py")}))
    assert check_folder(folder).findings == []
    with pytest.raises(Refuted) as error:
        verify(folder)
    assert error.value.problem.startswith(f"refuted: model.py: model.layers.0 (model.py:{line}): add is not what")
    assert error.value.advice == "model.py and plan.json agree with each other and not with the model: compile again"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_plan_of_another_version_runs_and_is_named(folder: Path, tmp_path: Path) -> None:
    (line,) = _edit(folder, ("return residual + hidden_states\n", "return hidden_states.add(residual)\n"))

    def as_written(data: dict) -> None:
        data["sha256"]["model.py"] = _hash(folder / "model.py")
        data["versions"] = {"shardc": "0.0.1", "torch": "2.12.0", "transformers": "5.1.0"}

    _change(folder, as_written)
    with pytest.raises(Refuted, match="add is not what the plan computes"):
        verify(folder)
    _edit(folder, ("return hidden_states.add(residual)\n", "return residual.add(hidden_states)\n"))
    _change(folder, as_written)
    result = verify(folder, keep=tmp_path / "ran")
    assert result.ok
    assert result.ran == (
        f"{folder}/model.py with the sizes of the config below, as it was written by shardc 0.0.1, torch 2.12.0, "
        f"transformers 5.1.0, other than now in line {line}, which was proved again"
    )
    assert "return residual.add(hidden_states)" in (tmp_path / "ran" / "model.py").read_text()


def test_an_edit_that_is_right_at_its_own_sizes_only_is_refused_with_its_line(folder: Path) -> None:
    (line,) = _edit(folder, (HARMLESS[2][0], VIEW.replace("32", "31 + 1")))
    assert check_folder(folder).findings == []
    with pytest.raises(ShardcError) as error:
        verify(folder)
    assert error.value.problem.startswith(
        "the edit of model.py is proved at its own sizes and has no counterpart at the small ones: "
        f"model.py:{line}: Qwen3ForCausalLMStage0 fails on a masked batch: shape "
    )
    assert error.value.advice == "undo it to run the plan small, or write sizes as those of a tensor, x.shape[-1]"


def test_a_table_of_plan_json_that_is_not_the_models_is_refused(folder: Path) -> None:
    _change(folder, lambda data: data.update(guards=[]))
    with pytest.raises(ShardcError) as error:
        verify(folder)
    assert error.value.problem == (
        f'{folder}/plan.json: guards is [], and [{{"drop_when": "all", "input": "attention_mask"}}, {{"inpu ... '
        "for the model as it is now"
    )


def _twice(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(mlp).forward(mlp, x)


def _patched() -> nn.Module:
    """Has the modules of its config, and computes something else."""
    fields = {name: size for name, size in SMALL.items() if name != "num_hidden_layers"}
    model = resolve("Qwen3-4B", fields | {"num_hidden_layers": 4}).make()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(_twice, layer.mlp)
    return model


def test_what_a_function_did_to_a_model_of_transformers_is_not_lost_by_making_it_small() -> None:
    result = verify(_patched)
    assert result.ok
    assert result.ran == "the plan that `shardc compile` makes of _patched at its own sizes"
    assert result.config["num_hidden_layers"] == 4


SMALL_CONFIGS = [
    ("Qwen3-4B", 2, [20], 36, 4, [2]),
    ("gemma-2-2b", 2, [11, 22], 26, 14, [5, 10]),  # two kinds of layers in turn
    ("gemma-3-1b", 1, [18], 26, 20, [12]),  # every sixth is another
    ("gpt2", 1, [5, 11], 12, 5, [2, 4]),
]


@pytest.mark.parametrize(
    ("name", "tp", "cuts", "num_blocks", "layers", "small_cuts"), SMALL_CONFIGS, ids=lambda x: str(x)
)
def test_a_small_config_keeps_each_stage_in_its_place_of_the_pattern(
    name: str, tp: int, cuts: list[int], num_blocks: int, layers: int, small_cuts: list[int]
) -> None:
    config = resolve(name).config
    small, found = small_config(config, tp, cuts, num_blocks)
    assert (small.num_hidden_layers, found) == (layers, small_cuts)
    assert small.vocab_size % tp == config.vocab_size % tp == 0
    kinds = getattr(config, "layer_types", None)
    if kinds and len({*kinds}) > 1:
        for start, small_start in zip([0, *cuts], [0, *small_cuts], strict=True):
            assert small.layer_types[small_start:][:4] == kinds[start:][:4]


def test_a_plan_that_does_not_add_up_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    import shardc.plan.compile as passes

    emit = passes.emit

    def wrong(*args: object, **kwargs: object) -> str:
        return emit(*args, **kwargs).replace(
            "return residual + hidden_states", "return residual + 1.01 * hidden_states"
        )

    monkeypatch.setattr(passes, "emit", wrong)
    result = verify("Qwen3-4B", tp=2)
    assert not result.ok
    assert result.to_dict()["ok"] is False
    assert result.worst.ratio > 1


REFUSED = [
    ({"padding": "both"}, "--padding both: unknown; valid: none, left, right"),
    ({"dp": 0}, "--dp 0: not a positive number"),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_option_is_refused(options: dict, problem: str) -> None:
    with pytest.raises(ShardcError) as error:
        verify("Qwen3-4B", **options)
    assert error.value.problem == problem
