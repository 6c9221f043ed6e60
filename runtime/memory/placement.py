"""Which kinds of state are whole on every dp rank, and which are one shard a rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.runtime.errors import ShardcError


@dataclass(frozen=True, slots=True)
class Placement:
    """True: sharded over dp. False: every rank holds the whole.

    Gradients that are sharded leave in each backward pass; whole ones may first add up over several (`no_sync`).
    States are the master weights and what the optimizer keeps of each.
    """

    name: str
    parameters: bool
    gradients: bool
    states: bool


def find_placement(name: str) -> Placement:
    """The placement called "ddp", "zero1", "zero2" or "zero3". Raises ShardcError for another name."""
    if name not in PLACEMENTS:
        # Plan.build knows one more, which is torch's own.
        raise ShardcError(
            f"placement {name!r} is unknown; valid: {', '.join(PLACEMENTS)}, fsdp", "use placement='zero1'"
        )
    return PLACEMENTS[name]


PLACEMENTS = {
    place.name: place
    for place in (
        Placement("ddp", parameters=False, gradients=False, states=False),
        Placement("zero1", parameters=False, gradients=False, states=True),
        Placement("zero2", parameters=False, gradients=True, states=True),
        Placement("zero3", parameters=True, gradients=True, states=True),
    )
}
