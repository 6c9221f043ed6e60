"""Pipeline schedules as data: actions in the notation of torch.distributed.pipelining, one list a rank."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardc.runtime.errors import ShardcError


class Kind(StrEnum):
    """What an action does with its stage and micro-batch."""

    F = "F"  # forward
    B = "B"  # backward, inputs and weights
    I = "I"  # noqa: E741  backward of the inputs only
    W = "W"  # backward of the weights only
    SEND_F = "SEND_F"  # outputs, to the next stage
    RECV_F = "RECV_F"  # inputs, from the previous stage
    SEND_B = "SEND_B"  # gradients of the inputs, to the previous stage
    RECV_B = "RECV_B"  # gradients of the outputs, from the next stage


_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
_NUMBER = "(0|[1-9][0-9]*)"
_NOTATION = re.compile(f"{_NUMBER}((?:SEND_|RECV_)?[FB]|[IW]){_NUMBER}")


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """One step of one rank; prints as `<stage><kind><micro-batch>`: `0F0`, `1RECV_F3`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    __repr__ = __str__

    @staticmethod
    def parse(text: str) -> "Action":
        """Reads what `str(action)` prints. Raises ShardcError that quotes any other text."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise ShardcError(
                f"{text!r} is no pipeline action; valid: <stage><kind><micro-batch> with kind {', '.join(Kind)}",
                "write for example 0F0, 0SEND_F0 or 1RECV_F0",
            )
        stage, kind, microbatch = match.groups()
        return Action(int(stage), Kind(kind), int(microbatch))

    @property
    def partner(self) -> "Action | None":
        """The other end of this transfer (`1RECV_F3` for `0SEND_F3`); None for a computation."""
        if self.kind not in _OTHER_END:
            return None
        kind, step = _OTHER_END[self.kind]
        return Action(self.stage + step, kind, self.microbatch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank of the pp axis does, in order; entry k of `ranks` belongs to pp coord k, which holds stage k.

    Raises ShardcError when a size is not a positive int. `schedule_check.check_schedule` judges the actions.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for what, size in (("stages", self.num_stages), ("micro-batches", self.num_microbatches)):
            if type(size) is not int or size < 1:
                raise ShardcError(
                    f"schedule {self.name!r}: the number of {what} is {size!r}; valid: 1 or more",
                    "set --pp and --microbatches to at least 1",
                )

    def keep_first(self, num_microbatches: int) -> "Schedule":
        """The schedule of a batch that fills only the first `num_microbatches`: other actions are left out."""
        assert num_microbatches <= self.num_microbatches, (num_microbatches, self.num_microbatches)
        ranks = tuple(tuple(a for a in actions if a.microbatch < num_microbatches) for actions in self.ranks)
        return Schedule(self.name, self.num_stages, num_microbatches, ranks)

    def to_json(self) -> str:
        """The text of schedule.json: keys sorted, one rank a line, newline at the end."""
        rows = ",\n".join(f"    {json.dumps([str(a) for a in actions])}" for actions in self.ranks)
        return (
            f'{{\n  "microbatches": {self.num_microbatches},\n  "name": {json.dumps(self.name)},\n'
            f'  "ranks": [\n{rows}\n  ],\n  "stages": {self.num_stages}\n}}\n'
        )

    @staticmethod
    def from_json(text: str) -> "Schedule":
        """Reads the text of schedule.json. Raises ShardcError when it has another form."""
        try:
            fields = json.loads(text)
            name, stages, microbatches = fields["name"], fields["stages"], fields["microbatches"]
            ranks = tuple(tuple(Action.parse(a) for a in actions) for actions in fields["ranks"])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardcError(
                f"schedule.json cannot be read ({type(error).__name__}: {error}); valid: an object with name, stages, "
                "microbatches and ranks, a list of lists of actions",
                "write the plan again with shardc compile",
            ) from error
        return Schedule(name, stages, microbatches, ranks)

    def to_csv(self) -> str:
        """One line a rank, actions separated by commas: the `compute_comms` form of torch.distributed.pipelining."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    @staticmethod
    def from_csv(text: str, *, name: str) -> "Schedule":
        """Reads what `to_csv` writes; the sizes are one more than the largest numbers. Raises ShardcError."""
        ranks = tuple(tuple(Action.parse(cell.strip()) for cell in row) for row in csv.reader(io.StringIO(text)))
        actions = [action for row in ranks for action in row]
        num_stages = 1 + max((a.stage for a in actions), default=-1)
        num_microbatches = 1 + max((a.microbatch for a in actions), default=-1)
        return Schedule(name, num_stages, num_microbatches, ranks)


def insert_transfers(compute: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Adds the sends and receives to the computations of each rank; stage k is on rank k.

    Before: F and B only. After: each RECV stands right before the computation that uses it, each SEND right after the
    computation that made it. Where one gap holds both, the SEND is first, with one exception: a rank that would send a
    gradient back and then receive an activation from the same neighbour receives first, because in that gap of 1F1B the
    neighbour does SEND_F, then RECV_B. So both ends of each pair of neighbours list their messages in one order, and
    sends that block until they are received cannot deadlock (`schedule_check` proves it for each schedule).

    An executor may start all transfers between two computations as one batch (SEND_F with RECV_B on the upstream rank,
    RECV_F with SEND_B on the downstream one) or wait for a send later than here: both only remove waits, so neither can
    bring a deadlock. It must start the transfers of a pair of neighbours in the order of the list.
    """
    last_stage = len(compute) - 1
    return tuple(_with_transfers(actions, last_stage) for actions in compute)


def _with_transfers(compute: Sequence[Action], last_stage: int) -> tuple[Action, ...]:
    """The computations of one rank with their transfers; see insert_transfers."""
    actions: list[Action] = []
    for action in compute:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        has_source = stage > 0 if kind is Kind.F else stage < last_stage
        has_target = stage < last_stage if kind is Kind.F else stage > 0
        if has_source:
            is_exchange = kind is Kind.F and bool(actions) and actions[-1].kind is Kind.SEND_B
            position = len(actions) - 1 if is_exchange else len(actions)
            actions.insert(position, Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, microbatch))
        actions.append(action)
        if has_target:
            actions.append(Action(stage, Kind.SEND_F if kind is Kind.F else Kind.SEND_B, microbatch))
    return tuple(actions)
