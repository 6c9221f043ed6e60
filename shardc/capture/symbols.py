"""Symbols that stand in a captured graph where a literal would freeze one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Size:
    """`coefficient * B**batch * S**seq + offset`: an integer that follows the batch B and the sequence S.

    The offset is a number, but for the tokens of a shifted sequence: `B*(S-1)` is `B*S-B`.
    """

    coefficient: int
    batch: int
    seq: int
    offset: int | Size = 0

    def at(self, batch_size: int, seq_length: int) -> int:
        offset = self.offset.at(batch_size, seq_length) if isinstance(self.offset, Size) else self.offset
        return self.coefficient * batch_size**self.batch * seq_length**self.seq + offset

    def __repr__(self) -> str:
        factors = ([str(self.coefficient)] if self.coefficient != 1 else []) + ["B"] * self.batch + ["S"] * self.seq
        offset = self.offset
        if isinstance(offset, Size):
            tail = f"{'-' if offset.coefficient < 0 else '+'}{replace(offset, coefficient=abs(offset.coefficient))}"
        else:
            tail = f"{offset:+d}" if offset else ""
        return "*".join(factors) + tail


@dataclass(frozen=True, slots=True)
class ShardSize:
    """The part of `size` that one rank holds, where it follows the batch: S/tp under sequence parallelism."""

    size: Size
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}/{self.axis}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis by name, where a collective takes a `MeshAxis`: "tp", or a sub-axis "tp.kv"."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Symbol:
    """A literal that follows the run instead of the sizes."""

    name: str

    def __repr__(self) -> str:
        return self.name


MODEL_DTYPE = Symbol("model_dtype")  # the dtype that the model was built in
DTYPE_MIN = Symbol("dtype_min")  # torch.finfo(model dtype).min
DEVICE = Symbol("device")  # where the batch lies
TRAINING = Symbol("training")  # module.training


@dataclass(frozen=True, slots=True)
class WhileTraining:
    """`value` while the module trains, 0.0 otherwise: a dropout probability."""

    value: float

    def __repr__(self) -> str:
        return f"{self.value} if training"


Dim = int | Size | ShardSize
DType = torch.dtype | Symbol

B = Size(1, 1, 0)
S = Size(1, 0, 1)
