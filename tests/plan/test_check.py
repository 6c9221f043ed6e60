"""A plan as it was written is proved; each seeded mistake is refuted, with its place."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardc.errors import ShardcError
from shardc.plan import Refuted, check_folder, compile_plan, load_plan, write_plan
from tests.plan.conftest import SMALL


def _edit(folder: Path, change: Callable[[dict], None]) -> None:
    data = json.loads((folder / "plan.json").read_text())
    change(data)
    (folder / "plan.json").write_text(json.dumps(data))


def _edit_text(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


def test_a_written_plan_is_proved(written: Path) -> None:
    certificate = check_folder(written)
    assert certificate.findings == []
    assert certificate.proved
    assert {"layouts", "gradients", "stages", "ties", "schedule", "source"} <= {*certificate.obligations}
    assert all(count > 0 for count in certificate.obligations.values())


def test_what_is_judged_is_the_text_not_bytecode_of_the_same_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python tells bytecode from its file by second and size: an edit may share both. None is left beside the file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    names = sorted(path.name for path in folder.iterdir())
    assert check_folder(folder).proved
    path = folder / "model.py"
    before = path.stat()
    _edit_text(folder, "model.py", "return residual + hidden_states", "return residual - hidden_states")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert [finding.obligation for finding in check_folder(folder).findings] == ["source"]
    with pytest.raises(Refuted):
        load_plan(folder)
    assert sorted(path.name for path in folder.iterdir()) == names


def _forget_norm(data: dict) -> None:
    for i in range(3):
        data["parameters"][f"model.layers.{i}.self_attn.q_norm.weight"]["grad_reduce"] = []


def _leave_partial_sum(data: dict) -> None:
    """Takes the first all-reduce out of each graph: its operand is used as it is."""
    for graph in data["graphs"]["variants"].values():
        nodes = graph["nodes"]
        reduced = next(node for node in nodes if node.get("target", "").endswith(".all_reduce"))
        nodes.remove(reduced)
        text = json.dumps(nodes).replace(f'"%{reduced["name"]}"', f'"{reduced["args"][0]}"')
        graph["nodes"] = json.loads(text)
        for call in graph["calls"]:
            call["arguments"].pop(reduced["name"], None)


def _send_nothing(data: dict) -> None:
    data["stages"][0]["sends"] = []


def _receive_nothing(data: dict) -> None:
    data["stages"][1]["receives"] = []


def _receive_another_shape(data: dict) -> None:
    data["stages"][1]["receives"][0]["shape"][2] = 31


def _sum_no_tie(data: dict) -> None:
    data["ties"] = []


def _move_parameter(data: dict) -> None:
    data["parameters"]["model.norm.weight"]["stages"] = [0]


def _take_no_mask(data: dict) -> None:
    data["stages"][1]["batch"] = ["labels"]


MISTAKES = [
    (_forget_norm, "gradients|layouts", "q_norm"),
    (_leave_partial_sum, "layouts", "partial sum|is P"),
    (_send_nothing, "stages", "stage 0: sends nothing, but its graph says hidden_states"),
    (_receive_nothing, "stages", "stage 1: receives nothing, but its graph says hidden_states"),
    (_receive_another_shape, "stages", "stage 1: receives hidden_states"),
    (_sum_no_tie, "ties", "model.embed_tokens.weight: is read by stages"),
    (_move_parameter, "ties", "model.norm.weight: is said to be on stages"),
    (_take_no_mask, "stages", "stage 1: takes"),
]


@pytest.mark.parametrize(("change", "obligation", "text"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_in_plan_json_is_refuted(
    folder: Path, change: Callable[[dict], None], obligation: str, text: str
) -> None:
    _edit(folder, change)
    findings = check_folder(folder).findings
    assert findings
    assert any(f.obligation in obligation.split("|") for f in findings)
    assert any(part in str(f) for part in text.split("|") for f in findings), [str(f) for f in findings]


DOWN = "down_proj = self.down_proj("
SOURCES = [
    (DOWN, DOWN.replace("self", "(1 + self.tp.coord) * self"), "asks for `coord` of the mesh axis"),
    (DOWN, DOWN.replace("self", "(1 if self.tp.group is None else 2) * self"), "asks for `group`"),
    ("self.tp = tp\n", "self.tp = tp.at(0)\n", "asks for `at`"),
    ("return all_reduce(down_proj, self.tp)", "return 2 * all_reduce(down_proj, self.tp)", "mlp (model.py:"),
    ("(shift_labels != -100).sum()", "(shift_labels != -101).sum()", "count_targets gives"),
    ("return residual + hidden_states", "return no_such_name", "no_such_name"),
]


@pytest.mark.parametrize(("old", "new", "text"), SOURCES, ids=lambda x: x)
def test_a_wrong_edit_of_the_source_is_refuted_and_not_loaded(folder: Path, old: str, new: str, text: str) -> None:
    _edit_text(folder, "model.py", old, new)
    findings = check_folder(folder).findings
    assert [f.obligation for f in findings] == ["source"]
    assert text in str(findings[0])
    with pytest.raises(Refuted, match="refuted: "):
        load_plan(folder)


def test_ranks_that_hold_unequal_parts_are_each_proved(tmp_path: Path) -> None:
    """A vocabulary of 97 over 2 ranks: the edit computes otherwise on the last rank alone."""
    folder = write_plan(compile_plan("Qwen3-4B", tp=2, overrides=SMALL | {"vocab_size": 97}), tmp_path / "plan")
    assert check_folder(folder).findings == []
    _edit_text(folder, "model.py", "return loss, logits", "return loss * (50 - self.tp.shard_size(97)), logits")
    (finding,) = check_folder(folder).findings
    assert "mul is not what the plan computes" in finding.what


def test_a_right_edit_of_the_source_is_loaded(folder: Path) -> None:
    _edit_text(
        folder, "model.py", "return residual + hidden_states", "total = residual + hidden_states\n        return total"
    )
    assert load_plan(folder).spec.model == "Qwen3-4B"


def test_a_schedule_that_cannot_run_is_refuted(folder: Path) -> None:
    _edit_text(folder, "schedule.json", '"1RECV_F0", ', "")
    (finding,) = check_folder(folder).findings
    assert finding.obligation == "schedule"


@pytest.mark.parametrize("name", ["plan.json", "schedule.json", "model.py"])
def test_a_folder_that_lacks_a_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ShardcError) as error:
        check_folder(folder)
    assert error.value.problem == f"{folder} is no plan folder: it has no {name}"


@pytest.mark.parametrize("field", ["mesh", "parameters", "stages", "graphs"])
def test_a_plan_that_lacks_a_field_is_refused(folder: Path, field: str) -> None:
    def remove(data: dict[str, Any]) -> None:
        del data[field]

    _edit(folder, remove)
    with pytest.raises(ShardcError, match=r"plan\.json"):
        check_folder(folder)
