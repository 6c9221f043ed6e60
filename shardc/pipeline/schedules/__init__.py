"""The schedules by name: each file is a pure function (stages, micro-batches) -> computations of each rank."""

from collections.abc import Callable

from shardc.pipeline.schedule import Action, Schedule, insert_transfers
from shardc.pipeline.schedules.gpipe import gpipe
from shardc.pipeline.schedules.one_f_one_b import one_f_one_b
from shardc.runtime.errors import ShardcError

SCHEDULES: dict[str, Callable[[int, int], list[list[Action]]]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
}


def build_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule `name` with its sends and receives.

    Raises ShardcError for an unknown name, or for fewer than one stage or micro-batch.
    """
    if name not in SCHEDULES:
        raise ShardcError(
            f"schedule {name!r} is unknown; valid: {', '.join(sorted(SCHEDULES))}",
            "use --schedule 1f1b, which needs the least memory",
        )
    compute = SCHEDULES[name](num_stages, num_microbatches)
    return Schedule(name, num_stages, num_microbatches, insert_transfers(compute))
