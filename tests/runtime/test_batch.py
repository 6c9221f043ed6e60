"""Checks, guards, padding and micro-batches of a call's inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardc.runtime import ShardcError, load_plan
from shardc.runtime.batch import prepare_batch
from shardc.runtime.spec import PlanSpec
from tests.runtime import toy


def plan_spec(folder: Path, **options) -> PlanSpec:
    return load_plan(toy.write_plan(folder, **options)).spec


REFUSED = [
    ({"labels": torch.zeros(2, 4)}, "toy: the batch has no input_ids, only ['labels']"),
    ({}, "toy: the batch has no input_ids, only []"),
    ({"input_ids": torch.zeros(3, 4), "labels": torch.zeros(2, 4)}, "toy: labels has 2 rows, the batch has 3"),
    ({"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, 3)}, "toy: labels has 3 tokens, the batch has 4"),
    ({"input_ids": [[1, 2]]}, "toy: cannot take input_ids=[[1, 2]]"),
    (
        {"input_ids": torch.zeros(2, 4), "token_type_ids": torch.zeros(2, 4)},
        "toy: cannot take token_type_ids=tensor(2, 4)",
    ),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_wrong_inputs_are_refused(tmp_path: Path, inputs: dict, message: str) -> None:
    with pytest.raises(ShardcError) as error:
        prepare_batch(inputs, plan_spec(tmp_path))
    assert str(error.value).startswith(message)


def test_a_mask_that_masks_nothing_is_dropped_before_padding(tmp_path: Path) -> None:
    spec = plan_spec(tmp_path, tp=2, sequence_parallel=True)
    ids, mask = torch.ones(2, 5).long(), torch.ones(2, 5).long()
    assert "attention_mask" not in prepare_batch({"input_ids": ids, "attention_mask": mask}, spec).tensors
    mask[1, 0] = 0
    batch = prepare_batch({"input_ids": ids, "attention_mask": mask, "labels": ids}, spec)
    assert (batch.rows, batch.length, batch.true_length) == (2, 6, 5)
    assert batch.tensors["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0]]
    assert batch.tensors["input_ids"][:, 5].tolist() == [0, 0]
    assert batch.tensors["labels"][:, 5].tolist() == [-100, -100]


def test_microbatches_are_never_empty_and_share_single_rows(tmp_path: Path) -> None:
    ids, mask = torch.arange(7).unsqueeze(1).expand(7, 2), torch.zeros(1, 2)
    batch = prepare_batch({"input_ids": ids, "attention_mask": mask}, plan_spec(tmp_path))
    parts = batch.split(4)
    assert [part.tensors["input_ids"][:, 0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all(part.tensors["attention_mask"].shape == (1, 2) for part in parts)
    assert [part.rows for part in batch.split(9)] == [1] * 7


def test_a_prediction_that_depends_on_the_length_is_refused_where_the_length_changes(tmp_path: Path) -> None:
    spec = replace(plan_spec(tmp_path, tp=2, sequence_parallel=True), masked_rows_see_padding=True)
    ids, mask = torch.ones(2, 5).long(), torch.ones(2, 5).long()
    mask[1, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with pytest.raises(ShardcError, match="toy: 5 tokens over tp=2 leave a remainder, and row 1 is padded on the left"):
        prepare_batch({"input_ids": ids, "attention_mask": mask, "labels": labels}, spec)
    labels[1, 2] = -100
    prepare_batch({"input_ids": ids, "attention_mask": mask, "labels": labels}, spec)
    even = {"input_ids": ids[:, :4], "attention_mask": mask[:, :4], "labels": ids[:, :4]}
    assert prepare_batch(even, spec).length == 4
    right = {"input_ids": ids, "attention_mask": mask.flip(1), "labels": ids}
    assert prepare_batch(right, spec).length == 6
