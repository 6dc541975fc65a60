"""The job's life on one node: budgets, stop orders, scripts."""

import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.policy import job as p
from hyperpodrun.agent.policy.budget import Total, Window
from hyperpodrun.agent.wire.rungs import Rules, Symptoms


def make(max_restarts: int = 0, pre: bool = False, post: bool = False, node_failures: int | None = None) -> p.Job:
    return p.Job(Total(max_restarts), Window(node_failures, 3600), pre, post)


def test_success_ends_with_0() -> None:
    job = make()
    assert job.handle(p.Begin(), 0) == [p.RunAttempt(0)]
    assert job.handle(p.AttemptOver(0), 1) == [p.End(0)]


def test_failures_inside_the_budget_restart_and_count() -> None:
    job = make(max_restarts=2)
    job.handle(p.Begin(), 0)
    assert job.handle(p.AttemptOver(5), 1) == [p.Restarting(1, free=False), p.RunAttempt(1)]
    assert job.handle(p.AttemptOver(6), 2) == [p.Restarting(0, free=False), p.RunAttempt(2)]
    gives_up, end = job.handle(p.AttemptOver(7), 3)
    assert isinstance(gives_up, p.GivingUp)
    assert end == p.End(7), "the last failure's own code"


def test_final_failure_spends_no_restart() -> None:
    job = make(max_restarts=2)
    job.handle(p.Begin(), 0)
    assert job.handle(p.AttemptOver(127, final=True), 1)[-1] == p.End(127)


def test_port_taken_by_another_program_costs_no_restart_but_is_bounded() -> None:
    job = make(max_restarts=0)
    job.handle(p.Begin(), 0)
    for number in range(1, p.MAX_PORT_RETRIES + 1):
        assert job.handle(p.AttemptOver(1, port_taken=True), 1) == [p.Restarting(0, free=True), p.RunAttempt(number)]
    assert job.handle(p.AttemptOver(1, port_taken=True), 1)[-1] == p.End(1)


def test_stop_wins_over_however_the_workers_ended() -> None:
    job = make(max_restarts=3)
    job.handle(p.Begin(), 0)
    assert job.handle(p.StopSignal(signal.SIGTERM), 1) == [p.StopAttempt(kill=False)]
    assert job.handle(p.AttemptOver(0), 2) == [p.GivingUp("stopped by SIGTERM"), p.End(143)]


def test_second_sigterm_does_not_shorten_the_grace() -> None:
    job = make()
    job.handle(p.Begin(), 0)
    job.handle(p.StopSignal(signal.SIGTERM), 1)
    assert job.handle(p.StopSignal(signal.SIGTERM), 2) == []


def test_second_ctrl_c_kills_at_once_but_an_echo_of_the_first_does_not() -> None:
    job = make()
    job.handle(p.Begin(), 0)
    assert job.handle(p.StopSignal(signal.SIGINT), 10) == [p.StopAttempt(kill=False)]
    assert job.handle(p.StopSignal(signal.SIGINT), 10 + p.SAME_PRESS_S / 2) == []
    assert job.handle(p.StopSignal(signal.SIGINT), 11) == [p.StopAttempt(kill=True)]
    assert job.handle(p.AttemptOver(137), 12)[-1] == p.End(130)


def test_lost_keeper_kills_at_once_even_during_a_stop() -> None:
    job = make()
    job.handle(p.Begin(), 0)
    job.handle(p.StopSignal(signal.SIGINT), 1)
    assert job.handle(p.StopSignal(signal.SIGTERM, at_once=True), 2) == [p.StopAttempt(kill=True)]
    assert job.handle(p.AttemptOver(137), 3)[-1] == p.End(130), "the first order names the code"


def test_pre_train_script_runs_before_every_attempt_and_post_after_success() -> None:
    job = make(max_restarts=1, pre=True, post=True)
    assert job.handle(p.Begin(), 0) == [p.RunScript("pre")]
    assert job.handle(p.ScriptEnded(0), 1) == [p.RunAttempt(0)]
    assert job.handle(p.AttemptOver(3), 2) == [p.Restarting(0, free=False), p.RunScript("pre")]
    assert job.handle(p.ScriptEnded(0), 3) == [p.RunAttempt(1)]
    assert job.handle(p.AttemptOver(0), 4) == [p.RunScript("post")]
    assert job.handle(p.ScriptEnded(0), 5) == [p.End(0)]


def test_failing_scripts_end_the_job_with_their_code() -> None:
    job = make(max_restarts=1, pre=True)
    job.handle(p.Begin(), 0)
    assert job.handle(p.ScriptEnded(4), 1)[-1] == p.End(4)
    job = make(post=True)
    job.handle(p.Begin(), 0)
    job.handle(p.AttemptOver(0), 1)
    assert job.handle(p.ScriptEnded(9), 2)[-1] == p.End(9)


def test_stop_during_a_script_ends_the_script() -> None:
    job = make(pre=True)
    job.handle(p.Begin(), 0)
    assert job.handle(p.StopSignal(signal.SIGTERM), 1) == [p.EndScript(kill=False)]
    assert job.handle(p.ScriptEnded(143), 2)[-1] == p.End(143)


def test_dead_agent_counts_as_a_node_failure_not_as_a_restart() -> None:
    job = p.Job(Total(1), Window(1, 3600), restart_count=2)
    assert job.handle(p.Begin(reborn=True), 0) == [p.RunAttempt(3)]
    assert job.restarts.left == 1
    job = p.Job(Total(1), Window(0, 3600))
    assert job.handle(p.Begin(reborn=True), 0)[-1] == p.End(70)


def test_nothing_happens_after_the_end() -> None:
    job = make()
    job.handle(p.Begin(), 0)
    job.handle(p.AttemptOver(0), 1)
    for event in (p.Begin(), p.AttemptOver(0), p.ScriptEnded(0), p.StopSignal(15)):
        assert job.handle(event, 2) == []


EVENTS = st.one_of(
    st.builds(p.AttemptOver, st.integers(0, 255), st.booleans(), st.booleans()),
    st.builds(p.ScriptEnded, st.integers(0, 255)),
    st.builds(p.StopSignal, st.sampled_from([15, 2, 1]), st.booleans()),
)


@settings(max_examples=400)
@given(
    events=st.lists(st.tuples(EVENTS, st.floats(0, 5)), max_size=40),
    max_restarts=st.integers(0, 4),
    pre=st.booleans(),
    post=st.booleans(),
)
def test_any_order_of_events_keeps_the_invariants(
    events: list[tuple[p.Event, float]], max_restarts: int, pre: bool, post: bool
) -> None:
    job, now_s, ended, attempts, free = make(max_restarts, pre, post), 0.0, 0, 0, 0
    stopped: int | None = None
    effects = job.handle(p.Begin(), now_s)
    for event, step_s in events:
        for effect in effects:
            attempts += isinstance(effect, p.RunAttempt)
            free += isinstance(effect, p.Restarting) and effect.free
            if isinstance(effect, p.End):
                ended += 1
                assert stopped is None or effect.code == 128 + stopped
            if isinstance(effect, p.RunAttempt | p.RunScript):
                assert stopped is None, "something was started after a stop order"
        job.validate()
        now_s += step_s
        if isinstance(event, p.StopSignal) and stopped is None and job.state is not p.State.ENDED:
            stopped = event.number
        effects = job.handle(event, now_s)
    assert ended <= 1
    assert attempts <= 1 + max_restarts + free
    assert free <= p.MAX_PORT_RETRIES


def in_place(**rules: object) -> p.Job:
    limit = rules.get("max_restarts")
    return p.Job(Total(limit or 0), Window(None, 3600), rules=Rules(inprocess=True, **rules))  # type: ignore[arg-type]


HEALABLE, UNHEALABLE = Symptoms(rank=1, in_place=True), Symptoms(rank=1, in_place=False)


def test_generation_that_can_be_healed_in_place_is() -> None:
    job = in_place(max_restarts=2)
    job.handle(p.Begin(), 0)
    told, run = job.handle(p.AttemptBack(1, HEALABLE), 1)
    assert told == p.Restarting(1, free=False, in_place=True, generation=1)
    assert run == p.RunAttempt(1, in_place=True)
    assert job.handle(p.AttemptOver(0), 2) == [p.End(0)]


def test_without_a_number_of_restarts_none_is_told() -> None:
    job = in_place()
    job.handle(p.Begin(), 0)
    assert job.handle(p.AttemptBack(1, HEALABLE), 1)[0] == p.Restarting(None, free=False, in_place=True, generation=1)


def test_spent_budget_ends_what_waits_at_the_barrier_and_then_the_job() -> None:
    job = in_place(max_restarts=1)
    job.handle(p.Begin(), 0)
    job.handle(p.AttemptBack(1, HEALABLE), 1)
    assert job.handle(p.AttemptBack(3, HEALABLE), 2) == [p.StopAttempt(kill=False, part=True)]
    assert job.handle(p.AttemptOver(3, symptoms=HEALABLE), 3) == [p.GivingUp("the one restart is spent"), p.End(3)]


def test_higher_rung_restarts_processes_and_is_counted_once() -> None:
    job = in_place(max_restarts=5)
    job.handle(p.Begin(), 0)
    asked = Symptoms(rank=1, in_place=True, rung="all")
    assert job.handle(p.AttemptBack(1, asked), 1) == [p.StopAttempt(kill=False, part=True)]
    assert job.handle(p.AttemptOver(1, symptoms=asked), 2) == [p.Restarting(4, free=False), p.RunAttempt(1)]


def test_every_rung_is_climbed_by_a_rank_that_never_gets_anywhere() -> None:
    job = in_place()
    effects = job.handle(p.Begin(), 0)
    rungs = []
    symptoms = Symptoms(rank=1, in_place=True, progressed=False)
    for now_s in range(1, 20):
        effects = job.handle(p.AttemptBack(1, symptoms), now_s)
        if effects == [p.StopAttempt(kill=False, part=True)]:
            effects = job.handle(p.AttemptOver(1, symptoms=symptoms), now_s)
        if isinstance(effects[-1], p.End):
            rungs.append("end")
            break
        rungs.append("in place" if effects[-1].in_place else "processes")  # type: ignore[union-attr]
    assert rungs[0] == "in place" and rungs[-1] == "end", rungs
    assert "processes" in rungs, rungs


def test_failure_that_cannot_be_healed_in_place_restarts_processes() -> None:
    job = in_place(max_restarts=1)
    job.handle(p.Begin(), 0)
    assert job.handle(p.AttemptOver(9, symptoms=UNHEALABLE), 1) == [p.Restarting(0, free=False), p.RunAttempt(1)]


def test_stop_order_at_the_barrier_wins() -> None:
    job = in_place(max_restarts=5)
    job.handle(p.Begin(), 0)
    assert job.handle(p.StopSignal(signal.SIGTERM), 1) == [p.StopAttempt(kill=False)]
    assert job.handle(p.AttemptBack(1, HEALABLE), 2) == []
    assert job.handle(p.AttemptOver(1), 3)[-1] == p.End(143)
