"""Dropout streams: equal or distinct per axis, replayed by recomputation, resumed from a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardc.runtime import Mesh, MeshAxis, rng, sharded_rng
from tests.workers import Workers

HERE = "tests.runtime.test_rng"


def masks(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dropout outside, inside, and again outside a sharded region, on a tp 2 x dp or tp 2 x pp mesh."""
    torch.manual_seed(seed)
    mesh = Mesh.create(tp=2)
    outside = F.dropout(torch.ones(64))
    with sharded_rng(mesh.tp):
        inside = F.dropout(torch.ones(64))
    return outside, inside, F.dropout(torch.ones(64))


def test_streams_are_equal_over_tp_distinct_over_dp_and_distinct_where_sharded(workers: Workers) -> None:
    first, second, other_dp, _ = results = workers.run(4, f"{HERE}:masks", 5)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert not torch.equal(first[0], other_dp[0])
    inside = [result[1] for result in results]
    assert all(not torch.equal(inside[i], inside[j]) for i in range(4) for j in range(i))
    assert not torch.equal(first[0], first[2])


def replayed() -> None:
    mesh = Mesh.create(tp=2)

    def block(x: Tensor) -> Tensor:
        x = F.dropout(x * 2)
        with sharded_rng(mesh.tp):
            return F.dropout(x.square())

    for _ in range(2):
        x = torch.ones(256, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False)
        y.sum().backward()
        # x is 1, so the gradient of each element is twice its value, if the masks are the same.
        torch.testing.assert_close(x.grad, 2 * y.detach())


def test_recomputation_replays_sharded_masks(workers: Workers) -> None:
    """Both masks of the recomputation are those of the forward (PT 168058)."""
    workers.run(2, f"{HERE}:replayed")


def resumed() -> None:
    mesh = Mesh.create(tp=2)
    state = rng.state_dict()

    def draw() -> list[Tensor]:
        with sharded_rng(mesh.tp):
            return [torch.rand(4), torch.rand(4)]

    first = draw()
    rng.load_state_dict(state)
    torch.testing.assert_close(draw(), first, rtol=0, atol=0)


def test_streams_resume_from_their_state(workers: Workers) -> None:
    workers.run(2, f"{HERE}:resumed")


def test_abstract_axis_leaves_the_stream_alone() -> None:
    before = torch.get_rng_state()
    for size in (1, 4):
        with sharded_rng(MeshAxis.abstract("tp", size)):
            pass
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_zero_is_the_plain_seed() -> None:
    rng.seed_stream(7, index=0)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
