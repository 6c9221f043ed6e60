"""Plan folders: what is refused, edited source, weights from a folder or a seed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardc.runtime import MeshAxis, ShardcError, load_plan
from shardc.runtime.schedule import Action, Schedule
from shardc.runtime.spec import ParameterSpec
from shardc.runtime.weights import FolderWeights
from tests.runtime import toy
from tests.workers import Workers

HERE = "tests.runtime.test_plan"


def edit(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return apply


REFUSED = [
    ("a folder without plan.json", lambda f: (f / "plan.json").unlink(), "is no plan folder: it has no plan.json"),
    ("a folder without source", lambda f: (f / "model.py").unlink(), "is no plan folder: it has no model.py"),
    ("broken JSON", lambda f: (f / "plan.json").write_text("{"), "plan.json is not JSON"),
    ("another format", edit("plan.json", lambda d: d.update(format=2)), "format 2, this version reads 1"),
    ("a missing field", edit("plan.json", lambda d: d.pop("ties")), "plan.json: field 'ties' is missing"),
    ("no dtype", edit("plan.json", lambda d: d.update(dtype="float")), None),
    ("an unknown dtype", edit("plan.json", lambda d: d.update(dtype="Tensor")), "'Tensor' is not a torch dtype"),
    ("an unknown guard", edit("plan.json", lambda d: d["guards"][0].update(drop_when="any")), "unknown guard .*'any'"),
    ("another pp", edit("plan.json", lambda d: d["mesh"].update(pp=2)), "json is for pp=1, plan.json for pp=2"),
    ("split backward", edit("schedule.json", lambda d: d.update(ranks=[["0F0", "0I0"]])), "cannot run action '0I0'"),
    ("a stage nowhere", edit("schedule.json", lambda d: d.update(stages=2)), r"no pp coord runs stages \[1\]"),
    (
        "a stage on two coords",
        edit("schedule.json", lambda d: d.update(ranks=[["0F0"], ["0F1"]])),
        "stage 0 is on pp coords 0 and 1",
    ),
    ("a changed config", lambda f: (f / "config.json").write_text("{}"), "config.json was changed after the plan"),
    ("an edited source", lambda f: (f / "model.py").open("a").write("#"), "model.py was edited after it was proved"),
]


@pytest.mark.parametrize(("name", "damage", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_damaged_plan_is_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str | None
) -> None:
    folder = toy.write_plan(tmp_path)
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    edit("plan.json", lambda d: d["sha256"].update({"config.json": digest}))(folder)
    damage(folder)
    if message is None:  # torch.float is a dtype by another name
        load_plan(folder)
        return
    with pytest.raises(ShardcError, match=message):
        load_plan(folder)


def test_edited_source_is_proved_again_by_the_hook(tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path)
    (folder / "model.py").open("a").write("EDITED = True\n")
    calls = []
    plan = load_plan(folder, prove=lambda path, data: calls.append((path, data["model"]["name"])))
    assert calls == [(folder, "toy")]
    assert plan.source.EDITED


def test_loading_imports_neither_transformers_nor_the_compiler(tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path)
    code = (
        f"import sys; from shardc.runtime import load_plan; load_plan({str(folder)!r}).build(seed=0, device='cpu');"
        "print([m for m in sys.modules if m.startswith(('transformers', 'shardc.')) and 'runtime' not in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_build_needs_weights_or_a_seed(tmp_path: Path) -> None:
    plan = load_plan(toy.write_plan(tmp_path))
    for arguments in ({}, {"weights": "x", "seed": 1}):
        with pytest.raises(ShardcError, match="needs weights or seed"):
            plan.build(**arguments)


def test_plan_for_more_ranks_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match=r"tp=2 \* pp=1 = 2 does not divide the 1 process\(es\)"):
        load_plan(toy.write_plan(tmp_path, tp=2)).build(seed=0)


def test_source_with_other_parameters_or_shapes_is_refused(tmp_path: Path) -> None:
    edits = [
        (lambda d: d["parameters"].pop("blocks.0.gain"), r"has parameters that plan.json lacks: \['blocks.0.gain'\]"),
        (lambda d: d["parameters"].update(x=d["parameters"]["blocks.0.gain"]), r"it lacks: \['x'\]"),
        (lambda d: d["parameters"]["blocks.0.gain"].update(shape=[4]), r"gain is \[3\] here, plan.json says \[4\]"),
    ]
    for change, message in edits:
        folder = toy.write_plan(tmp_path)
        edit("plan.json", change)(folder)
        with pytest.raises(ShardcError, match=message):
            load_plan(folder).build(seed=0, device="cpu")


def test_seed_follows_init_and_is_the_same_under_every_layout(tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path)
    constant = {"kind": "constant", "value": 0.5}
    edit("plan.json", lambda d: d["parameters"]["blocks.0.gain"].update(init=constant))(folder)
    edit("plan.json", lambda d: d["parameters"]["blocks.1.gain"].update(init=None))(folder)
    values = load_plan(folder).build(seed=0, device="cpu").gather_parameters()
    assert values["blocks.0.gain"].tolist() == [0.5] * 3
    assert values["blocks.1.gain"].abs().max() < 0.1
    weight = values["blocks.2.gate_up.weight"]
    assert abs(weight.mean() - 0.1) < 0.2
    assert abs(weight.std() - 0.7) < 0.2
    other = load_plan(folder).build(seed=1, device="cpu").gather_parameters()
    assert not torch.equal(other["blocks.2.gate_up.weight"], weight)


def full_values(folder: str, weights: str | None) -> dict:
    plan = load_plan(folder)
    source = {"seed": 5} if weights is None else {"weights": weights}
    return plan.build(**source, device="cpu").gather_parameters()


def save(folder: str, weights: str | None, target: str, max_shard_bytes: int) -> None:
    source = {"seed": 5} if weights is None else {"weights": weights}
    load_plan(folder).build(**source, device="cpu").save_pretrained(target, max_shard_bytes=max_shard_bytes)


def test_values_survive_layouts_and_folders(workers: Workers, tmp_path: Path) -> None:
    """Seed at tp 2 x pp 2, saved in several files, read at tp 4, saved in one, read by one process."""
    wide = str(toy.write_plan(tmp_path / "wide", tp=2, pp=2))
    deep = str(toy.write_plan(tmp_path / "deep", tp=4, sub_axes={"kv": 2, "replica": 2}))
    one = toy.write_plan(tmp_path / "one")
    expected = load_plan(one).build(seed=5, device="cpu").gather_parameters()
    workers.run(4, f"{HERE}:save", wide, None, str(tmp_path / "several"), 1000)
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    workers.run(4, f"{HERE}:save", deep, str(tmp_path / "several"), str(tmp_path / "single"), 10**9)
    assert sorted(path.name for path in (tmp_path / "single").iterdir()) == ["config.json", "model.safetensors"]
    found = load_plan(one).build(weights=tmp_path / "single", device="cpu").gather_parameters()
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    plan = load_plan(toy.write_plan(tmp_path / "plan"))
    plan.build(seed=0, device="cpu").save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    del tensors["blocks.0.norm"]
    tensors["blocks.1.norm"] = torch.zeros(7)
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(ShardcError, match=r"blocks.0.norm is missing; blocks.1.norm is \[7\], the plan has \[6\]"):
        plan.build(weights=tmp_path / "saved", device="cpu")
    with pytest.raises(ShardcError, match=r"no model.safetensors and no model.safetensors.index.json"):
        plan.build(weights=tmp_path, device="cpu")


@pytest.mark.parametrize("held", ["a.embed.weight", "head.weight", "embed.weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path, held: str) -> None:
    """A checkpoint may hold either name, or leave out the prefix of the base model."""
    save_file({held: torch.ones(4, 2)}, tmp_path / "model.safetensors")
    spec = ParameterSpec("a.embed.weight", (4, 2), (0,), ("head.weight",), True, None, (), None)
    weights = FolderWeights(tmp_path)
    weights.check([spec])
    value = weights.shard(spec, MeshAxis.abstract("tp", 2), torch.bfloat16, torch.device("cpu"))
    assert value.dtype == torch.bfloat16
    assert value.eq(1).all()


WITH_BUFFER = """
class OnlyWithBuffer(Only):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("inv_freq", torch.empty(3), persistent=False)


Only = OnlyWithBuffer
"""


def test_constants_and_buffers_are_read(tmp_path: Path) -> None:
    folder = toy.write_plan(tmp_path)
    (folder / "model.py").open("a").write(WITH_BUFFER)
    plan = load_plan(folder, prove=lambda path, data: None)
    with pytest.raises(ShardcError, match=r"buffer inv_freq is neither in constants.safetensors"):
        plan.build(seed=0, device="cpu")
    save_file({"inv_freq": torch.arange(3.0)}, folder / "constants.safetensors")
    module = plan.build(seed=0, device="cpu", dtype=torch.bfloat16)
    buffers = dict(module.named_buffers())
    assert buffers["inv_freq"].tolist() == [0, 1, 2]
    assert buffers["inv_freq"].dtype == torch.float32
    assert module.state_dict().keys() == {
        f"stages.0.{name}" for name, _ in module.named_parameters(remove_duplicate=False)
    }


def test_schedule_drops_absent_microbatches_and_names_its_links() -> None:
    schedule = Schedule.parse({"name": "1f1b", "stages": 2, "microbatches": 3, "ranks": toy.one_f_one_b(2, 3)})

    def texts(**options) -> str:
        return " ".join(map(str, schedule.actions(0, **options)))

    assert texts(num_microbatches=2, backward=True) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert texts(num_microbatches=1, backward=False) == "0F0 0SEND_F0"
    assert schedule.links() == [(0, 1), (1, 0)]
    ranks = toy.interleaved(3, 1, 2)
    ring = Schedule.parse({"name": "interleaved", "stages": 6, "microbatches": 1, "ranks": ranks})
    assert ring.links() == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert str(Action.parse("10RECV_B12")) == "10RECV_B12"
