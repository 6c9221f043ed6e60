"""Ranks begin with the values of rank 0, and fail together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardc.booster import Booster
from shardc.booster.agreement import on_rank_0, take_values_of_rank_0
from shardc.booster.plugin import GeminiPlugin, HybridParallelPlugin, TorchDDPPlugin
from shardc.errors import ShardcError
from tests.booster.small import make_loader, make_model
from tests.workers import Workers

HERE = "tests.booster.test_agreement"


# -- a result of rank 0 ------------------------------------------------------------------------------------------------
def results_of_rank_0() -> None:
    rank = dist.get_rank()
    assert on_rank_0(lambda: {"rank": rank}) == {"rank": 0}

    def broken() -> None:
        raise ValueError("no such value")

    def mistaken() -> None:
        raise ShardcError("a problem", "an advice")

    with pytest.raises(ValueError if rank == 0 else ShardcError, match="no such value"):
        on_rank_0(broken)
    with pytest.raises(ShardcError) as error:
        on_rank_0(mistaken)
    assert (error.value.problem, error.value.advice) == ("a problem", "an advice")


def test_every_rank_has_what_rank_0_found_or_its_error(workers: Workers) -> None:
    workers.run(3, f"{HERE}:results_of_rank_0")


# -- values ------------------------------------------------------------------------------------------------------------
def boosted_from_other_seeds() -> list[list[float]]:
    """Losses of two steps under three plugins, of a model that each rank drew for itself."""
    losses = []
    for plugin in (
        TorchDDPPlugin(),
        GeminiPlugin(precision="fp32"),
        HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2),
    ):
        model = make_model()
        torch.manual_seed(dist.get_rank())
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05)
        booster = Booster(plugin=plugin)
        loader = make_loader(2, 8 // plugin.dp_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
        for batch in loader:
            losses.append(model(**batch).loss)
            booster.backward(losses[-1], optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def test_ranks_that_drew_other_values_train_the_model_of_rank_0(workers: Workers) -> None:
    model = make_model()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for batch in make_loader(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for found in workers.run(2, f"{HERE}:boosted_from_other_seeds"):
        assert found == pytest.approx(expected * 3, rel=1e-5)


class Parts(nn.Module):
    """Parameters of odd sizes: bytes that do not fill eight, an odd offset, another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.arange(5).bfloat16())
        self.offset = nn.Parameter(torch.arange(9.0)[1:])
        self.transposed = nn.Parameter(torch.arange(8.0).view(4, 2).t())
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.same = nn.Parameter(torch.ones(3, 3))


def only_what_differs() -> list[tuple[int, ...]]:
    """Rank 1 changes the last element of each parameter but `same`; the shapes that are sent then."""
    model, reference = Parts(), dict(Parts().named_parameters())
    if dist.get_rank() == 1:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != "same":
                    parameter[(-1,) * parameter.dim()] += 1
    sent, send = [], dist.broadcast
    dist.broadcast = lambda tensor, *rest, **more: (sent.append(tuple(tensor.shape)), send(tensor, *rest, **more))
    try:
        take_values_of_rank_0(model)
        take_values_of_rank_0(model)  # nothing more to send
    finally:
        dist.broadcast = send
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference[name]), name
        assert parameter.requires_grad == reference[name].requires_grad
    return sent


def test_only_what_differs_is_sent(workers: Workers) -> None:
    for sent in workers.run(2, f"{HERE}:only_what_differs"):
        assert sent == [(5,), (8,), (2, 4), (7,), ()]


def different_models() -> list[str]:
    rank = dist.get_rank()
    with torch.device("meta" if rank == 1 else "cpu"):
        meta = nn.Linear(2, 3)
    models = [
        nn.Linear(2 + (rank == 2), 3),
        nn.Linear(2, 3, bias=rank != 1),
        meta,
        nn.Linear(2, 3).to(torch.bfloat16 if rank == 1 else torch.float32),
    ]
    messages = []
    for model in models:
        with pytest.raises(ShardcError) as error:
            take_values_of_rank_0(model)
        messages.append(error.value.problem)
    return messages


def test_models_of_another_form_are_refused_on_every_rank(workers: Workers) -> None:
    for messages in workers.run(3, f"{HERE}:different_models"):
        assert messages == [
            "boost: parameter 0 is weight [3, 3] float32 on rank 2, weight [3, 2] float32 on rank 0",
            "boost: rank 1 has a model of 1 parameters, rank 0 one of 2",
            "boost: parameter 0 is weight [3, 2] float32 on the meta device on rank 1, weight [3, 2] float32 on rank 0",
            "boost: parameter 0 is weight [3, 2] bfloat16 on rank 1, weight [3, 2] float32 on rank 0",
        ]
