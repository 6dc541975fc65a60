"""The worker group: every attempt ends exactly once, through a sweep, whatever happens in whatever order."""

import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.workers import group as g
from hyperpodrun.agent.workers import group_words as w
from hyperpodrun.agent.workers import recall

EXIT_5, KILLED = 5 << 8, int(signal.SIGKILL)


def running(nproc: int, shutdown_signal: int = signal.SIGTERM, timeout_s: float = 30.0, skew_s: float = 300.0) -> g.WorkerGroup:
    group = g.WorkerGroup(shutdown_signal, timeout_s, skew_s)
    assert group.handle(w.Start(nproc), 0.0) == [w.MakeProcesses()]
    assert group.handle(w.Started(tuple((i, 100 + i) for i in range(nproc))), 1.0) == []
    return group


def over(effects: list[w.Effect]) -> w.Over:
    (effect,) = effects
    assert isinstance(effect, w.Over)
    return effect


def test_all_done_is_success() -> None:
    group = running(2)
    assert group.handle(w.Exited(1, 0), 2.0) == []
    assert group.handle(w.Exited(0, 0), 3.0) == [w.Sweep()]
    end = over(group.handle(w.Swept(), 3.1))
    assert end.success
    assert [e.local_rank for e in end.ends] == [1, 0]


def test_first_failure_stops_the_others_and_is_told_once() -> None:
    group = running(3)
    effects = group.handle(w.Exited(1, EXIT_5), 2.0)
    assert effects == [w.FirstFailure(w.End(1, 101, EXIT_5, 2.0)), w.Ask((0, 2))]
    assert group.handle(w.Exited(0, KILLED), 2.1) == []
    assert group.handle(w.Exited(2, 0), 2.2) == [w.Sweep()]
    end = over(group.handle(w.Swept(), 2.3))
    assert not end.success
    assert end.cause == "failure"
    assert [e.sent for e in end.ends] == [(), (signal.SIGTERM,), (signal.SIGTERM,)]


def test_lonely_failure_needs_no_ladder() -> None:
    group = running(1)
    effects = group.handle(w.Exited(0, EXIT_5), 2.0)
    assert [type(e) for e in effects] == [w.FirstFailure, w.Sweep]
    assert not over(group.handle(w.Swept(), 2.0)).success


def test_worker_deaf_to_the_signal_is_dumped_and_killed() -> None:
    group = running(2, timeout_s=2.0)
    assert group.handle(w.Stop(), 10.0) == [w.Ask((0, 1))]
    assert group.next_deadline_s() == 12.0
    group.handle(w.Exited(0, 0), 10.5)
    (dump,) = group.handle(w.Tick(), 12.0)
    assert isinstance(dump, recall.DumpStacks)
    assert dump.local_ranks == (1,)
    assert group.handle(w.Tick(), group.next_deadline_s() or 0) == [w.Kill((1,))]
    assert group.handle(w.Exited(1, KILLED), 13.0) == [w.Sweep()]
    assert over(group.handle(w.Swept(), 13.0)).cause == "order"


def test_unkillable_worker_is_given_up_not_waited_for() -> None:
    group = running(1, timeout_s=2.0)
    group.handle(w.Stop(kill=True), 10.0)
    assert group.handle(w.Tick(), group.next_deadline_s() or 0) == [w.Sweep()]
    end = over(group.handle(w.Swept(("process 100 (python, state D)",)), 16.0))
    assert end.ends[0].status is None
    assert end.ends[0].failed
    assert end.left == ("process 100 (python, state D)",)


def test_rank_that_never_ends_after_the_first_is_a_skew() -> None:
    group = running(2, skew_s=5.0)
    group.handle(w.Exited(0, 0), 10.0)
    assert group.next_deadline_s() == 15.0
    (dump,) = group.handle(w.Tick(), 15.0)
    assert isinstance(dump, recall.DumpStacks)
    assert group.handle(w.Tick(), group.next_deadline_s() or 0) == [w.Ask((1,))]
    assert group.handle(w.Exited(1, 0), 16.0) == [w.Sweep()]
    end = over(group.handle(w.Swept(), 16.0))
    assert not end.success, "a hung rank that left with 0 when asked is no success"
    assert end.ends[1].hung


def test_sigkill_as_shutdown_signal_kills_at_once() -> None:
    group = running(2, shutdown_signal=signal.SIGKILL)
    assert group.handle(w.Stop(), 2.0) == [w.Kill((0, 1))]


def test_stop_while_starting_cancels_and_sweeps() -> None:
    group = g.WorkerGroup(signal.SIGTERM, 30, 300)
    group.handle(w.Start(2), 0.0)
    assert group.handle(w.Stop(), 0.5) == [w.CancelStart(), w.Sweep()]
    assert group.handle(w.Started(((0, 100), (1, 101))), 0.6) == [], "a start that was cancelled may still report"
    assert over(group.handle(w.Swept(), 0.7)).cause == "order"


def test_failed_start_is_over_at_once() -> None:
    group = g.WorkerGroup(signal.SIGTERM, 30, 300)
    group.handle(w.Start(2), 0.0)
    end = over(group.handle(w.StartFailed("no such file"), 0.1))
    assert end.start_failure == "no such file"
    assert not end.success


def test_group_can_be_used_again() -> None:
    group = running(1)
    group.handle(w.Exited(0, EXIT_5), 2.0)
    group.handle(w.Swept(), 2.0)
    assert group.handle(w.Start(1), 3.0) == [w.MakeProcesses()]
    group.handle(w.Started(((0, 200),)), 3.1)
    group.handle(w.Exited(0, 0), 4.0)
    assert over(group.handle(w.Swept(), 4.0)).success


EVENTS = st.one_of(
    st.builds(w.Exited, st.integers(0, 3), st.sampled_from([0, EXIT_5, KILLED])),
    st.builds(w.Stop, st.booleans()),
    st.just(w.Tick()),
    st.just(w.Swept()),
    st.just(w.Started(((0, 100), (1, 101), (2, 102)))),
    st.just(w.StartFailed("x")),
)


@settings(max_examples=400)
@given(events=st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=30), fast=st.booleans())
def test_any_order_of_events_keeps_the_invariants_and_can_be_brought_to_an_end(
    events: list[tuple[w.Event, float]], fast: bool
) -> None:
    group, now_s, overs = g.WorkerGroup(signal.SIGKILL if fast else signal.SIGTERM, 5.0, 20.0), 0.0, 0
    group.handle(w.Start(3), now_s)

    def feed(event: w.Event) -> None:
        nonlocal overs
        for effect in group.handle(event, now_s):
            if isinstance(effect, w.Over):
                overs += 1
            if isinstance(effect, w.Ask | w.Kill):
                assert set(effect.local_ranks) <= set(range(3))
                assert effect.local_ranks, "a signal to nobody"
        group.validate()

    for event, step_s in events:
        now_s += step_s
        feed(event)
    feed(w.Started(((0, 100), (1, 101), (2, 102))))
    feed(w.Stop())
    for _ in range(10):
        if group.next_deadline_s() is None:
            break
        now_s = group.next_deadline_s() or 0
        feed(w.Tick())
    feed(w.Swept())
    assert group.state is g.State.OVER
    assert overs == 1


def test_ranks_here_have_the_skew_timeout_once_another_nodes_are_done() -> None:
    group = running(2, skew_s=10.0)
    assert group.next_deadline_s() is None
    assert group.handle(w.OthersDone(), 5.0) == []
    assert group.handle(w.Exited(0, 0), 7.0) == []
    assert group.next_deadline_s() == 15.0, "the first of all counts"
    (dump,) = group.handle(w.Tick(), 15.0)
    assert isinstance(dump, recall.DumpStacks) and dump.local_ranks == (1,)
