"""Mesh coordinates, groups and refusals."""

from __future__ import annotations

import pytest
import torch

from shardc.runtime import Mesh, MeshAxis, ShardcError, all_reduce
from tests.workers import Workers

HERE = "tests.runtime.test_mesh"


def coords() -> tuple[list[int], list[float]]:
    """This rank's coords, and over each axis the sum of the global ranks."""
    mesh = Mesh.create(tp=4, sub_axes={"kv": 2, "replica": 2}) if _wide() else Mesh.create(tp=2)
    names = ["dp", "pp", "tp", *(axis.name for axis in mesh.tp.sub_axes)]
    axes = [mesh.axis(name) for name in names]
    sums = [float(all_reduce(torch.tensor(float(mesh.rank)), axis)) for axis in axes]
    return [axis.coord for axis in axes], sums


def _wide() -> bool:
    return torch.distributed.get_world_size() == 4


def test_ranks_lie_as_dp_pp_tp_with_kv_major(workers: Workers) -> None:
    assert workers.run(4, f"{HERE}:coords") == [
        ([0, 0, 0, 0, 0], [0, 0, 6, 2, 1]),
        ([0, 0, 1, 0, 1], [1, 1, 6, 4, 1]),
        ([0, 0, 2, 1, 0], [2, 2, 6, 2, 5]),
        ([0, 0, 3, 1, 1], [3, 3, 6, 4, 5]),
    ]


def dp_pp_coords() -> list[int]:
    mesh = Mesh.create(pp=2)
    return [mesh.dp.coord, mesh.pp.coord, mesh.rank]


def test_dp_takes_the_remaining_ranks(workers: Workers) -> None:
    assert workers.run(4, f"{HERE}:dp_pp_coords") == [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]


def refusals() -> list[str]:
    texts = []
    for sizes in ({"tp": 2, "pp": 2}, {"tp": 0}, {"tp": 3, "sub_axes": {"kv": 2, "replica": 2}}):
        with pytest.raises(ShardcError) as error:
            Mesh.create(**sizes)
        texts.append(str(error.value))
    return texts


def test_sizes_that_do_not_fit_are_refused_before_any_collective(workers: Workers) -> None:
    """Only rank 0 creates the mesh: a collective would wait for ever."""
    expected = [
        "mesh: tp=2 * pp=2 = 4 does not divide the 3 process(es) of this job\n"
        "  start a multiple of 4 processes (torchrun --nproc_per_node 4) or compile for other sizes",
        "mesh: tp=0 and pp=1 must be at least 1\n  leave out the axis that is not used",
        "mesh: sub-axes {'kv': 2, 'replica': 2} do not multiply to tp=3\n  their product must be the axis size",
    ]
    assert workers.run(3, f"{HERE}:refusals_on_rank_zero")[0] == expected


def refusals_on_rank_zero() -> list[str]:
    return refusals() if torch.distributed.get_rank() == 0 else []


def test_a_job_of_one_process_needs_no_launcher() -> None:
    assert Mesh.create(device="cpu") == Mesh.single()
    with pytest.raises(ShardcError, match=r"tp=2 \* pp=1 = 2 does not divide the 1 process"):
        Mesh.create(tp=2)


def test_unknown_axes_are_named() -> None:
    with pytest.raises(ShardcError, match=r"no axis 'tp.kv'; it has \['dp', 'pp', 'tp'\]"):
        Mesh.single().axis("tp.kv")
    with pytest.raises(ShardcError, match=r"mesh axis 'tp' \(size 2\) has no sub-axis 'kv'; it has \[\]"):
        MeshAxis.abstract("tp", 2).sub("kv")


@pytest.mark.parametrize("size", [7, 8, 101, 2])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_bounds_are_those_of_tensor_split(size: int, parts: int) -> None:
    axis = MeshAxis.abstract("tp", parts)
    found = [list(range(*axis.bounds(size, coord))) for coord in range(parts)]
    assert found == [part.tolist() for part in torch.arange(size).tensor_split(parts)]


def test_abstract_sub_axes_follow_the_coord() -> None:
    axis = MeshAxis.abstract("tp", 6, coord=5, sub_axes={"kv": 2, "replica": 3})
    assert [(sub.name, sub.size, sub.coord) for sub in axis.sub_axes] == [("tp.kv", 2, 1), ("tp.replica", 3, 2)]
    assert axis.at(3).sub("kv").coord == 1
    assert axis.at(3).named("tp.replica").coord == 0
