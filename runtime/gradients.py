"""Complete the gradients of a step, and measure them.

The loss is divided by the targets of the global batch, so gradients of dp ranks add up: they are sums, never means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime.mesh import Mesh, MeshAxis
from shardc.runtime.schedule import Schedule
from shardc.runtime.spec import ParameterSpec, PlanSpec

BUCKET_BYTES = 25 * 2**20  # long enough to hide the latency of an all-reduce, short against a model


def tie_groups(spec: PlanSpec, schedule: Schedule, mesh: Mesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Process group of this rank for each set of stages that shares a parameter. Every rank calls it.

    Only pp coords that hold the parameter are in the group; stages of one coord share the tensor itself."""
    groups = {}
    for stages in dict.fromkeys(tie.stages for tie in spec.ties):
        coords = sorted({schedule.coord_of_stage[stage] for stage in stages})
        if len(coords) < 2:
            continue
        for dp in range(mesh.dp.size):
            for tp in range(mesh.tp.size):
                group = dist.new_group([mesh.rank_at(dp=dp, pp=pp, tp=tp) for pp in coords])
                if (dp, tp) == (mesh.dp.coord, mesh.tp.coord) and mesh.pp.coord in coords:
                    groups[stages] = group
    return groups


def reduce_gradients(
    parameters: Mapping[str, nn.Parameter],
    spec: PlanSpec,
    mesh: Mesh,
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
) -> None:
    """Sum .grad over the axes of grad_reduce, over tied stages, over dp. Call it once before each optimizer step.

    parameters: this rank's by canonical name, in the same order on all ranks that hold them. A parameter that is
    reduced and has no gradient here counts as zero, as other ranks may have one. Sends 2(n-1)/n of the gradient bytes
    per axis.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    partial: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in trained.items():
        for axis in spec.parameters[name].grad_reduce:
            partial[axis].append(parameter)
    for axis, members in sorted(partial.items()):
        _sum_gradients(members, mesh.axis(axis).group)
    for tie in spec.ties:
        if tie.stages in groups and tie.parameter in trained:
            _sum_gradients([trained[tie.parameter]], groups[tie.stages])
    _sum_gradients(list(trained.values()), mesh.dp.group)


def grad_norm(parameters: Mapping[str, nn.Parameter], spec: PlanSpec, mesh: Mesh, schedule: Schedule) -> Tensor:
    """2-norm of the whole gradient, each element once: shards where they are, replicas and ties on one rank."""
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    for name, parameter in parameters.items():
        if parameter.grad is not None and counts_here(spec.parameters[name], mesh, schedule):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            total += torch.linalg.vector_norm(parameter.grad, dtype=wide) ** 2
    return norm_over(total, (mesh.tp, mesh.pp))


def norm_over(squares: Tensor, axes: Iterable[MeshAxis]) -> Tensor:
    """The norm whose square is the sum of `squares` (0-d) over the ranks of the axes."""
    for axis in axes:
        if axis.group is not None:
            dist.all_reduce(squares, group=axis.group)
    return squares.sqrt()


def counts_here(spec: ParameterSpec, mesh: Mesh, schedule: Schedule) -> bool:
    """Whether this rank is the first, on every axis over which the parameter is replicated."""
    if schedule.coord_of_stage[spec.stages[0]] != mesh.pp.coord:
        return False
    sharded = frozenset() if spec.shard is None else spec.shard.axes
    if mesh.tp.name in sharded:
        return True
    axes = mesh.tp.sub_axes or (mesh.tp,)
    return all(axis.coord == 0 for axis in axes if axis.name not in sharded)


def _sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in parameters]):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(total.view_as(grad))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype together, up to BUCKET_BYTES, at least one a bucket."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_dtype[grad.dtype].append(grad)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        for grad in same:
            if bucket and sum(member.nbytes for member in bucket) + grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket
