"""Workers brought back in place: any order of events comes to the barrier or to the end, and nobody is lost or doubled."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.wire import link
from hyperpodrun.agent.workers import group as g
from hyperpodrun.agent.workers import group_words as w
from hyperpodrun.agent.workers import recall

EXIT_5, KILLED = 5 << 8, int(signal.SIGKILL)
ABORT_S, ALL_S = 20.0, 40.0
FAULT = link.Fault(0, "ValueError", "ValueError: boom", "Traceback")


def fresh(shutdown_signal: int = signal.SIGTERM, skew_s: float = 300.0) -> g.WorkerGroup:
    return g.WorkerGroup(shutdown_signal, 5.0, skew_s, recall.Recall(ABORT_S, ALL_S))


def inside(nproc: int = 3, skew_s: float = 300.0) -> g.WorkerGroup:
    """A group whose ranks are all inside generation 0."""
    group = fresh(skew_s=skew_s)
    group.handle(w.Start(nproc), 0.0)
    group.handle(w.Started(tuple((rank, 100 + rank) for rank in range(nproc))), 0.0)
    for rank in range(nproc):
        assert group.handle(w.Said(rank, link.Hello(rank, 0, restartable=True)), 1.0) == []
        effects = group.handle(w.Said(rank, link.AtBarrier(-1)), 1.0)
        assert effects[0] == recall.Enter((rank,))
        assert (recall.AllIn() in effects) == (rank == nproc - 1)
    return group


def kinds(effects: list[w.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_exception_brings_all_to_the_barrier_and_all_enter_the_next_generation() -> None:
    group = inside()
    effects = group.handle(w.Said(1, FAULT), 2.0)
    assert kinds(effects) == ["FirstFailure", "Interrupt"]
    assert effects[1].local_ranks == (0, 1, 2)
    assert kinds(group.handle(w.Said(0, link.Fault(0, "RuntimeError", "Connection closed by peer")), 2.1)) == ["FurtherFailure"]
    for rank in (1, 0):
        assert group.handle(w.Said(rank, link.AtBarrier(0)), 2.2) == []
    (back,) = group.handle(w.Said(2, link.AtBarrier(0)), 2.3)
    assert isinstance(back, w.Back)
    assert [end.local_rank for end in back.failures] == [1, 0], "the order in which they failed"
    assert (back.cause, back.kept) == ("failure", (0, 1, 2))
    assert group.handle(w.Reenter(1), 3.0) == [recall.Enter((0, 1, 2)), recall.AllIn()]
    assert group.state is g.State.RUNNING


def test_killed_rank_alone_is_swept_and_made_anew() -> None:
    group = inside()
    effects = group.handle(w.Exited(1, KILLED), 2.0)
    assert kinds(effects) == ["FirstFailure", "Interrupt", "SweepAlone"]
    assert effects[1].local_ranks == (0, 2)
    for rank in (0, 2):
        group.handle(w.Said(rank, link.AtBarrier(0)), 2.1)
    (back,) = group.handle(w.SweptAlone((1,)), 2.2)
    assert isinstance(back, w.Back)
    assert group.handle(w.Reenter(1), 2.3) == [recall.Enter((0, 2)), w.MakeProcesses((1,))]
    assert group.handle(w.Started(((1, 201),)), 2.4) == []
    group.handle(w.Said(1, link.Hello(1, 1, restartable=True)), 2.5)
    assert group.handle(w.Said(1, link.AtBarrier(-1)), 2.5) == [recall.Enter((1,)), recall.AllIn()]


def test_rank_that_does_not_come_is_dumped_then_killed_alone() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 2.0)
    group.handle(w.Said(0, link.AtBarrier(0)), 2.1)
    now_s = 2.0
    while now_s < 2.0 + ABORT_S - 1:
        now_s += 1.0
        assert group.handle(w.Said(1, link.Beat(0, "aborting")), now_s) == [], "it lives, it may take its time"
        assert group.handle(w.Tick(), now_s) == []
    (dump,) = group.handle(w.Tick(), 2.0 + ABORT_S)
    assert dump.local_ranks == (1,)
    assert "--abort-timeout" in dump.why
    assert group.handle(w.Tick(), group.next_deadline_s() or 0) == [recall.KillAlone((1,))]
    assert group.handle(w.Exited(1, KILLED), 24.0) == [recall.SweepAlone((1,))]
    (back,) = group.handle(w.SweptAlone((1,)), 24.1)
    assert [end.local_rank for end in back.failures] == [0, 1]


def test_silent_link_after_the_interrupt_means_dump_and_kill() -> None:
    group = inside(2)
    group.handle(w.Said(1, link.Beat(0, "function")), 49.0)
    group.handle(w.Said(0, FAULT), 50.0)
    group.handle(w.Said(0, link.AtBarrier(0)), 50.1)
    assert group.next_deadline_s() == 49.0 + recall.SILENT_S
    (dump,) = group.handle(w.Tick(), 54.0)
    assert "silent" in dump.why
    assert group.handle(w.Said(1, link.AtBarrier(0)), 54.1)[0].kept == (0, 1), "late, but there before it was killed"


def test_agent_that_stood_still_itself_gives_everybody_a_last_word() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 500.0)
    assert group.next_deadline_s() == 500.0 + recall.LAST_WORD_S


def test_unfit_process_is_killed_and_the_others_stay() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 2.0)
    assert group.handle(w.Said(0, link.Unfit(0, "the device is broken")), 2.1) == [recall.KillAlone((0,))]
    group.handle(w.Said(1, link.AtBarrier(0)), 2.2)
    group.handle(w.Exited(0, 1 << 8), 2.3)
    (back,) = group.handle(w.SweptAlone((0,)), 2.4)
    assert back.kept == (1,)
    assert back.failures[0].fault == FAULT, "what it said first stays its failure"


def test_unaware_workers_are_restarted_by_process() -> None:
    group = fresh()
    group.handle(w.Start(2), 0.0)
    group.handle(w.Started(((0, 100), (1, 101))), 0.0)
    assert kinds(group.handle(w.Exited(1, EXIT_5), 2.0)) == ["FirstFailure", "Ask"]


def test_worker_that_still_starts_is_waited_for() -> None:
    group = fresh()
    group.handle(w.Start(2), 0.0)
    group.handle(w.Started(((0, 100), (1, 101))), 0.0)
    group.handle(w.Said(0, link.Hello(0, 0, restartable=True)), 1.0)
    group.handle(w.Said(0, link.AtBarrier(-1)), 1.0)
    group.handle(w.Said(0, FAULT), 2.0)
    group.handle(w.Said(0, link.AtBarrier(0)), 2.1)
    assert group.next_deadline_s() == 2.0 + ALL_S
    group.handle(w.Said(1, link.Hello(1, 0, restartable=True)), 9.0)
    (back,) = group.handle(w.Said(1, link.AtBarrier(-1)), 9.0)
    assert back.kept == (0, 1)
    assert group.handle(w.Reenter(1), 9.1) == [recall.Enter((0, 1)), recall.AllIn()]


def test_fault_while_others_are_made_waits_for_them() -> None:
    group = inside(2)
    group.handle(w.Exited(1, KILLED), 2.0)
    group.handle(w.Said(0, link.AtBarrier(0)), 2.1)
    group.handle(w.SweptAlone((1,)), 2.1)
    group.handle(w.Reenter(1), 2.2)
    assert kinds(group.handle(w.Said(0, link.Fault(1, "E", "E: again")), 2.3)) == ["FirstFailure"]
    effects = group.handle(w.Started(((1, 201),)), 2.4)
    assert kinds(effects) == ["Interrupt"]
    group.handle(w.Said(0, link.AtBarrier(1)), 2.5)
    group.handle(w.Said(1, link.Hello(1, 1, restartable=True)), 2.6)
    (back,) = group.handle(w.Said(1, link.AtBarrier(-1)), 2.6)
    assert isinstance(back, w.Back)


def test_rank_that_is_out_already_while_others_are_made_is_not_sent_in_again() -> None:
    group = inside(2)
    group.handle(w.Exited(1, KILLED), 2.0)
    group.handle(w.Said(0, link.AtBarrier(0)), 2.1)
    group.handle(w.SweptAlone((1,)), 2.1)
    group.handle(w.Reenter(1), 2.2)
    group.handle(w.Said(0, link.Fault(1, "E", "E: again")), 2.3)
    assert group.handle(w.Said(0, link.AtBarrier(1)), 2.4) == [], "entered twice in a generation"


def test_word_about_another_generation_changes_nothing() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 2.0)
    for generation in (-1, 1, 7):
        group.handle(w.Said(0, link.AtBarrier(generation)), 2.1)
        group.handle(w.Said(1, link.AtBarrier(generation)), 2.1)
    assert group.state is g.State.RECALLING
    group.handle(w.Said(0, link.AtBarrier(0)), 2.2)
    group.handle(w.Said(1, link.AtBarrier(0)), 2.2)
    group.handle(w.Reenter(1), 2.3)
    for message in (FAULT, link.Unfit(0, "late"), link.Returned(0), link.AtBarrier(0)):
        assert group.handle(w.Said(1, message), 2.4) == []
    assert group.state is g.State.RUNNING


def test_rank_that_dies_at_the_barrier_is_swept_before_the_next_world_begins() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 2.0)
    for rank in (0, 1):
        group.handle(w.Said(rank, link.AtBarrier(0)), 2.1)
    assert kinds(group.handle(w.Exited(1, KILLED), 2.2)) == ["FurtherFailure", "SweepAlone"]
    assert group.handle(w.Reenter(1), 2.3) == []
    assert group.handle(w.SweptAlone((1,)), 2.4) == [recall.Enter((0,)), w.MakeProcesses((1,))]


def test_all_returned_are_released_and_are_past_recall() -> None:
    group = inside(2)
    assert group.handle(w.Said(0, link.Returned(0)), 2.0) == []
    assert group.handle(w.Said(1, link.Returned(0)), 2.1) == [recall.AllReturned()]
    assert group.handle(w.Release(), 2.2) == [recall.Released((0, 1))]
    assert group.handle(w.Exited(0, 0), 2.3) == []
    assert kinds(group.handle(w.Exited(1, EXIT_5), 2.4)) == ["FirstFailure", "Sweep"], "what follows the function is unprotected"


def test_rank_that_has_returned_runs_again_when_another_fails() -> None:
    group = inside(2)
    group.handle(w.Said(0, link.Returned(0)), 2.0)
    effects = group.handle(w.Said(1, FAULT), 2.1)
    assert effects[1].local_ranks == (0, 1)
    assert group.handle(w.Release(), 2.2) == [], "a word that came too late"


def test_rank_that_never_returns_after_the_first_is_a_skew_and_is_recalled() -> None:
    group = inside(2, skew_s=5.0)
    group.handle(w.Said(0, link.Returned(0)), 10.0)
    effects = group.handle(w.Tick(), 15.0)
    assert kinds(effects) == ["FirstFailure", "DumpStacks", "Interrupt"]
    assert effects[1].local_ranks == (1,)


def test_hung_rank_is_dumped_and_blamed() -> None:
    group = inside(3)
    effects = group.handle(w.Hung((2,), "no progress for 5 s"), 10.0)
    assert kinds(effects) == ["FirstFailure", "DumpStacks", "Interrupt"]
    for rank in range(3):
        effects = group.handle(w.Said(rank, link.AtBarrier(0)), 11.0)
    assert [(end.local_rank, end.hung) for end in effects[0].failures] == [(2, True)]


def test_rank_that_hears_nothing_is_killed_as_soon_as_its_stacks_are_printed() -> None:
    group = inside()
    effects = group.handle(w.Hung((2,), "its link is silent", deaf=True), 10.0)
    assert kinds(effects) == ["FirstFailure", "DumpStacks", "Interrupt"]
    assert effects[2].local_ranks == (0, 1, 2), "should it hear after all"
    for rank in range(2):
        assert group.handle(w.Said(rank, link.AtBarrier(0)), 10.1) == []
    assert group.next_deadline_s() == 11.0
    assert group.handle(w.Tick(), 11.0) == [recall.KillAlone((2,))]
    group = inside()
    group.handle(w.Hung((2,), "its link is silent", deaf=True), 10.0)
    for rank in range(3):
        effects = group.handle(w.Said(rank, link.AtBarrier(0)), 10.5)
    assert kinds(effects) == ["Back"], "it has heard after all"


def test_stop_order_ends_processes_wherever_they_are() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 2.0)
    assert group.handle(w.Stop(), 2.1) == [w.Ask((0, 1))]
    assert group.handle(w.Said(0, link.AtBarrier(0)), 2.2) == []
    group.handle(w.Exited(0, KILLED), 2.3)
    group.handle(w.Exited(1, KILLED), 2.3)
    (over,) = group.handle(w.Swept(), 2.4)
    assert over.cause == "failure"
    assert over.ends[0].fault == FAULT


def test_processes_that_are_replaced_part_at_the_barrier_before_they_are_asked_to_end() -> None:
    group = inside()
    assert kinds(group.handle(w.Stop(part=True), 2.0)) == ["Interrupt"], "from inside the function nothing could be saved"
    for rank in (0, 2):
        assert group.handle(w.Said(rank, link.AtBarrier(0)), 2.1) == []
    assert group.handle(w.Said(1, link.AtBarrier(0)), 2.1) == [w.Part((0, 1, 2))]
    assert group.handle(w.Said(1, link.Parted(0)), 2.2) == []
    assert group.handle(w.Exited(0, EXIT_5), 2.3) == []
    assert group.handle(w.Said(1, link.Parted(0)), 2.4) == []
    assert group.handle(w.Said(2, link.Parted(0)), 2.5) == [w.Ask((1, 2))]
    assert group.handle(w.Said(2, link.Parted(0)), 2.6) == []
    assert group.handle(w.Exited(1, KILLED), 2.7) == []
    assert kinds(group.handle(w.Exited(2, KILLED), 2.8)) == ["Sweep"]
    assert kinds(group.handle(w.Swept(), 2.9)) == ["Over"], "the next generation has new processes"


@pytest.mark.parametrize(("shutdown_signal", "then"), [(signal.SIGTERM, w.Ask((0, 1, 2))), (signal.SIGKILL, w.Kill((0, 1, 2)))])
def test_who_does_not_part_in_time_is_ended_all_the_same(shutdown_signal: int, then: w.Effect) -> None:
    group = inside()
    group.shutdown_signal = shutdown_signal
    for rank in range(3):
        group.handle(w.Said(rank, FAULT), 2.0)
        group.handle(w.Said(rank, link.AtBarrier(0)), 2.1)
    assert group.handle(w.Stop(part=True), 3.0) == [w.Part((0, 1, 2))]
    assert group.next_deadline_s() == 8.0, "the shutdown timeout"
    assert group.handle(w.Tick(), 8.0) == [then]


def test_a_person_does_not_wait_for_anybody_to_part() -> None:
    group = inside()
    assert group.handle(w.Stop(), 2.0) == [w.Ask((0, 1, 2))]
    group = inside()
    group.handle(w.Stop(part=True), 2.0)
    assert group.handle(w.Stop(kill=True), 2.1) == [w.Kill((0, 1, 2))]


def test_process_that_sigkill_does_not_end_ends_the_attempt() -> None:
    group = inside(2)
    group.handle(w.Said(0, FAULT), 2.0)
    group.handle(w.Said(0, link.AtBarrier(0)), 2.0)
    while (deadline_s := group.next_deadline_s()) is not None and group.state is g.State.RECALLING:
        group.handle(w.Tick(), deadline_s)
    assert group.state is g.State.STOPPING


def test_program_that_replaces_itself_is_entered_again() -> None:
    group = inside(2)
    group.handle(w.Unlinked(1), 2.0)
    assert group.handle(w.Said(1, link.Hello(1, 0, restartable=True)), 2.1) == []
    assert recall.Enter((1,)) in group.handle(w.Said(1, link.AtBarrier(-1)), 2.2)


MESSAGES = st.one_of(
    st.builds(link.Hello, st.just(0), st.just(0), st.booleans()),
    st.builds(link.AtBarrier, st.integers(-1, 4)),
    st.builds(link.Fault, st.integers(0, 4), st.just("E"), st.just("E: x")),
    st.builds(link.Unfit, st.integers(0, 4), st.just("unfit")),
    st.builds(link.Returned, st.integers(0, 4)),
    st.builds(link.Beat, st.integers(0, 4), st.just("function")),
    st.builds(link.Parted, st.integers(0, 4)),
)
EVENTS = st.one_of(
    st.builds(w.Exited, st.integers(0, 2), st.sampled_from([0, EXIT_5, KILLED])),
    st.builds(w.Said, st.integers(0, 2), MESSAGES),
    st.builds(w.Said, st.integers(0, 2), MESSAGES),
    st.builds(w.Unlinked, st.integers(0, 2)),
    st.builds(w.Hung, st.just((1,)), st.just("no progress"), st.booleans()),
    st.builds(w.Leave, st.just("elsewhere")),
    st.just(w.Release()),
    st.just(w.OthersDone()),
    st.builds(w.Stop, st.booleans(), st.booleans()),
    st.just(w.Tick()),
    st.just("swept"),
    st.just("started"),
    st.just("enter"),
    st.just("obey"),
    st.just("obey"),
)


class World:
    """Carries out the group's effects as processes would, and holds it to its promises."""

    def __init__(self, fast: bool) -> None:
        self.group = g.WorkerGroup(signal.SIGKILL if fast else signal.SIGTERM, 5.0, 20.0, recall.Recall(ABORT_S, ALL_S))
        self.now_s = 0.0
        self.generation = 0
        self.pid = 100
        self.starting: tuple[int, ...] | None = None
        self.sweeping: set[int] = set()
        self.full_sweep = False
        self.inside: dict[int, int] = {}
        """pid -> generation it runs."""
        self.entered: set[tuple[int, int]] = set()
        self.told_to_leave: set[int] = set()
        self.overs = 0
        self.feed(w.Start(3))

    def feed(self, event: w.Event) -> None:
        state = self.group.state
        if isinstance(event, w.Exited) and event.local_rank in self.group.alive:
            self.inside.pop(self.group.alive[event.local_rank], None)
        if isinstance(event, w.Said) and event.local_rank in self.group.alive:
            pid = self.group.alive[event.local_rank]
            if isinstance(event.message, link.Hello):
                self.inside.pop(pid, None)
                self.entered -= {(pid, generation) for generation in range(9)}
            if isinstance(event.message, link.AtBarrier) and event.message.generation == self.inside.get(pid):
                self.inside.pop(pid)
        effects = self.group.handle(event, self.now_s)
        self.group.validate()
        for effect in effects:
            self.carry_out(effect)
        assert state is not g.State.OVER or isinstance(event, w.Start) or not effects

    def carry_out(self, effect: w.Effect) -> None:
        alive = self.group.alive
        match effect:
            case w.MakeProcesses(local_ranks):
                assert self.starting is None
                self.starting = local_ranks or (0, 1, 2)
                assert not set(self.starting) & (set(alive) | self.sweeping), "a rank would run twice"
            case w.CancelStart():
                self.starting = None
            case recall.Enter(local_ranks):
                for local_rank in local_ranks:
                    pid = alive[local_rank]
                    assert (pid, self.generation) not in self.entered, "entered twice in a generation"
                    self.entered.add((pid, self.generation))
                    self.inside[pid] = self.generation
            case recall.Interrupt(local_ranks, _):
                self.told_to_leave |= {alive[r] for r in local_ranks}
            case recall.SweepAlone(local_ranks):
                assert not set(local_ranks) & set(alive)
                self.sweeping |= set(local_ranks)
            case w.Part(local_ranks):
                assert local_ranks and not {alive[r] for r in local_ranks} & set(self.inside), "asked to part inside the function"
            case w.Sweep():
                assert not self.full_sweep and not alive
                self.full_sweep = True
            case w.Back():
                assert not self.inside, "something of the old generation runs"
                assert not self.sweeping and self.starting is None
            case w.Over():
                self.overs += 1
                self.full_sweep = False
                given_up = {end.pid for end in effect.ends if end.status is None}
                assert not alive and set(self.inside) <= given_up
                self.inside.clear()

    def step(self, event: object) -> None:
        match event:
            case "swept":
                if self.sweeping:
                    self.feed(w.SweptAlone((self.sweeping.pop(),)))
                elif self.full_sweep:
                    self.feed(w.Swept())
            case "started":
                if self.starting is not None:
                    pids = tuple((r, self.pid + 1 + r) for r in self.starting)
                    self.pid += 10
                    self.starting = None
                    self.feed(w.Started(pids))
            case "enter":
                if self.group.state is g.State.BACK:
                    self.generation += 1
                    self.feed(w.Reenter(self.generation))
            case "obey":  # somebody does what a wrapped worker does next
                for local_rank, pid in sorted(self.group.alive.items()):
                    if pid not in self.inside and not any(p == pid for p, _ in self.entered):
                        self.feed(w.Said(local_rank, link.Hello(local_rank, self.generation, restartable=True)))
                        self.feed(w.Said(local_rank, link.AtBarrier(-1)))
                        return
                    if pid in self.told_to_leave and pid in self.inside:
                        self.feed(w.Said(local_rank, link.AtBarrier(self.inside[pid])))
                        return
            case _:
                self.feed(event)  # type: ignore[arg-type]


@settings(max_examples=600, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, st.floats(0, 8)), max_size=50), fast=st.booleans())
def test_any_order_of_events_comes_to_the_barrier_or_to_the_end(events: list[tuple[object, float]], fast: bool) -> None:
    world = World(fast)
    for event, gap_s in events:
        world.now_s += gap_s
        world.step(event)
    # From here on nobody says anything any more; processes end only when they are killed.
    group = world.group
    world.step("started")
    world.feed(w.Leave("elsewhere"))
    for _ in range(40):
        if group.state in (g.State.BACK, g.State.OVER) and group.recall.settled:
            break
        world.step("started")
        while world.sweeping or world.full_sweep:
            world.step("swept")
        killed = [r for r in group.alive if group._sent.get(r, ())[-1:] == (signal.SIGKILL,)]
        for local_rank in killed:
            world.feed(w.Exited(local_rank, KILLED))
        deadline_s = group.next_deadline_s()
        if deadline_s is not None and not killed:
            world.now_s = max(world.now_s, deadline_s)
            world.feed(w.Tick())
    assert group.state in (g.State.BACK, g.State.OVER), group.state
    assert world.overs == (group.state is g.State.OVER)


@pytest.mark.parametrize("reader", ["next_deadline_s", "validate"])
def test_a_core_that_was_never_used_answers(reader: str) -> None:
    getattr(fresh(), reader)()
