"""The shutdown ladder: only downwards, each rung at its time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.workers.ladder import DUMP_S, KILL_WAIT_S, Ladder, Rung


def walk(ladder: Ladder) -> list[tuple[float, Rung]]:
    """(time, rung) of every rung entered, jumping from deadline to deadline."""
    seen = []
    while ladder.deadline_s is not None:
        now_s = ladder.deadline_s
        rung = ladder.tick(now_s)
        assert rung is not None
        seen.append((now_s, rung))
    return seen


def test_worker_is_asked_then_dumped_then_killed_then_given_up() -> None:
    ladder = Ladder(100.0, timeout_s=30.0)
    assert ladder.rung is Rung.ASK
    killed_s = 130.0 + DUMP_S
    assert walk(ladder) == [(130.0, Rung.DUMP_LATE), (killed_s, Rung.KILL), (killed_s + KILL_WAIT_S, Rung.GIVE_UP)]


def test_hung_worker_is_dumped_before_it_is_asked() -> None:
    ladder = Ladder(0.0, timeout_s=2.0, hung=True)
    assert ladder.rung is Rung.DUMP
    assert [rung for _, rung in walk(ladder)] == [Rung.ASK, Rung.DUMP_LATE, Rung.KILL, Rung.GIVE_UP]


@pytest.mark.parametrize("kill", [False, True])
def test_workers_part_before_all_else_for_as_long_as_they_may_take_to_end(kill: bool) -> None:
    after = Rung.KILL if kill else Rung.ASK
    ladder = Ladder(0.0, timeout_s=2.0, kill=kill, part=True)
    assert (ladder.rung, ladder.deadline_s) == (Rung.PART, 2.0)
    assert ladder.tick(2.0) is after
    ladder = Ladder(0.0, timeout_s=2.0, kill=kill, part=True)
    assert ladder.parted(0.5) is after
    assert ladder.parted(0.6) is None, "once"


def test_nothing_happens_before_the_deadline() -> None:
    ladder = Ladder(0.0, timeout_s=2.0)
    assert ladder.tick(1.999) is None
    assert ladder.rung is Rung.ASK


@pytest.mark.parametrize("hung", [False, True])
def test_hurry_kills_at_once_and_only_once(hung: bool) -> None:
    ladder = Ladder(0.0, timeout_s=30.0, hung=hung)
    assert ladder.hurry(1.0) is Rung.KILL
    assert ladder.deadline_s == 1.0 + KILL_WAIT_S
    assert ladder.hurry(2.0) is None
    assert ladder.deadline_s == 1.0 + KILL_WAIT_S


@given(
    timeout_s=st.floats(0, 1e6),
    hung=st.booleans(),
    kill=st.booleans(),
    part=st.booleans(),
    steps=st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), max_size=40),
)
def test_it_only_goes_down(timeout_s: float, hung: bool, kill: bool, part: bool, steps: list[tuple[float, bool]]) -> None:
    ladder, now_s = Ladder(0.0, timeout_s, hung, kill, part), 0.0
    order = list(Rung)
    for step_s, hurry in steps:
        now_s += step_s
        before = order.index(ladder.rung)
        entered = ladder.hurry(now_s) if hurry else ladder.tick(now_s)
        assert order.index(ladder.rung) >= before
        assert entered is None or (entered is ladder.rung and order.index(entered) > before)
