"""Capture leaves torch, transformers and the model's file as they were, also when it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc.capture import capture
from shardc.errors import ShardcError
from tests.capture.plain import Tiny, with_body


def state() -> dict[str, Any]:
    return {
        "nn.Module.__call__": nn.Module.__dict__["__call__"],
        "Function.apply": torch.autograd.Function.__dict__["apply"],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "modes": torch.overrides._get_current_function_mode_stack(),
        "random state": torch.get_rng_state().sum().item(),
    }


def fails(self: Tiny, hidden: Tensor) -> Tensor:
    raise KeyError("a mistake of the author")


def refused(self: Tiny, hidden: Tensor) -> Tensor:
    return hidden * hidden.sum().item()


def dropout(self: Tiny, hidden: Tensor) -> Tensor:
    return torch.dropout(self.proj(hidden), 0.1, self.training)


@pytest.mark.parametrize(
    ("body", "error"),
    [(dropout, None), (fails, KeyError), (refused, ShardcError)],
    ids=["success", "failure", "refusal"],
)
def test_nothing_stays_patched(body: Any, error: type[Exception] | None) -> None:
    before = state()
    if error is None:
        capture(with_body(body))
    else:
        with pytest.raises(error):
            capture(with_body(body))
    assert state() == before


def test_a_failing_constructor_restores_the_defaults() -> None:
    def make() -> nn.Module:
        raise ValueError("no such size")

    before = state()
    with pytest.raises(ValueError, match="no such size"):
        capture(make)
    assert state() == before


def test_two_captures_give_equal_graphs() -> None:
    texts = [str(capture(with_body(dropout)).plain.graph) for _ in range(2)]
    assert texts[0] == texts[1]


class Counts(Tiny):
    calls = 0

    def body(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.proj(hidden)


class Remembers(Tiny):
    def body(self, hidden: Tensor) -> Tensor:
        self.last = hidden.mean(dim=(0, 1))
        return self.proj(hidden)


class RemembersLength(Tiny):
    longest = 0

    def body(self, hidden: Tensor) -> Tensor:
        self.longest = max(self.longest, hidden.shape[1])
        return self.proj(hidden)


class Caches(Tiny):
    table = None

    def body(self, hidden: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(8, device=hidden.device)
        return self.proj(hidden) + self.table


def test_what_forward_keeps_on_its_modules_is_undone() -> None:
    models = []

    def make() -> nn.Module:
        models.append(Caches())
        return models[-1]

    graph = capture(make).plain
    assert "arange" in str(graph.graph) and all(model.table is None for model in models)
    assert capture(Counts).plain.outputs.keys() == {"loss", "logits", "count"}


@pytest.mark.parametrize(("model", "name"), [(Remembers, "last"), (RemembersLength, "longest")])
def test_what_depends_on_earlier_batches_is_refused(model: type[Tiny], name: str) -> None:
    with pytest.raises(ShardcError) as error:
        capture(model)
    assert str(error.value) == (
        f"the model: keeps {name!r} from one batch to the next\n  compute it in forward, or keep it out of the model"
    )
