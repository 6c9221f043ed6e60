"""Each conversion against a dense single process, forward and backward, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc import runtime
from shardc.runtime import MeshAxis
from tests.workers import Workers

DTYPE = torch.float64


def world_axis() -> MeshAxis:
    return MeshAxis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def random(*shape: int, seed: int) -> Tensor:
    """The same values on every rank and device, on the default device."""
    x = torch.randn(*shape, dtype=DTYPE, device="cpu", generator=torch.Generator("cpu").manual_seed(seed))
    return x.to(torch.get_default_device())


def per_rank(n: int, *shape: int, seed: int) -> list[Tensor]:
    return [random(*shape, seed=seed + rank) for rank in range(n)]


def differentiate(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(grad)
    return y.detach(), x.grad


def check_all(length: int, dim: int) -> None:
    """Every conversion on this rank; expectations are computed from all ranks' inputs, which are seeded."""
    axis = world_axis()
    n, coord = axis.size, axis.coord
    shape = [2, 3, 4]
    shape[dim] = length
    full = random(*shape, seed=0)
    partials, grads = per_rank(n, *shape, seed=10), per_rank(n, *shape, seed=20)
    total, grad_total = sum(partials), sum(grads)

    def part(x: Tensor) -> Tensor:
        return x.tensor_split(n, dim)[coord]

    conversions = {
        "copy_to": (lambda x: runtime.copy_to(x, axis), full, grads[coord], full, grad_total),
        "all_reduce": (lambda x: runtime.all_reduce(x, axis), partials[coord], grads[0], total, grads[0]),
        "all_gather": (
            lambda x: runtime.all_gather(x, axis, dim, size=length),
            part(full),
            grads[coord],
            full,
            part(grad_total),
        ),
        "reduce_scatter": (
            lambda x: runtime.reduce_scatter(x, axis, dim),
            partials[coord],
            part(grads[0]),
            part(total),
            grads[0],
        ),
        "shard": (lambda x: runtime.shard(x, axis, dim), full, part(grads[0]), part(full), grads[0]),
        "all_gather_invariant": (
            lambda x: runtime.all_gather_invariant(x, axis, dim, size=length),
            part(full),
            grads[0],
            full,
            part(grads[0]),
        ),
        "keep_on_first": (
            lambda x: runtime.keep_on_first(x, axis),
            full,
            grads[coord],
            full if coord == 0 else torch.zeros_like(full),
            grads[0],
        ),
    }
    for name, (function, x, grad, value, value_grad) in conversions.items():
        found, found_grad = differentiate(function, x, grad)
        torch.testing.assert_close(found, value, msg=lambda text, name=name: f"{name} forward: {text}")
        torch.testing.assert_close(found_grad, value_grad, msg=lambda text, name=name: f"{name} backward: {text}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_conversions_equal_the_dense_process(workers: Workers, ranks: int) -> None:
    """12 divides over all ranks, 7 over none, dims first, middle and last."""
    workers.run(ranks, "tests.runtime.test_collectives:check_lengths", [12, 7])


def check_lengths(lengths: list[int]) -> None:
    for length in lengths:
        for dim in (0, 1, -1):
            check_all(length, dim)


def check_low_precision() -> None:
    axis = world_axis()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(3, 5, dtype=dtype)
        assert runtime.all_reduce(x, axis).eq(axis.size).all()
        assert runtime.reduce_scatter(x, axis, 1).eq(axis.size).all()
        assert runtime.all_gather(x, axis, 1).shape == (3, 5 * axis.size)


def test_conversions_take_half_precision_on_the_cpu(workers: Workers) -> None:
    workers.run(2, "tests.runtime.test_collectives:check_low_precision")


def check_gathers_even_shards_without_size() -> None:
    axis = world_axis()
    x = torch.full((2, 1), axis.coord)
    assert runtime.all_gather(x, axis, 1).tolist() == [[0, 1, 2]] * 2


def test_gather_needs_no_size_where_shards_are_equal(workers: Workers) -> None:
    workers.run(3, "tests.runtime.test_collectives:check_gathers_even_shards_without_size")


def all_conversions(x: Tensor, weight: Tensor, axis: MeshAxis) -> Tensor:
    x = torch.relu(runtime.copy_to(x, axis) @ weight)
    x = runtime.all_reduce(x, axis) + runtime.all_reduce(runtime.keep_on_first(weight[0], axis), axis)
    x = runtime.all_gather(runtime.shard(x, axis, 1).sin(), axis, 1) @ weight
    return runtime.all_gather_invariant(runtime.reduce_scatter(x, axis, 1), axis, 1)


def check_compile() -> None:
    axis = world_axis()
    weight = random(4, 4, seed=axis.coord)
    compiled = torch.compile(all_conversions, backend="aot_eager", fullgraph=True)
    results = []
    for function in (all_conversions, compiled):
        x, w = random(3, 4, seed=9).requires_grad_(), weight.clone().requires_grad_()
        y = function(x, w, axis)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    torch.testing.assert_close(*results)


def test_conversions_compile_without_graph_breaks(workers: Workers) -> None:
    workers.run(2, "tests.runtime.test_collectives:check_compile")


CALLS = [
    ("copy_to", lambda x, axis: runtime.copy_to(x, axis), (2, 6, 4)),
    ("all_reduce", lambda x, axis: runtime.all_reduce(x, axis), (2, 6, 4)),
    ("all_gather", lambda x, axis: runtime.all_gather(x, axis, 1), (2, 24, 4)),
    ("all_gather", lambda x, axis: runtime.all_gather(x, axis, 1, size=22), (2, 22, 4)),
    ("reduce_scatter", lambda x, axis: runtime.reduce_scatter(x, axis, 1), (2, 2, 4)),
    ("shard", lambda x, axis: runtime.shard(x, axis, 1), (2, 2, 4)),
    ("all_gather_invariant", lambda x, axis: runtime.all_gather_invariant(x, axis, 1, size=23), (2, 23, 4)),
    ("keep_on_first", lambda x, axis: runtime.keep_on_first(x, axis), (2, 6, 4)),
]


class Recorder(TorchFunctionMode):
    """Names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "call", "shape"), CALLS)
def test_conversion_is_one_call_with_the_right_shape_on_meta_tensors(
    name: str, call: Callable[[Tensor, MeshAxis], Tensor], shape: tuple[int, ...]
) -> None:
    axis = MeshAxis.abstract("tp", 4, coord=1)
    x = torch.empty(2, 6, 4, device="meta", requires_grad=True)
    with Recorder() as recorder:
        y = call(x, axis)
    assert recorder.calls == [name]
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(("name", "call", "shape"), CALLS)
def test_conversion_does_nothing_on_an_axis_of_size_one(
    name: str, call: Callable[[Tensor, MeshAxis], Tensor], shape: tuple[int, ...]
) -> None:
    x = torch.zeros(2, 6, 4)
    assert call(x, MeshAxis.abstract("tp", 1)) is x
