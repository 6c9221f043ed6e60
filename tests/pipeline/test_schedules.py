"""Every schedule is complete, ordered, free of deadlock, and as short and as frugal as its paper says."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardc import ShardcError
from shardc.pipeline.schedule import Action, Kind, Schedule
from shardc.pipeline.schedule_check import Span, check_schedule, peak_alive, simulate
from shardc.pipeline.schedules import SCHEDULES, build_schedule

EXPECTED = {
    ("gpipe", 1, 2): ["0F0 0F1 0B0 0B1"],
    ("gpipe", 3, 2): [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F0 2F0 2RECV_F1 2F1 2B0 2SEND_B0 2B1 2SEND_B1",
    ],
    ("1f1b", 1, 2): ["0F0 0B0 0F1 0B1"],
    ("1f1b", 2, 3): [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
    ],
    ("1f1b", 3, 1): [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2F0 2B0 2SEND_B0",
    ],
    ("1f1b", 3, 4): [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0F3 0SEND_F3 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1RECV_F2 1SEND_B0 1F2 1SEND_F2 1RECV_B1 1B1 "
        "1RECV_F3 1SEND_B1 1F3 1SEND_F3 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3",
        "2RECV_F0 2F0 2B0 2RECV_F1 2SEND_B0 2F1 2B1 2RECV_F2 2SEND_B1 2F2 2B2 2RECV_F3 2SEND_B2 2F3 2B3 2SEND_B3",
    ],
}

names = st.sampled_from(sorted(SCHEDULES))
num_stages_up_to_8 = st.integers(1, 8)
num_microbatches_up_to_16 = st.integers(1, 16)
schedules = st.builds(build_schedule, names, num_stages_up_to_8, num_microbatches_up_to_16)
schedules_with_a_choice = st.builds(build_schedule, names, st.integers(2, 8), st.integers(2, 16))
repeatable = settings(derandomize=True, deadline=None, database=None)


def read(*rows: str, num_microbatches: int = 2) -> Schedule:
    """A schedule from one line of actions a rank."""
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("hand", len(rows), num_microbatches, ranks)


def with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def swapped(schedule: Schedule, rank: int, one: Action, other: Action) -> Schedule:
    exchange = {one: other, other: one}
    return with_rank(schedule, rank, [exchange.get(action, action) for action in schedule.ranks[rank]])


def refutation(schedule: Schedule) -> str:
    with pytest.raises(ShardcError) as refused:
        check_schedule(schedule)
    return refused.value.problem.partition("micro-batches: ")[2]


# What the generators build


@pytest.mark.parametrize("key", EXPECTED, ids=lambda key: "{} of {} stages, {} micro-batches".format(*key))
def test_actions_are_those_written_by_hand(key):
    assert [" ".join(map(str, actions)) for actions in build_schedule(*key).ranks] == EXPECTED[key]


@repeatable
@given(schedules)
def test_every_schedule_passes_the_check(schedule):
    check_schedule(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_leaving_out_the_last_microbatches_gives_a_valid_schedule(name, num_stages):
    shorter = {size: build_schedule(name, num_stages, size) for size in range(1, 17)}
    for schedule in shorter.values():
        check_schedule(schedule)
        for kept in range(1, schedule.num_microbatches + 1):
            assert schedule.keep_first(kept) == shorter[kept]


@repeatable
@given(num_stages_up_to_8, num_microbatches_up_to_16)
def test_1f1b_keeps_no_more_alive_than_the_stages_that_follow(num_stages, num_microbatches):
    peaks = peak_alive(build_schedule("1f1b", num_stages, num_microbatches))
    assert peaks == tuple(min(num_stages - stage, num_microbatches) for stage in range(num_stages))


@repeatable
@given(num_stages_up_to_8, num_microbatches_up_to_16)
def test_gpipe_keeps_all_alive(num_stages, num_microbatches):
    assert peak_alive(build_schedule("gpipe", num_stages, num_microbatches)) == (num_microbatches,) * num_stages


@repeatable
@given(schedules, st.sampled_from([0.5, 1.0, 2.0]))
def test_bubble_and_step_time_are_those_of_the_papers(schedule, backward_s):
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    simulation = simulate(schedule, [1.0] * stages, [backward_s] * stages)
    assert simulation.step_s == pytest.approx((microbatches + stages - 1) * (1 + backward_s))
    assert simulation.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_timelines_of_unequal_stages():
    simulation = simulate(build_schedule("1f1b", 2, 2), forward_s=[1.0, 2.0], backward_s=[3.0, 4.0])
    spans = {
        0: [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 7.0, 10.0), ("0B1", 13.0, 16.0)],
        1: [("1F0", 1.0, 3.0), ("1B0", 3.0, 7.0), ("1F1", 7.0, 9.0), ("1B1", 9.0, 13.0)],
    }
    assert simulation.timelines == tuple(tuple(Span(Action.parse(a), s, e) for a, s, e in spans[r]) for r in (0, 1))
    assert simulation.step_s == 16.0
    assert simulation.bubble_fraction == pytest.approx(1 - 20 / 32)


# What the check refutes


@repeatable
@given(schedules, st.data())
def test_a_dropped_action_is_named(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    dropped = data.draw(st.sampled_from(schedule.ranks[rank]))
    broken = with_rank(schedule, rank, [action for action in schedule.ranks[rank] if action != dropped])
    waiting = f", and {dropped.partner} is left alone" if dropped.partner else ""
    assert refutation(broken) == f"{dropped} is missing on rank {rank}{waiting}"


@repeatable
@given(schedules_with_a_choice, st.data())
def test_two_swapped_receives_are_named(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    kinds = [Kind.RECV_F] * (rank > 0) + [Kind.RECV_B] * (rank < schedule.num_stages - 1)
    kind = data.draw(st.sampled_from(kinds))
    early, late = (
        Action(rank, kind, microbatch)
        for microbatch in sorted(
            data.draw(st.sets(st.integers(0, schedule.num_microbatches - 1), min_size=2, max_size=2))
        )
    )
    user = Action(rank, Kind.F if kind is Kind.RECV_F else Kind.B, early.microbatch)
    expected = f"{user} comes before {early}, which it needs, on rank {rank}"
    assert refutation(swapped(schedule, rank, early, late)) == expected


@repeatable
@given(schedules, st.data())
def test_a_backward_swapped_with_its_forward_is_named(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    microbatch = data.draw(st.integers(0, schedule.num_microbatches - 1))
    forward, backward = Action(rank, Kind.F, microbatch), Action(rank, Kind.B, microbatch)
    message = refutation(swapped(schedule, rank, forward, backward))
    assert str(forward) in message or str(backward) in message


GPIPE_FIRST = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
GPIPE_LAST = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
REFUTED = {
    "another rank's stage": ((GPIPE_FIRST + " 1F0", GPIPE_LAST), "1F0 does not belong on rank 0"),
    "split backward": ((GPIPE_FIRST, GPIPE_LAST + " 1W0"), "1W0 does not belong on rank 1"),
    "a micro-batch too many": ((GPIPE_FIRST + " 0F2", GPIPE_LAST), "0F2 does not belong on rank 0"),
    "a send from the last stage": ((GPIPE_FIRST, GPIPE_LAST + " 1SEND_F0"), "1SEND_F0 does not belong on rank 1"),
    "a computation twice": ((GPIPE_FIRST + " 0B1", GPIPE_LAST), "0B1 occurs twice on rank 0"),
    "the last stage goes back without its forward": (
        (GPIPE_FIRST, "1RECV_F0 1F0 1RECV_F1 1B1 1F1 1B0 1SEND_B0 1SEND_B1"),
        "1B1 comes before 1F1, which it needs, on rank 1",
    ),
    "a send before its computation": (
        ("0SEND_F0 0F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", GPIPE_LAST),
        "0SEND_F0 comes before 0F0, which it needs, on rank 0",
    ),
    "receives in another order than sends": (
        (GPIPE_FIRST, "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"),
        "rank 1 does 1RECV_F1 where rank 0 does 0SEND_F0",
    ),
    "gradients sent in another order than received": (
        (GPIPE_FIRST, "1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0"),
        "rank 0 does 0RECV_B0 where rank 1 does 1SEND_B1",
    ),
    "each rank waits for what the other does later": (
        ("0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", GPIPE_LAST),
        "deadlock even if sends return at once: "
        "0RECV_B0 -> 0B0 -> 0F1 -> 0SEND_F1 -> 1RECV_F1 -> 1F1 -> 1B0 -> 1SEND_B0 -> 0RECV_B0",
    ),
    "1f1b whose ranks both send first": (
        (GPIPE_FIRST, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
        "deadlock when sends wait for their receives: 0SEND_F1=1RECV_F1 -> 1SEND_B0=0RECV_B0 -> 0SEND_F1=1RECV_F1",
    ),
}


@pytest.mark.parametrize("rows, expected", REFUTED.values(), ids=REFUTED)
def test_check_refutes(rows, expected):
    schedule = read(*rows)
    assert refutation(schedule) == expected


def finishes_with_blocking_sends(schedule: Schedule) -> bool:
    """Plays the ranks: a computation always goes on, a transfer only when both ends have reached it."""
    todo = [list(reversed(actions)) for actions in schedule.ranks]
    while any(todo):
        heads = {actions[-1] for actions in todo if actions}
        ready = {head for head in heads if head.partner is None or head.partner in heads}
        if not ready:
            return False
        for actions in todo:
            if actions and actions[-1] in ready:
                actions.pop()
    return True


@settings(repeatable, max_examples=300)
@given(names, st.integers(2, 4), st.integers(1, 5), st.data())
def test_check_and_play_agree_about_deadlock(name, num_stages, num_microbatches, data):
    schedule = build_schedule(name, num_stages, num_microbatches)
    for _ in range(data.draw(st.integers(0, 4))):
        rank = data.draw(st.integers(0, num_stages - 1))
        actions = schedule.ranks[rank]
        index = data.draw(st.integers(0, len(actions) - 2))
        if actions[index].microbatch != actions[index + 1].microbatch:
            schedule = swapped(schedule, rank, actions[index], actions[index + 1])
    try:
        check_schedule(schedule)
        assert finishes_with_blocking_sends(schedule)
    except ShardcError as refused:
        assume("deadlock" in refused.problem)
        assert not finishes_with_blocking_sends(schedule)


def test_refutation_names_schedule_sizes_and_advice():
    with pytest.raises(ShardcError) as refused:
        check_schedule(replace(build_schedule("gpipe", 2, 2), num_stages=3))
    assert str(refused.value) == (
        "schedule 'gpipe' of 3 stages and 2 micro-batches: it lists 2 ranks; valid: one a stage\n"
        "  mend the actions of schedule.json, or write the plan again with shardc compile"
    )


# What users may get wrong


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("zigzag", 2, 4), "schedule 'zigzag' is unknown; valid: 1f1b, gpipe"),
        (("1f1b", 2, 0), "schedule '1f1b': the number of micro-batches is 0; valid: 1 or more"),
        (("gpipe", 2, -1), "schedule 'gpipe': the number of micro-batches is -1; valid: 1 or more"),
        (("1f1b", 0, 4), "schedule '1f1b': the number of stages is 0; valid: 1 or more"),
    ],
)
def test_build_refuses(arguments, expected):
    with pytest.raises(ShardcError) as refused:
        build_schedule(*arguments)
    assert refused.value.problem == expected


@pytest.mark.parametrize("times", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_simulate_refuses_times_that_are_not_one_positive_number_a_stage(times):
    with pytest.raises(ShardcError) as refused:
        simulate(build_schedule("1f1b", 2, 4), [1.0, 1.0], times)
    assert refused.value.problem == f"schedule '1f1b': seconds of B are {tuple(times)}; valid: 2 numbers above 0"


# Notation and files


@pytest.mark.parametrize("kind", Kind)
def test_an_action_prints_and_parses(kind):
    action = Action(12, kind, 30)
    assert str(action) == repr(action) == f"12{kind}30"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "0F", "F0", "0f0", "0SEND0", "0SEND_I0", "01F0", " 0F0", "0F0 ", "-1F0", "0F\u0661"]
)
def test_parse_refuses_other_text(text):
    with pytest.raises(ShardcError) as refused:
        Action.parse(text)
    assert refused.value.problem == (
        f"{text!r} is no pipeline action; valid: <stage><kind><micro-batch> with kind "
        "F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B"
    )


@pytest.mark.parametrize(
    "one, other", [("0SEND_F3", "1RECV_F3"), ("1SEND_B3", "0RECV_B3")], ids=["activations", "gradients"]
)
def test_partner_is_the_other_end_of_a_transfer(one, other):
    assert (Action.parse(one).partner, Action.parse(other).partner) == (Action.parse(other), Action.parse(one))
    assert Action.parse("0F3").partner is None


@repeatable
@given(schedules)
def test_json_and_csv_round_trip(schedule):
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


def test_text_of_the_files():
    schedule = build_schedule("1f1b", 2, 1)
    assert schedule.to_json() == (
        '{\n  "microbatches": 1,\n  "name": "1f1b",\n  "ranks": [\n'
        '    ["0F0", "0SEND_F0", "0RECV_B0", "0B0"],\n    ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]\n'
        '  ],\n  "stages": 2\n}\n'
    )
    assert schedule.to_csv() == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{", "schedule.json cannot be read (JSONDecodeError: Expecting property name"),
        ("[]", "schedule.json cannot be read (TypeError: list indices must be integers"),
        ('{"name": "1f1b", "stages": 1}', "schedule.json cannot be read (KeyError: 'microbatches')"),
        ('{"name": "x", "stages": 1, "microbatches": 1, "ranks": [["0G0"]]}', "'0G0' is no pipeline action"),
        ('{"name": "x", "stages": "1", "microbatches": 1, "ranks": []}', "schedule 'x': the number of stages is '1'"),
    ],
)
def test_from_json_refuses(text, expected):
    with pytest.raises(ShardcError) as refused:
        Schedule.from_json(text)
    assert refused.value.problem.startswith(expected)
