"""schedule.json: what each pp coord does in one call, action by action."""

from __future__ import annotations

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


_COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
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

    def steps(self, coord: int, *, num_microbatches: int, backward: bool) -> list[tuple[Action, ...]]:
        """What a coord does for the first `num_microbatches`: one computation a step, or a run of transfers together.

        Neighbouring transfers go out as one group, because two ranks that first send to each other would wait for
        ever. backward: False leaves out everything but the forward."""
        steps: list[tuple[Action, ...]] = []
        for action in self.ranks[coord]:
            if action.microbatch >= num_microbatches or not (backward or action.kind in _FORWARD_ONLY):
                continue
            if action.kind not in _COMPUTE and steps and steps[-1][0].kind not in _COMPUTE:
                steps[-1] = (*steps[-1], action)
            else:
                steps.append((action,))
        return steps
