"""plan.json as typed, frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from shardc.runtime.errors import ShardcError
from shardc.runtime.shard_map import ShardMap

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the model: shape is global, stages are those that hold it."""

    name: str
    shape: tuple[int, ...]
    stages: tuple[int, ...]
    aliases: tuple[str, ...]
    requires_grad: bool
    shard: ShardMap | None
    grad_reduce: tuple[str, ...]
    init: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that crosses stages; dims are sizes, or "B", "S", "S/tp": micro-batch rows, sequence, its tp part."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def sizes(self, *, rows: int, length: int, tp: int) -> tuple[int, ...]:
        """The shape for a micro-batch of `rows` rows of `length` tokens."""
        known = {"B": rows, "S": length, "S/tp": length // tp}
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True, slots=True)
class LogitsSpec:
    """What the last stage returns as logits; shape is global, (dim, axis) says how it is sharded."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    shard: tuple[int, str] | None


_Typed = TypeVar("_Typed", TensorSpec, LogitsSpec)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: the batch keywords that it takes, what it receives and sends, its logits if it is the last.

    num_blocks: how many of the model's layers it runs; None where the plan does not say."""

    index: int
    batch: tuple[str, ...]
    receives: tuple[TensorSpec, ...]
    sends: tuple[TensorSpec, ...]
    logits: LogitsSpec | None
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages hold: its gradient is the sum of theirs."""

    parameter: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """A question about a batch input, answered once a batch on the CPU.

    kind "drop": the input is left out when all its elements are true, a mask that masks nothing. "packed": the stages
    are told by `packed=True` that positions restart inside a row and no mask is given, so rows hold several sequences.
    """

    input: str
    kind: str


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """What a rank of one stage holds and does. FLOPs: of a token, forward and backward, in a row of `sequence` tokens.

    attention_flops_per_token: the part of flops_per_token that is proportional to the length of the row."""

    parameters: int
    flops_per_token: int
    attention_flops_per_token: int


@dataclass(frozen=True, slots=True)
class Estimates:
    """What the compiler expects of the plan. bubble: share of a call in which a rank waits, from 0 to 1."""

    sequence: int
    stages: tuple[StageEstimate, ...]
    bubble: float

    def flops_per_token(self, length: float) -> float:
        """FLOPs of a token in a row of `length` tokens, on one tp rank of every stage; recomputation not counted."""
        longer = length / self.sequence - 1
        return sum(stage.flops_per_token + stage.attention_flops_per_token * longer for stage in self.stages)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """All of plan.json that training needs. estimates: None in a plan that was written by hand without them."""

    model: str
    tp: int
    pp: int
    sub_axes: Mapping[str, int] | None
    pad_sequence: bool
    dtype: torch.dtype
    parameters: Mapping[str, ParameterSpec]
    buffers: Mapping[str, torch.dtype]
    ties: tuple[Tie, ...]
    stages: tuple[StageSpec, ...]
    guards: tuple[Guard, ...]
    shortest_sequence: int = 1
    masked_rows_see_padding: bool = False
    estimates: Estimates | None = None

    @property
    def batch_names(self) -> tuple[str, ...]:
        """Batch keywords that some stage takes, in the order of the stages."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.batch))

    def by_any_name(self) -> dict[str, ParameterSpec]:
        """Parameters by canonical name and by every alias."""
        return {name: spec for spec in self.parameters.values() for name in (spec.name, *spec.aliases)}


def with_dtype(spec: PlanSpec, dtype: torch.dtype) -> PlanSpec:
    """The plan as trained in another dtype: what it says of its own dtype, it says of `dtype`; float32 parts stay."""

    def cast(sent: _Typed) -> _Typed:
        return replace(sent, dtype=dtype) if sent.dtype == spec.dtype else sent

    stages = []
    for stage in spec.stages:
        logits = None if stage.logits is None else cast(stage.logits)
        receives, sends = tuple(map(cast, stage.receives)), tuple(map(cast, stage.sends))
        stages.append(replace(stage, receives=receives, sends=sends, logits=logits))
    return replace(spec, dtype=dtype, stages=tuple(stages))


def parse_plan(data: Mapping[str, Any]) -> PlanSpec:
    """Read the parsed plan.json. Raises ShardcError naming a missing field or an unknown value."""
    found = data.get("format")
    if found != FORMAT:
        raise ShardcError(
            f"plan.json: format {found!r}, this version reads {FORMAT}", "compile the plan again with this version"
        )
    try:
        return _parse(data)
    except KeyError as error:
        raise ShardcError(f"plan.json: field {error} is missing", "compile the plan again") from None


def _parse(data: Mapping[str, Any]) -> PlanSpec:
    mesh = data["mesh"]
    dtype = _dtype(data["dtype"])
    return PlanSpec(
        model=data["model"]["name"],
        tp=mesh["tp"],
        pp=mesh["pp"],
        sub_axes=mesh["sub_axes"],
        pad_sequence=data["pad_sequence"],
        dtype=dtype,
        parameters={name: _parameter(name, entry) for name, entry in data["parameters"].items()},
        buffers={name: _dtype(entry["dtype"]) for name, entry in data["buffers"].items()},
        ties=tuple(Tie(tie["parameter"], tuple(tie["stages"])) for tie in data["ties"]),
        stages=tuple(_stage(stage, dtype) for stage in data["stages"]),
        guards=tuple(_guard(guard) for guard in data["guards"]),
        shortest_sequence=data.get("shortest_sequence", 1),
        masked_rows_see_padding=data.get("masked_rows_see_padding", False),
        estimates=_estimates(data["estimates"]) if data["estimates"] else None,
    )


def _parameter(name: str, entry: Mapping[str, Any]) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(entry["shape"]),
        stages=tuple(entry["stages"]),
        aliases=tuple(entry["aliases"]),
        requires_grad=entry["requires_grad"],
        shard=None if entry["shard"] is None else ShardMap.parse(entry["shard"]),
        grad_reduce=tuple(entry["grad_reduce"]),
        init=entry["init"],
    )


def _stage(entry: Mapping[str, Any], plan_dtype: torch.dtype) -> StageSpec:
    logits = entry["logits"]
    return StageSpec(
        index=entry["index"],
        batch=tuple(entry["batch"]),
        receives=tuple(_tensor(tensor) for tensor in entry["receives"]),
        sends=tuple(_tensor(tensor) for tensor in entry["sends"]),
        logits=None if logits is None else _logits(logits, plan_dtype),
        num_blocks=entry.get("num_blocks"),
    )


def _tensor(entry: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(entry["name"], tuple(entry["shape"]), _dtype(entry["dtype"]))


def _logits(entry: Mapping[str, Any], plan_dtype: torch.dtype) -> LogitsSpec:
    shard = entry["shard"]
    dtype = _dtype(entry["dtype"]) if "dtype" in entry else plan_dtype
    return LogitsSpec(tuple(entry["shape"]), dtype, None if shard is None else (shard["dim"], shard["axis"]))


def _guard(entry: Mapping[str, Any]) -> Guard:
    if entry.get("drop_when") == "all":
        return Guard(entry["input"], "drop")
    if entry.get("packed_when") == "restarts":
        return Guard(entry["input"], "packed")
    raise ShardcError(f"plan.json: unknown guard {dict(entry)}", "compile the plan again")


def _estimates(entry: Mapping[str, Any]) -> Estimates:
    stages = tuple(
        StageEstimate(stage["parameters"], stage["flops_per_token"], stage["attention_flops_per_token"])
        for stage in entry["stages"]
    )
    return Estimates(entry["sequence"], stages, entry["bubble"])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShardcError(f"plan.json: {name!r} is not a torch dtype", "compile the plan again")
    return dtype
