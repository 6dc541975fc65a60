"""The worker group: all worker processes of this node in one attempt, as a pure state machine.

States
- IDLE       nothing runs
- STARTING   processes are being made; in a later generation of the attempt others run meanwhile
- RUNNING    all run, or some have ended with 0
- RECALLING  the generation is lost, living workers are on their way to the restart barrier (workers/recall.py)
- BACK       each is there or gone; `Back` was said; the next generation or a stop order follows
- STOPPING   the shutdown ladder is at work (a failure, a stop order, or a skew timeout)
- SWEEPING   all main processes are gone; what they left behind is being ended and their output drained
- OVER       nothing of the attempt is left; `Over` was said, exactly once

With in-process restart an attempt's processes live through several generations: RUNNING -> RECALLING -> BACK -> (STARTING) -> RUNNING.

Invariants
- An attempt ends only through SWEEPING, however it went: nothing of it outlives it.
- The first worker that fails takes the others out of the generation: to the barrier where that can save a process, else to their
  end. The order of failures is kept for the blame.
- A failure during STARTING is kept until the pids are known, then acted on.
- Every wait has a deadline (ladder, recall, sweep) except RUNNING and BACK: months, and as long as others decide.

`handle(event, now_s)` is the only door; it gives effects. `next_deadline_s` says when to send `Tick`.
"""

import signal
from enum import Enum

from hyperpodrun.agent.wire import exit_codes, link
from hyperpodrun.agent.workers import recall
from hyperpodrun.agent.workers.group_words import (
    Ask,
    Back,
    CancelStart,
    Cause,
    Effect,
    End,
    Event,
    Exited,
    FirstFailure,
    FurtherFailure,
    Hung,
    Kill,
    Leave,
    MakeProcesses,
    OthersDone,
    Over,
    Part,
    Reenter,
    Release,
    Said,
    Start,
    Started,
    StartFailed,
    Stop,
    Sweep,
    Swept,
    SweptAlone,
    Tick,
    Unlinked,
)
from hyperpodrun.agent.workers.ladder import Ladder, Rung
from hyperpodrun.agent.workers.recall import DumpStacks, Place


class State(Enum):
    """See the module's head."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    RECALLING = "recalling"
    BACK = "back"
    STOPPING = "stopping"
    SWEEPING = "sweeping"
    OVER = "over"


_LINKED = frozenset({State.STARTING, State.RUNNING, State.RECALLING, State.BACK})
"""What workers say matters."""


class WorkerGroup:
    """`shutdown_timeout_s`: grace between the shutdown signal and SIGKILL; `skew_timeout_s`: first rank done -> all done.

    `back`: how workers are brought back in place; None: they are not (no --inprocess-restart).
    """

    def __init__(
        self, shutdown_signal: int, shutdown_timeout_s: float, skew_timeout_s: float, back: recall.Recall | None = None
    ) -> None:
        self.recall = back or recall.Recall(0.0, 0.0)
        self._in_place = back is not None
        self.shutdown_signal = shutdown_signal
        self.shutdown_timeout_s = shutdown_timeout_s
        self.skew_timeout_s = skew_timeout_s
        self.state = State.IDLE
        self.alive: dict[int, int] = {}
        self.ends: list[End] = []
        self._reset()

    def _reset(self) -> None:
        self.alive = {}
        self._ladder: Ladder | None = None
        self._hung: set[int] = set()
        self._replaced = False  # what is on its way to the barrier is to end there
        self._parting: set[int] = set()
        self._forget_generation()

    def _forget_generation(self) -> None:
        self.ends = []
        self.failures: dict[int, End] = {}
        """Of ranks that failed without ending: how."""
        self._cause: Cause | None = None
        self._skew_deadline_s: float | None = None
        self._sent: dict[int, tuple[int, ...]] = {}
        self._start_failure: str | None = None
        self._next_generation: int | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event; the effects are to be carried out in order. Events that no longer matter give none."""
        match event:
            case Start(_, generation) if self.state in (State.IDLE, State.OVER):
                self._reset()
                self.recall.reset(generation)
                self.state = State.STARTING
                return [MakeProcesses()]
            case Started(pids) if self.state is State.STARTING:
                return self._started(pids, now_s)
            case StartFailed(reason) if self.state is State.STARTING:
                return self._start_failed(reason, now_s)
            case Exited(local_rank, status) if local_rank in self.alive:
                return self._exited(local_rank, status, now_s)
            case Said(local_rank, message) if local_rank in self.alive and self.state in _LINKED:
                return self._said(local_rank, message, now_s)
            case Unlinked(local_rank) if local_rank in self.alive and self.state in _LINKED:
                return self._carried(self.recall.unlinked(local_rank, now_s), now_s)
            case Said(local_rank, link.Parted()) | Unlinked(local_rank) if self.state is State.STOPPING:
                return self._parted(local_rank, now_s)
            case SweptAlone(local_ranks) if self.state in _LINKED:
                return self._carried(self.recall.swept(local_ranks), now_s)
            case Hung(local_ranks, why, deaf) if self.state is State.RUNNING:
                return self._hang(tuple(r for r in local_ranks if r in self.alive), why, "failure", now_s, deaf)
            case Leave(reason) if self.state is State.RUNNING:
                return self._leave("order", now_s, reason)
            case Leave() if self.state is State.STARTING and not self._cause:
                return self._stop(False, False, now_s) if not self.alive else self._later("order")
            case Reenter(generation) if self.state is State.BACK:
                self._next_generation = generation
                return self._reenter(now_s)
            case Release() if self.state is State.RUNNING:
                if released := self.recall.release():
                    # Whatever ranks do behind their function they may take their time for, until the first of them ends.
                    self._skew_deadline_s = now_s + self.skew_timeout_s if self.ends else None
                return self._carried(released, now_s)
            case OthersDone() if self.state is State.RUNNING and self._skew_deadline_s is None:
                self._skew_deadline_s = now_s + self.skew_timeout_s
            case Stop(kill, part):
                return self._stop(kill, part and not kill, now_s)
            case Swept(left) if self.state is State.SWEEPING:
                self.state = State.OVER
                return [Over(self._all_ends(), self._cause, self._start_failure, left)]
            case Tick():
                return self._tick(now_s)
        return []

    def next_deadline_s(self) -> float | None:
        """When `Tick` is due, on the same clock as `now_s`."""
        if self.state is State.STOPPING and self._ladder:
            return self._ladder.deadline_s
        if self.state in (State.RECALLING, State.BACK):
            return self.recall.next_deadline_s()
        return self._skew_deadline_s if self.state is State.RUNNING else None

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold (for tests and the simulator)."""
        assert (self.state is State.STOPPING) == (self._ladder is not None and bool(self.alive)), "a ladder without workers"
        assert not self.alive or self.state not in (State.IDLE, State.SWEEPING, State.OVER), f"workers alive in {self.state}"
        assert not {end.local_rank for end in self.ends} & set(self.alive), "a worker both ended and alive"
        assert self.state is not State.RUNNING or self._cause is None, "a cause to stop while running"
        assert self.state is not State.BACK or self.recall.state == "back", "back before all are"
        if self.state in (State.RUNNING, State.RECALLING, State.BACK):
            self.recall.validate()

    # --- processes

    def _started(self, pids: tuple[tuple[int, int], ...], now_s: float) -> list[Effect]:
        self.alive |= dict(pids)
        self.recall.born([local_rank for local_rank, _ in pids], now_s)
        self.state = State.RUNNING
        if self._cause is not None:  # it happened to those that lived while these were made
            return self._leave(self._cause, now_s, "another rank failed")
        return []

    def _start_failed(self, reason: str, now_s: float) -> list[Effect]:
        self._start_failure = reason
        if self.alive:
            return self._begin_ladder(self._cause or "failure", now_s)
        self.state = State.OVER
        return [Over(self._all_ends(), self._cause, start_failure=reason)]

    def _exited(self, local_rank: int, status: int, now_s: float) -> list[Effect]:
        end = End(local_rank, self.alive.pop(local_rank), status, now_s, self._sent.get(local_rank, ()), local_rank in self._hung)
        self.ends.append(end)
        effects: list[Effect] = []
        if self.state in (State.RUNNING, State.STARTING):
            effects += self._carried(self.recall.exited(local_rank, well=not end.failed), now_s)
            if end.failed:
                effects += self._failed(end, now_s)
            elif self._skew_deadline_s is None:
                self._skew_deadline_s = now_s + self.skew_timeout_s
        elif self.state in (State.RECALLING, State.BACK):
            if end.failed and not end.sent and local_rank not in self.failures:
                effects.append(FurtherFailure(end))
            if self.alive:
                effects += self._carried(self.recall.exited(local_rank, well=not end.failed), now_s)
        elif self.state is State.STOPPING and self.alive:
            effects += self._parted(local_rank, now_s)
        if not self.alive and self.state is not State.STARTING:
            effects += self._sweep()
        return effects

    def _sweep(self) -> list[Effect]:
        if self.state is State.SWEEPING:
            return []
        self.state = State.SWEEPING
        self._ladder = None
        return [Sweep()]

    def _all_ends(self) -> tuple[End, ...]:
        """A rank's first failure tells more than the end that followed from it."""
        failures = self.failures
        told = [failures.get(end.local_rank, end) for end in self.ends]
        ended = {end.local_rank for end in self.ends}
        return tuple(sorted((*told, *(end for r, end in failures.items() if r not in ended)), key=lambda end: end.at_s))

    # --- failures

    def _failed(self, end: End, now_s: float) -> list[Effect]:
        """A rank failed while the group was running (or living ones waited for others to be made)."""
        if self._cause is not None:
            return [FurtherFailure(end)]
        if self.state is State.STARTING:
            return [FirstFailure(end), *self._later("failure")]
        return [FirstFailure(end), *self._leave("failure", now_s, "another rank failed")]

    def _later(self, cause: Cause) -> list[Effect]:
        self._cause = self._cause or cause
        return []

    def _leave(self, cause: Cause, now_s: float, reason: str, dumped: tuple[int, ...] = ()) -> list[Effect]:
        """Out of this generation: to the barrier where that saves a process, else to the end."""
        self._cause = cause
        self._skew_deadline_s = None
        if not self.alive:
            return self._sweep()
        if not self._in_place or not self.recall.feasible:
            return self._begin_ladder(cause, now_s)
        self.state = State.RECALLING
        return self._carried(self.recall.begin(reason, now_s, dumped), now_s)

    def _hang(self, local_ranks: tuple[int, ...], why: str, cause: Cause, now_s: float, deaf: bool = False) -> list[Effect]:
        if not local_ranks:
            return []
        self._hung = set(local_ranks)
        if not self._in_place or not self.recall.feasible:
            first = End(local_ranks[0], self.alive[local_ranks[0]], None, now_s, hung=True, why=why)
            told: list[Effect] = [FirstFailure(first)] if cause == "failure" else []
            return [*told, *self._begin_ladder(cause, now_s, why=why)]
        for local_rank in local_ranks:
            self.failures[local_rank] = End(local_rank, self.alive[local_rank], None, now_s, hung=True, why=why)
        first = self.failures[local_ranks[0]]
        return [
            FirstFailure(first),
            DumpStacks(local_ranks, why, ends=deaf),
            *self._leave(cause, now_s, f"rank hangs: {why}", local_ranks if deaf else ()),
        ]

    # --- in place

    def _said(self, local_rank: int, message: link.FromWorker, now_s: float) -> list[Effect]:
        if not self._in_place and isinstance(
            message, link.Fault
        ):  # no ping() for too long; nothing else is told where processes end
            return self._hang((local_rank,), message.headline, "failure", now_s) if self.state is State.RUNNING else []
        place = self.recall.place(local_rank)
        effects = self._carried(self.recall.heard(local_rank, message, now_s), now_s)
        after = self.recall.place(local_rank)
        if self.state in (State.RUNNING, State.STARTING) and after is not place:
            if after is Place.RETURNED and self._skew_deadline_s is None and self.state is State.RUNNING:
                self._skew_deadline_s = now_s + self.skew_timeout_s
            left = after in (Place.LEAVING, Place.KILLED) or (after is Place.BARRIER and place is not Place.STARTING)
            if left and local_rank not in self.failures:
                return [*effects, *self._failed(self._fault(local_rank, message, now_s), now_s)]
        elif self.state is State.RECALLING and local_rank not in self.failures and isinstance(message, link.Fault | link.Unfit):
            effects.append(FurtherFailure(self._fault(local_rank, message, now_s)))
        return effects

    def _fault(self, local_rank: int, message: link.FromWorker, now_s: float) -> End:
        fault = message if isinstance(message, link.Fault) else None
        why = message.reason if isinstance(message, link.Unfit) else ""
        rung = message.rung if isinstance(message, link.Fault | link.Unfit) else ""
        if not (fault or why):
            why = "it left its function without a word"
        end = End(local_rank, self.alive[local_rank], None, now_s, fault=fault, why=why, rung=rung)
        return self.failures.setdefault(local_rank, end)

    def _reenter(self, now_s: float) -> list[Effect]:
        generation = self._next_generation
        if generation is None or not self.recall.settled:
            return []  # one that waited at the barrier has ended meanwhile and is being swept
        self._forget_generation()
        self._hung = set()
        missing = self.recall.missing
        effects = self._carried(self.recall.enter(generation), now_s)
        if missing:
            self.state = State.STARTING
            return [*effects, MakeProcesses(missing)]
        self.state = State.RUNNING
        return effects

    def _carried(self, effects: list[recall.Effect], now_s: float) -> list[Effect]:
        """Effects of the recall, with what follows from them here."""
        carried: list[Effect] = []
        for effect in effects:
            match effect:
                case recall.Back():
                    if self.state is State.RECALLING and self._replaced:
                        carried += self._begin_ladder(self._cause or "order", now_s, part=True)
                    elif self.state is State.RECALLING:
                        self.state = State.BACK
                        failures = tuple(end for end in self._all_ends() if end.failed)
                        carried.append(Back(failures, self._cause or "order", self.recall.parked))
                case recall.Stuck():
                    if self.state in (State.RECALLING, State.BACK):
                        carried += self._begin_ladder(self._cause or "failure", now_s)
                case recall.KillAlone(local_ranks):
                    self._note_sent(local_ranks, signal.SIGKILL)
                    carried.append(effect)
                case _:
                    carried.append(effect)
        if self.state is State.BACK and self._next_generation is not None:
            carried += self._reenter(now_s)
        return carried

    # --- the end of the attempt

    def _stop(self, kill: bool, part: bool, now_s: float) -> list[Effect]:
        if self.state is State.STARTING:
            self._cause = self._cause or "order"
            if self.alive:
                return [CancelStart(), *self._begin_ladder(self._cause, now_s, kill)]
            return [CancelStart(), *self._sweep()]
        if part and self.state is State.RUNNING and self._in_place and self.recall.feasible:
            self._replaced = True
            return self._leave("order", now_s, "all processes of this node are replaced")
        if part and self.state is State.RECALLING:
            self._replaced = True
            return []
        if self.state in (State.RUNNING, State.RECALLING, State.BACK):
            return self._begin_ladder(self._cause or "order", now_s, kill, part=part)
        if self.state is State.STOPPING and kill and self._ladder:
            return self._rung(self._ladder.hurry(now_s), now_s)
        return []

    def _parted(self, local_rank: int, now_s: float) -> list[Effect]:
        self._parting.discard(local_rank)
        return self._rung(self._ladder.parted(now_s), now_s) if self._ladder and not self._parting else []

    def _begin_ladder(self, cause: Cause, now_s: float, kill: bool = False, why: str = "", part: bool = False) -> list[Effect]:
        self._cause = cause
        if not self.alive:
            return self._sweep()
        self.state = State.STOPPING
        at_once = kill or self.shutdown_signal == signal.SIGKILL
        self._why = why
        self._parting = set(self.recall.parked) & set(self.alive) if part else set()
        self._ladder = Ladder(now_s, self.shutdown_timeout_s, hung=bool(why), kill=at_once, part=bool(self._parting))
        return self._rung(self._ladder.rung, now_s)

    def _tick(self, now_s: float) -> list[Effect]:
        if self.state is State.RUNNING and self._skew_deadline_s is not None and now_s >= self._skew_deadline_s:
            self._skew_deadline_s = None
            late = tuple(r for r in sorted(self.alive) if self.recall.place(r) is not Place.RETURNED)
            why = f"not done {self.skew_timeout_s:g} s after the first rank"
            if not late:
                why = f"its function has returned, but for {self.skew_timeout_s:g} s not those of all ranks of other nodes"
            return self._hang(late or tuple(sorted(self.alive)), why, "skew", now_s)
        if self.state in (State.RECALLING, State.BACK):
            return self._carried(self.recall.tick(now_s), now_s)
        if self.state is State.STOPPING and self._ladder:
            return self._rung(self._ladder.tick(now_s), now_s)
        return []

    def _rung(self, rung: Rung | None, now_s: float) -> list[Effect]:
        left = tuple(sorted(self.alive))
        match rung:
            case Rung.PART:
                return [Part(tuple(sorted(self._parting)))]
            case Rung.DUMP:
                return [DumpStacks(tuple(r for r in left if r in self._hung), self._why)]
            case Rung.ASK:
                self._note_sent(left, self.shutdown_signal)
                return [Ask(left)]
            case Rung.DUMP_LATE:
                return [
                    DumpStacks(
                        left, f"still running {self.shutdown_timeout_s:g} s after {exit_codes.signal_name(self.shutdown_signal)}"
                    )
                ]
            case Rung.KILL:
                self._note_sent(left, signal.SIGKILL)
                return [Kill(left)]
            case Rung.GIVE_UP:
                for local_rank in left:
                    self.ends.append(
                        End(local_rank, self.alive.pop(local_rank), None, now_s, self._sent[local_rank], local_rank in self._hung)
                    )
                return self._sweep()
        return []

    def _note_sent(self, local_ranks: tuple[int, ...], number: int) -> None:
        for local_rank in local_ranks:
            self._sent[local_rank] = (*self._sent.get(local_rank, ()), number)
