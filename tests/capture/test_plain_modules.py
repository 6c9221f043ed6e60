"""A plain nn.Module is captured exactly, or refused with the line of its author."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.capture import Input, capture
from shardc.capture.capture import TOKENS
from shardc.capture.patches import default_dtype
from shardc.capture.symbols import MODEL_DTYPE, B, S
from shardc.errors import ShardcError
from tests.capture import families
from tests.capture.plain import VOCAB, Tiny, next_token_loss, tiny_batch, with_body
from tests.capture.replay import assert_bit_equal, perturb, run_graph, run_model

EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {}
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {}


def exact(body: Callable) -> Callable:
    EXACT[body.__name__.replace("_", " ")] = body
    return body


def refused(message: str) -> Callable:
    def add(body: Callable) -> Callable:
        REFUSED[body.__name__.replace("_", " ")] = (body, message)
        return body

    return add


# -- captured exactly ------------------------------------------------------------------------------------------------
@exact
def pitfall_2_no_ops_return_the_same_object(self: Tiny, hidden: Tensor) -> Tensor:
    residual = hidden
    hidden = F.dropout(self.proj(hidden).to(hidden.dtype).contiguous(), 0.1, self.training)
    return residual + hidden.contiguous()


@exact
def pitfall_3_a_dtype_is_reused_after_its_name_is_rebound(self: Tiny, hidden: Tensor) -> Tensor:
    before = hidden
    hidden = self.proj(hidden).float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return hidden.to(before.dtype) + torch.finfo(before.dtype).min * 0.0


@exact
def pitfall_5_dropout_follows_the_mode(self: Tiny, hidden: Tensor) -> Tensor:
    return F.dropout(self.proj(hidden), p=0.1, training=self.training)


@exact
def pitfall_6_a_value_that_gives_only_its_dtype_and_shape(self: Tiny, hidden: Tensor) -> Tensor:
    steps = torch.arange(hidden.shape[1], device=hidden.device)
    return self.proj(hidden) + steps.to(hidden.dtype)[None, :, None] / hidden.shape[1]


@exact
def pitfall_9_in_place_writes_make_versions(self: Tiny, hidden: Tensor) -> Tensor:
    total = self.proj(hidden)
    before = total * 2
    total += hidden
    total.mul_(0.5)
    total = F.relu(total, inplace=True)
    return total + before


@exact
def pitfall_9_fills_and_masked_fills(self: Tiny, hidden: Tensor) -> Tensor:
    bias = torch.empty_like(hidden)
    bias.fill_(0.25)
    noise = hidden * 3
    noise.zero_()
    later = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool, device=hidden.device).triu(1)
    scores = torch.matmul(hidden, hidden.mT).masked_fill_(later, float("-inf"))
    return scores.softmax(-1) @ self.proj(hidden) + bias + noise


@exact
def pitfall_25_reflected_operators_and_repeats(self: Tiny, hidden: Tensor) -> Tensor:
    hidden = 1 - self.proj(hidden)
    hidden = 2 / (3 + hidden.cumsum(1).abs())
    return hidden.repeat(1, 1, 2)[..., : hidden.shape[-1]] + hidden.repeat_interleave(2, dim=-1)[..., ::2]


@exact
def a_list_as_an_index(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(hidden)[..., [1, 0, 3, 2, 5, 4, 7, 6]]


@exact
def several_results(self: Tiny, hidden: Tensor) -> Tensor:
    one, two = self.proj(hidden).chunk(2, dim=-1)
    largest, _ = hidden.max(-1, keepdim=True)
    return torch.cat([two, one], dim=-1) + largest


@exact
def a_transposed_weight(self: Tiny, hidden: Tensor) -> Tensor:
    return hidden @ self.proj.weight.T + self.proj.bias.data


@exact
def an_einsum_and_no_grad(self: Tiny, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        scale = hidden.abs().amax(-1, keepdim=True)
    return torch.einsum("bsd,od->bso", hidden / scale, self.proj.weight)


@exact
def a_module_called_twice(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(torch.tanh(self.proj(hidden)))


@exact
def negative_zero_is_not_zero(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(hidden) + (1.0 / (hidden * 0 + 1)).mul(0.0) + (hidden.abs() + 1).mul(-0.0)


@exact
def a_branch_without_effect(self: Tiny, hidden: Tensor) -> Tensor:
    if hidden.shape[0] != 1 and hidden.shape[1] < 1000:
        hidden.shape  # noqa: B018
    return self.proj(hidden)


@exact
def draws_that_cannot_leave_anything_out(self: Tiny, hidden: Tensor) -> Tensor:
    """transformers 5.17 draws for each layer of an OPT without layerdrop."""
    if self.training and torch.rand([]) < 0.0:
        return hidden
    return self.proj(hidden) if torch.rand([]) < 1.0 else hidden


@pytest.mark.parametrize("name", EXACT)
def test_captured_exactly(name: str) -> None:
    make = with_body(EXACT[name])
    graph = capture(make).plain
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            torch.manual_seed(0)
            model = perturb(make())
            for training in (True, False):
                model.train(training)
                for rows, length in ((3, 17), (1, 5)):
                    batch = tiny_batch(rows, length)
                    assert_bit_equal(run_graph(graph, model, batch), run_model(model, batch), f"{dtype} {training}")


# -- refused ---------------------------------------------------------------------------------------------------------
@refused("the model: in-place write to a view by add_ ")
def pitfall_9_a_write_to_a_view(self: Tiny, hidden: Tensor) -> Tensor:
    hidden = self.proj(hidden)
    hidden[:, 0].add_(1)
    return hidden


@refused("the model: in-place write to a view by mul_ ")
def pitfall_9_a_write_to_what_has_a_view(self: Tiny, hidden: Tensor) -> Tensor:
    hidden = self.proj(hidden)
    first = hidden[:, :1]
    hidden.mul_(2)
    return hidden + first


@refused("the model: in-place operation __setitem__ ")
def pitfall_9_an_assignment_to_a_slice(self: Tiny, hidden: Tensor) -> Tensor:
    hidden = self.proj(hidden)
    hidden[:, 0] = 1
    return hidden


@refused("the model: in-place operation normal_ ")
def pitfall_9_a_random_fill(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(hidden) + torch.empty_like(hidden).normal_()


@refused("the model: in-place operation add ")
def pitfall_9_an_out_argument(self: Tiny, hidden: Tensor) -> Tensor:
    result = torch.empty_like(hidden)
    torch.add(hidden.detach(), 1, out=result)
    return self.proj(hidden) + result


@refused("the model: in-place operation add_ keeps torch.bfloat16 (2, 15, 8) where the result is torch.float32 ")
def pitfall_9_a_write_that_rounds(self: Tiny, hidden: Tensor) -> Tensor:
    total = self.proj(hidden)
    total += torch.ones(hidden.shape[-1], dtype=torch.float32, device=hidden.device) / 3
    return total


@refused("the model: in-place write without gradient by mul_ to a tensor that requires one ")
def pitfall_9_a_write_without_gradient(self: Tiny, hidden: Tensor) -> Tensor:
    hidden = self.proj(hidden)
    with torch.no_grad():
        hidden.mul_(2)
    return hidden


@refused("the model: in-place write to a parameter or buffer by mul_ ")
def pitfall_9_a_write_to_a_parameter(self: Tiny, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        self.proj.weight.mul_(0.9)
    return self.proj(hidden)


@refused("the model: reads the value of a parameter or buffer on the host ")
def a_host_read_of_a_parameter(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(hidden) * self.proj.bias.sum().item()


@refused("the model: reads a random number on the host ")
def a_layer_that_is_left_out_at_random(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(hidden) if self.training and torch.rand([]) < 0.1 else hidden


@refused("the model: reads a random number on the host ")
def a_scale_drawn_at_random(self: Tiny, hidden: Tensor) -> Tensor:
    return self.proj(hidden) * torch.rand([]).item()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@refused("the model: calls the custom autograd function Doubled ")
def a_custom_autograd_function(self: Tiny, hidden: Tensor) -> Tensor:
    return Doubled.apply(self.proj(hidden))


@refused("the model: runs under autocast ")
def an_autocast(self: Tiny, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return hidden @ self.proj.weight


@refused("the model: the computation changes with the size of the batch at ")
def pitfall_1_a_loop_over_the_sequence(self: Tiny, hidden: Tensor) -> Tensor:
    state = hidden[:, 0]
    for step in range(hidden.shape[1]):
        state = torch.tanh(state) + hidden[:, step]
    return hidden + state[:, None]


@refused("the model: a tensor of shape (8,) is neither an input, nor a parameter, nor computed in forward ")
def an_unregistered_tensor(self: Tiny, hidden: Tensor) -> Tensor:
    if not hasattr(self, "hidden_constant"):
        with torch._C.DisableTorchFunction():
            self.hidden_constant = torch.ones(8, device=hidden.device)
    return self.proj(hidden) + self.hidden_constant


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_line(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(ShardcError) as error:
        capture(with_body(body))
    first_line, advice = str(error.value).split("\n", 1)
    assert first_line.startswith(message) and advice.strip()
    line = int(re.search(r"test_plain_modules\.py:(\d+)", first_line).group(1))
    first = body.__code__.co_firstlineno
    assert first < line <= first + 8


# -- inputs and outputs ------------------------------------------------------------------------------------------------
class Returns(Tiny):
    """Returns its results in one of the forms that a training loop may expect."""

    form = "dict"

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        out = super().forward(input_ids, labels)
        forms = {
            "loss": lambda: out["loss"],
            "logits": lambda: out["logits"],
            "loss, logits": lambda: (out["loss"], out["logits"]),
            "logits, extra": lambda: (out["logits"], out["logits"] * 2),
            "dict": lambda: out,
            "nothing": lambda: {"scores": out["logits"]},
        }
        return forms[self.form]()


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("loss", ["count", "loss"]),
        ("logits", ["logits"]),
        ("loss, logits", ["count", "logits", "loss"]),
        ("logits, extra", ["logits"]),
        ("dict", ["count", "logits", "loss"]),
    ],
)
def test_what_a_model_returns(form: str, names: list[str]) -> None:
    make = type("Form", (Returns,), {"form": form})
    graph = capture(make).plain
    assert sorted(graph.outputs) == names
    torch.manual_seed(0)
    model = make()
    reference = Tiny()
    reference.load_state_dict(model.state_dict())
    found, wanted = run_graph(graph, model, tiny_batch()), run_model(reference, tiny_batch())
    for name in set(names) & {"loss", "logits"}:
        assert torch.equal(found[name], wanted[name])


def test_a_model_that_returns_neither_loss_nor_logits_is_refused() -> None:
    with pytest.raises(ShardcError) as error:
        capture(type("Form", (Returns,), {"form": "nothing"}))
    assert str(error.value) == (
        "the model: Form returns dict without loss or logits\n"
        "  return the loss, (loss, logits), or a dict or object with these names"
    )


class OtherNames(nn.Module):
    """Inputs by other names, one of them a float tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tiny()

    def forward(self, tokens: Tensor, weights: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.inner.head(self.inner.embed(tokens) * weights[..., None])
        return {"loss": next_token_loss(logits, targets), "logits": logits}


def test_inputs_by_other_names() -> None:
    inputs = {"tokens": TOKENS, "weights": Input((B, S), MODEL_DTYPE), "targets": TOKENS}
    captured = capture(OtherNames, inputs=inputs)
    assert [variant.name for variant in captured.variants] == ["plain"]
    model, batch = OtherNames(), tiny_batch()
    given = {"tokens": batch["input_ids"], "targets": batch["labels"], "weights": torch.rand(3, 17)}
    out = model(**given)
    graph = captured.plain
    assert sorted(graph.inputs) == ["num_targets", "targets", "tokens", "weights"]
    targets = (given["targets"][:, 1:] != -100).sum()
    found = run_graph(graph, model, given | {"num_targets": targets.float()})
    assert torch.equal(found["loss"], out["loss"].detach())


def test_a_model_without_labels() -> None:
    graph = capture(Tiny, inputs={"input_ids": TOKENS}).plain
    assert list(graph.outputs) == ["logits"]
    model = Tiny()
    batch = {"input_ids": tiny_batch()["input_ids"]}
    assert_bit_equal(run_graph(graph, model, batch), run_model(model, batch))


class ReadsIds(Tiny):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        if input_ids.max().item() > 5:
            labels = None
        return super().forward(input_ids, labels)


def test_a_host_read_of_an_input_is_refused_with_its_line() -> None:
    with pytest.raises(ShardcError) as error:
        capture(ReadsIds)
    line = ReadsIds.forward.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"the model: reads values of input_ids on the host (test_plain_modules.py:{line})\n"
        "  only `all tokens kept` of attention_mask and `no restart` of position_ids can be guards; "
        "pass this input as a Python value"
    )


class Guarded(Tiny):
    """Asks its mask and its positions what Hugging Face models ask."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        hidden = self.embed(input_ids)
        if attention_mask is not None and not attention_mask.all():
            hidden = hidden * attention_mask[..., None].to(hidden.dtype)
        if position_ids is not None and (position_ids.diff(dim=-1) == 1).all():
            hidden = hidden * 2
        logits = self.head(self.proj(hidden))
        return {"loss": next_token_loss(logits, labels), "logits": logits}


class LimitedMask(Guarded):
    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        if attention_mask is not None and attention_mask.sum() < 10:
            labels = labels + 1
        return super().forward(input_ids, labels)


class LimitedPositions(Guarded):
    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Any:
        if position_ids is not None and position_ids.max() + 1 > 64:
            labels = labels + 1
        return super().forward(input_ids, labels)


def test_guards_are_captured_on_both_sides() -> None:
    captured = capture(Guarded)
    assert [v.name for v in captured.variants] == [
        "plain", "positions", "positions+packed", "masked", "masked+positions",
    ]  # fmt: skip
    torch.manual_seed(0)
    model = Guarded()
    for variant, graph in captured.variants.items():
        batch = families.batch(variant, rows=3, length=9, vocab=VOCAB)
        assert_bit_equal(run_graph(graph, model, batch), run_model(model, batch), variant.name)


@pytest.mark.parametrize(("model", "name"), [(LimitedMask, "attention_mask"), (LimitedPositions, "position_ids")])
def test_other_questions_about_a_mask_or_positions_are_no_guards(model: type[Tiny], name: str) -> None:
    line = model.forward.__code__.co_firstlineno + 1
    with pytest.raises(ShardcError, match=rf"reads values of {name} on the host \(test_plain_modules.py:{line}\)"):
        capture(model)


class NotCrossEntropy(Tiny):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids, labels)["loss"] * 2


def test_a_loss_that_is_not_one_mean_cross_entropy_is_refused() -> None:
    with pytest.raises(ShardcError, match=r"the loss is computed by mul.*not by a mean cross entropy"):
        capture(NotCrossEntropy)
