"""A call's batch, before it reaches the device: checks, guards, padding, micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.runtime.collectives import reduce_ranks
from shardc.runtime.errors import ShardcError
from shardc.runtime.mesh import Mesh
from shardc.runtime.spec import PlanSpec

# What an added position holds: a label that is ignored, and for ids, masks and positions a zero that nothing sees.
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one call by name; length counts the tokens after padding, true_length those that the caller gave."""

    tensors: Mapping[str, Tensor]
    rows: int
    length: int
    true_length: int
    packed: bool | None = None  # None where the plan does not ask

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        return Batch(moved, self.rows, self.length, self.true_length, self.packed)

    def split(self, count: int) -> list[Batch]:
        """At most `count` micro-batches of rows, none empty, the first ones a row longer where it does not divide.

        A tensor with one row for a batch of several belongs to every micro-batch."""
        count = min(count, self.rows)
        parts = []
        for rows in torch.arange(self.rows, device="cpu").tensor_split(count):
            first, num = int(rows[0]), len(rows)
            tensors = {name: _rows(tensor, first, num, self.rows) for name, tensor in self.tensors.items()}
            parts.append(Batch(tensors, num, self.length, self.true_length, self.packed))
        return parts


def prepare_batch(inputs: Mapping[str, Any], spec: PlanSpec) -> Batch:
    """Check the inputs of a call, drop what the guards allow, pad the sequence where the plan shards it over tp.

    Raises ShardcError naming an input that the plan does not take, or shapes that disagree."""
    tensors = {name: value for name, value in inputs.items() if value is not None}
    for name, value in tensors.items():
        if name not in spec.batch_names or not isinstance(value, Tensor):
            raise ShardcError(
                f"{spec.model}: cannot take {name}={_describe(value)}; the plan takes tensors {list(spec.batch_names)}",
                "remove it from the batch, or compile the plan with this input",
            )
    tokens = next((value for name, value in tensors.items() if name.startswith("input")), None)
    if tokens is None:
        raise ShardcError(
            f"{spec.model}: the batch has no input_ids, only {sorted(tensors)}; valid: {list(spec.batch_names)}",
            "pass input_ids=, (rows, tokens)",
        )
    rows, length = tokens.shape[:2]
    for name, value in tensors.items():
        if value.shape[0] not in (rows, 1):
            raise ShardcError(
                f"{spec.model}: {name} has {value.shape[0]} rows, the batch has {rows}",
                "give every input the same rows",
            )
    _check_lengths(tensors, length, spec)
    if length < spec.shortest_sequence:
        raise ShardcError(
            f"{spec.model}: a sequence of {length} tokens; the plan holds from {spec.shortest_sequence} tokens on",
            "give longer sequences, or pad them with an attention_mask",
        )
    packed = _is_packed(tensors, spec)
    for guard in spec.guards:
        if guard.kind == "drop" and guard.input in tensors and bool(tensors[guard.input].all()):
            del tensors[guard.input]
    padded_length = -(-length // spec.tp) * spec.tp if spec.pad_sequence else length
    if padded_length != length and spec.masked_rows_see_padding:
        _check_blind_rows(tensors, length, spec)
    padded = {name: _pad(name, value, length, padded_length) for name, value in tensors.items()}
    return Batch(padded, rows, padded_length, length, packed)


def _check_lengths(tensors: Mapping[str, Tensor], length: int, spec: PlanSpec) -> None:
    """Raises ShardcError where masks, positions or labels count other tokens than the ids do.

    A later stage would find out alone, while others wait for it. Labels of a decoder have a length of their own."""
    logits = spec.stages[-1].logits
    if logits is None or "S" not in logits.shape:
        return
    for name, value in tensors.items():
        if value.dim() == 2 and value.shape[1] != length:
            raise ShardcError(
                f"{spec.model}: {name} has {value.shape[1]} tokens, the batch has {length}",
                "give every input the same length",
            )


def _check_blind_rows(tensors: Mapping[str, Tensor], length: int, spec: PlanSpec) -> None:
    """Raises ShardcError where a token is predicted from a position that sees no token: before the first of its row.

    Such a position attends to all keys alike in this model, so that one more key changes what it predicts."""
    mask, labels = tensors.get("attention_mask"), tensors.get("labels")
    if mask is None or labels is None:
        return
    first = (mask[:, :-1] == 0) & (mask[:, 1:] != 0)
    rows = (first & (labels[:, 1:] != IGNORED_LABEL)).any(-1).nonzero().flatten().tolist()
    if rows:
        raise ShardcError(
            f"{spec.model}: {length} tokens over tp={spec.tp} leave a remainder, and row {rows[0]} is padded on the "
            "left with a label on its first token, which this attention predicts from the length of the padding",
            f"pad batches to a multiple of {spec.tp} tokens, or on the right, or ignore that label (-100)",
        )


def _is_packed(tensors: Mapping[str, Tensor], spec: PlanSpec) -> bool | None:
    """Whether rows hold several sequences. A given mask, even of ones, says that they do not, as in transformers."""
    guard = next((guard for guard in spec.guards if guard.kind == "packed"), None)
    if guard is None:
        return None
    positions = tensors.get(guard.input)
    return positions is not None and "attention_mask" not in tensors and bool((positions.diff(dim=-1) != 1).any())


def check_same_batch(batch: Batch, spec: PlanSpec, mesh: Mesh) -> None:
    """Raises ShardcError, on every rank of a model replica, where its ranks were given different batches.

    Sends one number an input over tp and pp, and waits for it: meant for the first call."""
    digests = [_digest(batch.tensors.get(name)) for name in spec.batch_names]
    highest = torch.tensor([*digests, *(-digest for digest in digests)], dtype=torch.int64, device=mesh.device)
    for axis in (mesh.tp, mesh.pp):
        if axis.size > 1:
            highest = reduce_ranks(highest, axis, "max")
    largest, smallest = highest.cpu().chunk(2)
    different = [name for name, a, b in zip(spec.batch_names, largest, -smallest, strict=True) if a != b]
    if different:
        raise ShardcError(
            f"{spec.model}: the tp={mesh.tp.size} * pp={mesh.pp.size} ranks of dp coord {mesh.dp.coord} were given "
            f"different {', '.join(different)}",
            "shard the data over dp only: mesh.dp.coord of mesh.dp.size, not the global rank",
        )


def _digest(tensor: Tensor | None) -> int:
    """A number below 2**62 that tells tensors apart by shape and content; 0 for None."""
    if tensor is None:
        return 0
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(str(tuple(tensor.shape)).encode() + content).digest()[:8], "big") >> 2


def _describe(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _rows(tensor: Tensor, first: int, num: int, rows: int) -> Tensor:
    return tensor if tensor.shape[0] != rows else tensor.narrow(0, first, num)


def _pad(name: str, tensor: Tensor, length: int, padded_length: int) -> Tensor:
    if padded_length == length or tensor.dim() < 2 or tensor.shape[1] != length:
        return tensor
    widths = [0, 0] * (tensor.dim() - 2) + [0, padded_length - length]
    return F.pad(tensor, widths, value=IGNORED_LABEL if name == "labels" else 0)
