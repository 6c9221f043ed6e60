"""schedule.json: what each pp coord does in one call, action by action."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardc.runtime.errors import ShardcError


class Kind(StrEnum):
    """Kinds of actions that the executor runs."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


_FORWARD_ONLY = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage on a micro-batch, written as in torch.distributed.pipelining: 0F1, 1SEND_B0."""

    stage: int
    kind: Kind
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """From "0SEND_F3". Raises ShardcError for a kind that the executor does not run."""
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text)
        if match is None or match[2] not in list(Kind):
            raise ShardcError(
                f"schedule.json: cannot run action {text!r}; kinds: {', '.join(Kind)}",
                "choose gpipe, 1f1b or interleaved",
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions of every pp coord, and the coord that runs each stage."""

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    coord_of_stage: Mapping[int, int]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Schedule:
        """From the parsed schedule.json. Raises ShardcError where a stage runs on no coord or on several."""
        ranks = tuple(tuple(Action.parse(text) for text in actions) for actions in data["ranks"])
        coord_of_stage: dict[int, int] = {}
        for coord, actions in enumerate(ranks):
            for stage in {action.stage for action in actions}:
                if stage in coord_of_stage:
                    raise ShardcError(
                        f"schedule.json: stage {stage} is on pp coords {coord_of_stage[stage]} and {coord}",
                        "compile the plan again",
                    )
                coord_of_stage[stage] = coord
        missing = sorted(set(range(data["stages"])) - set(coord_of_stage))
        if missing:
            raise ShardcError(f"schedule.json: no pp coord runs stages {missing}", "compile the plan again")
        return cls(data["name"], data["microbatches"], ranks, coord_of_stage)

    def actions(self, coord: int, *, num_microbatches: int, backward: bool) -> list[Action]:
        """What a coord does, in order, for the first `num_microbatches`; backward=False keeps the forward alone."""
        return [
            action
            for action in self.ranks[coord]
            if action.microbatch < num_microbatches and (backward or action.kind in _FORWARD_ONLY)
        ]

    def links(self) -> list[tuple[int, int]]:
        """(from, to) pp coords between which something is sent, in a fixed order."""
        coords = [self.coord_of_stage[stage] for stage in sorted(self.coord_of_stage)]
        neighbours = {pair for pair in itertools.pairwise(coords) if pair[0] != pair[1]}
        return sorted(neighbours | {(b, a) for a, b in neighbours})
