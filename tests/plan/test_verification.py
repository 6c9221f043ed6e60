"""`verify` says exact where loss and gradients are, and names what is not."""

import math
from pathlib import Path

import pytest
import torch

from shardc.errors import ShardcError
from shardc.plan import verify
from shardc.plan.verification import compare_gradients


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


def test_a_plan_folder_is_exact_on_its_own_layout(written: Path) -> None:
    seen: list[str] = []
    result = verify(written, padding="left", progress=seen.append)
    assert result.ok, result.to_dict()
    assert result.settings["tp"] == result.settings["pp"] == 2
    assert result.settings["padding"] == "left"
    assert result.grad_norm == pytest.approx(result.grad_norm_ref, rel=1e-5)
    assert result.config["num_hidden_layers"] == 3
    data = result.to_dict()
    assert {"ok", "loss", "loss_ref", "max_grad_error", "worst_param", "config"} <= {*data}
    assert data["max_grad_error"] <= 1e-5
    assert seen[-1] == "4 ranks"


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
