"""Judges a schedule before anything runs: completeness, order, deadlock, memory high-water and step time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import networkx as nx

from shardc.pipeline.schedule import Action, Kind, Schedule
from shardc.runtime.errors import ShardcError


def check_schedule(schedule: Schedule) -> None:
    """Proves that the schedule can run; raises ShardcError that names the offending action or the cycle.

    1. Rank k holds stage k: one F and one B of each micro-batch, and one end of each transfer to a neighbour.
    2. On each rank a RECV precedes its use, a SEND follows its computation, and B follows F.
    3. Both ends of each channel list the messages in the same order.
    4. No deadlock, neither with sends that return at once nor with sends that wait for their receives.
    """
    _check_completeness(schedule)
    _check_program_order(schedule)
    _check_message_order(schedule)
    _check_deadlock(schedule)


def peak_alive(schedule: Schedule) -> tuple[int, ...]:
    """Memory high-water of each rank, in micro-batches: the most that have had their F and not yet ended their B."""
    peaks = []
    for actions in schedule.ranks:
        alive = peak = 0
        for action in actions:
            alive += {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True, slots=True)
class Span:
    """One computation on the clock of the step, which starts at 0."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The estimated step. `bubble_fraction` is the idle share of all ranks' time; `timelines` has one tuple a rank."""

    step_s: float
    bubble_fraction: float
    timelines: tuple[tuple[Span, ...], ...]


def simulate(schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float]) -> Simulation:
    """Runs a schedule that passed `check_schedule` on paper; transfers take no time and sends do not wait.

    forward_s, backward_s: seconds of one micro-batch on each stage. Raises ShardcError when they are not one finite
    number above 0 a stage.
    """
    seconds = {Kind.F: tuple(forward_s), Kind.B: tuple(backward_s)}
    for kind, times in seconds.items():
        num_stages = schedule.num_stages
        if len(times) != num_stages or not all(isfinite(time) and time > 0 for time in times):
            raise ShardcError(
                f"schedule {schedule.name!r}: seconds of {kind} are {times}; valid: {num_stages} numbers above 0",
                "give the seconds of one micro-batch on each stage",
            )
    graph = _action_graph(schedule, sends_wait=False)
    spans: dict[Action, Span] = {}
    for action in nx.topological_sort(graph):
        start_s = max((spans[before].end_s for before in graph.predecessors(action)), default=0.0)
        duration_s = seconds[action.kind][action.stage] if action.kind in seconds else 0.0
        spans[action] = Span(action, start_s, start_s + duration_s)
    step_s = max(span.end_s for span in spans.values())
    busy_s = schedule.num_microbatches * sum(map(sum, seconds.values()))
    timelines = tuple(tuple(spans[a] for a in actions if a.kind in seconds) for actions in schedule.ranks)
    return Simulation(step_s, 1 - busy_s / (len(schedule.ranks) * step_s), timelines)


def _refute(schedule: Schedule, reason: str) -> ShardcError:
    """The error of a schedule that cannot run."""
    return ShardcError(
        f"schedule {schedule.name!r} of {schedule.num_stages} stages and {schedule.num_microbatches} micro-batches: "
        f"{reason}",
        "mend the actions of schedule.json, or write the plan again with shardc compile",
    )


def _kinds_of_stage(schedule: Schedule, stage: int) -> list[Kind]:
    """What a stage does with each micro-batch, in an order that is valid for one micro-batch."""
    is_first, is_last = stage == 0, stage == schedule.num_stages - 1
    forward = [*([] if is_first else [Kind.RECV_F]), Kind.F, *([] if is_last else [Kind.SEND_F])]
    backward = [*([] if is_last else [Kind.RECV_B]), Kind.B, *([] if is_first else [Kind.SEND_B])]
    return forward + backward


def _check_completeness(schedule: Schedule) -> None:
    """Obligation 1: each rank holds the actions of its stage, each once, and no others."""
    if len(schedule.ranks) != schedule.num_stages:
        raise _refute(schedule, f"it lists {len(schedule.ranks)} ranks; valid: one a stage")
    for stage, actions in enumerate(schedule.ranks):
        kinds, microbatches = _kinds_of_stage(schedule, stage), range(schedule.num_microbatches)
        seen: set[Action] = set()
        for action in actions:
            if action.stage != stage or action.kind not in kinds or action.microbatch not in microbatches:
                raise _refute(schedule, f"{action} does not belong on rank {stage}")
            if action in seen:
                raise _refute(schedule, f"{action} occurs twice on rank {stage}")
            seen.add(action)
        for action in (Action(stage, kind, microbatch) for microbatch in microbatches for kind in kinds):
            if action not in seen:
                waiting = f", and {action.partner} is left alone" if action.partner else ""
                raise _refute(schedule, f"{action} is missing on rank {stage}{waiting}")


def _check_program_order(schedule: Schedule) -> None:
    """Obligation 2: the actions of one micro-batch on one rank respect what they use."""
    needs = [
        (Kind.RECV_F, Kind.F),
        (Kind.F, Kind.SEND_F),
        (Kind.F, Kind.B),
        (Kind.RECV_B, Kind.B),
        (Kind.B, Kind.SEND_B),
    ]
    for stage, actions in enumerate(schedule.ranks):
        position = {action: index for index, action in enumerate(actions)}
        for microbatch in range(schedule.num_microbatches):
            for before, after in ((Action(stage, a, microbatch), Action(stage, b, microbatch)) for a, b in needs):
                if before in position and after in position and position[before] > position[after]:
                    raise _refute(schedule, f"{after} comes before {before}, which it needs, on rank {stage}")


def _check_message_order(schedule: Schedule) -> None:
    """Obligation 3: per channel (two neighbours, one direction) the n-th receive takes the n-th message sent."""
    for source, target, kind in _channels(schedule):
        sends = [action for action in schedule.ranks[source] if action.kind is kind]
        receives = [action for action in schedule.ranks[target] if action.partner and action.partner.kind is kind]
        for send, receive in zip(sends, receives, strict=True):
            if send.partner != receive:
                raise _refute(schedule, f"rank {target} does {receive} where rank {source} does {send}")


def _channels(schedule: Schedule) -> Iterator[tuple[int, int, Kind]]:
    """(sending rank, receiving rank, kind of the send) of both directions between all neighbours."""
    for upstream, downstream in pairwise(range(schedule.num_stages)):
        yield upstream, downstream, Kind.SEND_F
        yield downstream, upstream, Kind.SEND_B


def _check_deadlock(schedule: Schedule) -> None:
    """Obligation 4: the graph of what waits for what has no cycle, in either model of a send."""
    for sends_wait, model in ((False, "even if sends return at once"), (True, "when sends wait for their receives")):
        graph = _action_graph(schedule, sends_wait=sends_wait)
        if not nx.is_directed_acyclic_graph(graph):
            cycle = [before for before, _ in nx.find_cycle(graph)]
            names = [f"{node}={node.partner}" if sends_wait and node.partner else str(node) for node in cycle]
            raise _refute(schedule, f"deadlock {model}: {' -> '.join([*names, names[0]])}")


def _action_graph(schedule: Schedule, *, sends_wait: bool) -> nx.DiGraph:
    """Edges from each action to those that wait for it: the next one on its rank, and its receive.

    With `sends_wait`, a send and its receive happen together: they are one node, under the name of the send.
    """

    def node(action: Action) -> Action:
        is_receive = action.kind in (Kind.RECV_F, Kind.RECV_B)
        return action.partner if sends_wait and is_receive and action.partner else action

    graph = nx.DiGraph()
    for actions in schedule.ranks:
        graph.add_nodes_from(map(node, actions))
        graph.add_edges_from(pairwise(map(node, actions)))
    if not sends_wait:
        sends = [a for actions in schedule.ranks for a in actions if a.kind in (Kind.SEND_F, Kind.SEND_B)]
        graph.add_edges_from((send, send.partner) for send in sends)
    return graph
