"""Budgets of restarts and node failures."""

from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.policy.budget import Total, Window


def test_total_counts_over_the_life_of_the_job() -> None:
    total = Total(2, used=1)
    assert total.left == 1
    assert total.spend()
    assert not total.spend()
    assert total.used == 2


def test_window_forgets_what_is_old_enough() -> None:
    window = Window(1, window_s=10)
    assert window.spend(0)
    assert not window.spend(9)
    assert window.spend(10)


def test_window_remembers_what_earlier_agents_took() -> None:
    assert Window(2, window_s=10, spent_s=(1, 2)).spend(11.5)
    assert not Window(2, window_s=10, spent_s=(1, 2)).spend(10.5)


@given(limit=st.integers(0, 5), steps_s=st.lists(st.floats(0, 20), max_size=60))
def test_no_stretch_of_the_window_holds_more_than_the_limit(limit: int, steps_s: list[float]) -> None:
    window, now_s, spent_s = Window(limit, window_s=30), 0.0, []
    for step_s in steps_s:
        now_s += step_s
        if window.spend(now_s):
            spent_s.append(now_s)
    for start_s in spent_s:
        assert sum(start_s <= when_s < start_s + 30 for when_s in spent_s) <= limit


def test_no_limit_is_no_limit() -> None:
    window = Window(None, window_s=1)
    assert all(window.spend(0) for _ in range(1000))
