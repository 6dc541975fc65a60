"""The worker group: all worker processes of this node in one attempt, as a pure state machine.

States
- IDLE      nothing runs
- STARTING  processes are being made
- RUNNING   all run, or some have ended with 0
- STOPPING  the shutdown ladder is at work (a failure, a stop order, or a skew timeout)
- SWEEPING  all main processes are gone; what they left behind is being ended and their output drained
- OVER      nothing of the attempt is left; `Over` was said, exactly once

Invariants
- An attempt ends only through SWEEPING, however it went: nothing of it outlives it.
- The first worker that ends with another code than 0 stops the others; the order of ends is kept for the blame.
- A stop order during STARTING is kept until the pids are known, then obeyed.
- Every wait has a deadline (ladder, sweep) except RUNNING, which may last for months.

`handle(event, now_s)` is the only door; it gives effects. `next_deadline_s` says when to send `Tick`.
"""

import signal
from enum import Enum
from typing import Literal

import msgspec

from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.workers.ladder import Ladder, Rung

Cause = Literal["failure", "order", "skew"]


class State(Enum):
    """See the module's head."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SWEEPING = "sweeping"
    OVER = "over"


class End(msgspec.Struct, frozen=True):
    """How one worker ended. `status` is its wait status; None when it never ended (SIGKILL had no effect)."""

    local_rank: int
    pid: int
    status: int | None
    at_s: float
    sent: tuple[int, ...] = ()
    """The signals that we had sent it before it ended."""
    hung: bool = False
    """It was stopped because it would not end by itself."""

    @property
    def failed(self) -> bool:
        """Did it end with anything but 0, or not at all?"""
        return self.status != 0


# --- events


class Start(msgspec.Struct, frozen=True):
    """Begin the attempt."""

    nproc: int


class Started(msgspec.Struct, frozen=True):
    """All processes exist: (local rank, pid) each."""

    pids: tuple[tuple[int, int], ...]


class StartFailed(msgspec.Struct, frozen=True):
    """No process of the attempt exists; `reason` is a sentence."""

    reason: str


class Exited(msgspec.Struct, frozen=True):
    """A main process was reaped."""

    local_rank: int
    status: int


class OthersDone(msgspec.Struct, frozen=True):
    """All ranks of another node have ended well."""


class Stop(msgspec.Struct, frozen=True):
    """End the group. `kill`: at once, without the grace."""

    kill: bool = False


class Swept(msgspec.Struct, frozen=True):
    """Nothing but the named (unkillable) processes is left, and all output has been read."""

    left: tuple[str, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = Start | Started | StartFailed | Exited | OthersDone | Stop | Swept | Tick

# --- effects


class MakeProcesses(msgspec.Struct, frozen=True):
    """Start the workers."""


class CancelStart(msgspec.Struct, frozen=True):
    """Give up the start under way; nothing of it may run later."""


class Ask(msgspec.Struct, frozen=True):
    """The shutdown signal to these workers' main processes."""

    local_ranks: tuple[int, ...]


class DumpStacks(msgspec.Struct, frozen=True):
    """Print the stacks of these ranks."""

    local_ranks: tuple[int, ...]
    why: str


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL to these workers and to all that is left of the group."""

    local_ranks: tuple[int, ...]


class FirstFailure(msgspec.Struct, frozen=True):
    """Said once: a worker failed while the group was running."""

    end: End


class Sweep(msgspec.Struct, frozen=True):
    """End what the workers left behind and drain their output; answer with `Swept`."""


class Over(msgspec.Struct, frozen=True):
    """The attempt is over. `ends` in the order in which they were seen."""

    ends: tuple[End, ...]
    cause: Cause | None
    start_failure: str | None = None
    left: tuple[str, ...] = ()

    @property
    def success(self) -> bool:
        """Did every worker end by itself with 0?"""
        return self.cause is None and self.start_failure is None and not any(end.failed for end in self.ends)


Effect = MakeProcesses | CancelStart | Ask | DumpStacks | Kill | FirstFailure | Sweep | Over


class WorkerGroup:
    """`shutdown_timeout_s`: grace between the shutdown signal and SIGKILL; `skew_timeout_s`: first rank done -> all done."""

    def __init__(self, shutdown_signal: int, shutdown_timeout_s: float, skew_timeout_s: float) -> None:
        self.shutdown_signal = shutdown_signal
        self.shutdown_timeout_s = shutdown_timeout_s
        self.skew_timeout_s = skew_timeout_s
        self.state = State.IDLE
        self.alive: dict[int, int] = {}
        self.ends: list[End] = []
        self._reset()

    def _reset(self) -> None:
        self.alive = {}
        self.ends = []
        self._cause: Cause | None = None
        self._ladder: Ladder | None = None
        self._skew_deadline_s: float | None = None
        self._sent: dict[int, tuple[int, ...]] = {}
        self._hung: set[int] = set()
        self._stop_after_start: Stop | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event; the effects are to be carried out in order. Events that no longer matter give none."""
        match event:
            case Start() if self.state in (State.IDLE, State.OVER):
                self._reset()
                self.state = State.STARTING
                return [MakeProcesses()]
            case Started(pids) if self.state is State.STARTING:
                return self._started(pids, now_s)
            case StartFailed(reason) if self.state is State.STARTING:
                self.state = State.OVER
                return [Over((), self._cause, start_failure=reason)]
            case Exited(local_rank, status) if local_rank in self.alive:
                return self._exited(local_rank, status, now_s)
            case OthersDone() if self.state is State.RUNNING and self._skew_deadline_s is None:
                self._skew_deadline_s = now_s + self.skew_timeout_s
            case Stop(kill):
                return self._stop(kill, now_s)
            case Swept(left) if self.state is State.SWEEPING:
                self.state = State.OVER
                return [Over(tuple(self.ends), self._cause, left=left)]
            case Tick():
                return self._tick(now_s)
        return []

    def next_deadline_s(self) -> float | None:
        """When `Tick` is due, on the same clock as `now_s`."""
        if self.state is State.STOPPING and self._ladder:
            return self._ladder.deadline_s
        return self._skew_deadline_s if self.state is State.RUNNING else None

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold (for tests and the simulator)."""
        assert (self.state is State.STOPPING) == (self._ladder is not None and bool(self.alive)), "a ladder without workers"
        assert not self.alive or self.state in (State.RUNNING, State.STOPPING), f"workers alive in {self.state}"
        assert not {end.local_rank for end in self.ends} & set(self.alive), "a worker both ended and alive"
        assert self.state is not State.RUNNING or self._cause is None, "a cause to stop while running"

    def _started(self, pids: tuple[tuple[int, int], ...], now_s: float) -> list[Effect]:
        self.alive = dict(pids)
        self.state = State.RUNNING
        if self._stop_after_start:
            return self._stop(self._stop_after_start.kill, now_s)
        return []

    def _exited(self, local_rank: int, status: int, now_s: float) -> list[Effect]:
        end = End(local_rank, self.alive.pop(local_rank), status, now_s, self._sent.get(local_rank, ()), local_rank in self._hung)
        self.ends.append(end)
        effects: list[Effect] = []
        if self.state is State.RUNNING:
            if end.failed:
                effects.append(FirstFailure(end))
                if self.alive:
                    effects += self._begin_ladder("failure", now_s)
                else:
                    self._cause = "failure"
            elif self._skew_deadline_s is None:
                self._skew_deadline_s = now_s + self.skew_timeout_s
        if not self.alive:
            effects += self._sweep()
        return effects

    def _sweep(self) -> list[Effect]:
        self.state = State.SWEEPING
        self._ladder = None
        return [Sweep()]

    def _stop(self, kill: bool, now_s: float) -> list[Effect]:
        if self.state is State.STARTING:
            self._cause = "order"
            self.state = State.SWEEPING
            return [CancelStart(), Sweep()]
        if self.state is State.RUNNING:
            return self._begin_ladder("order", now_s, kill)
        if self.state is State.STOPPING and kill and self._ladder:
            return self._rung(self._ladder.hurry(now_s), now_s)
        return []

    def _begin_ladder(self, cause: Cause, now_s: float, kill: bool = False) -> list[Effect]:
        self.state = State.STOPPING
        self._cause = cause
        if cause == "skew":
            self._hung = set(self.alive)
        at_once = kill or self.shutdown_signal == signal.SIGKILL
        self._ladder = Ladder(now_s, self.shutdown_timeout_s, hung=cause == "skew", kill=at_once)
        return self._rung(self._ladder.rung, now_s)

    def _tick(self, now_s: float) -> list[Effect]:
        if self.state is State.RUNNING and self._skew_deadline_s is not None and now_s >= self._skew_deadline_s:
            return self._begin_ladder("skew", now_s)
        if self.state is State.STOPPING and self._ladder:
            return self._rung(self._ladder.tick(now_s), now_s)
        return []

    def _rung(self, rung: Rung | None, now_s: float) -> list[Effect]:
        left = tuple(sorted(self.alive))
        match rung:
            case Rung.DUMP:
                return [DumpStacks(left, f"not done {self.skew_timeout_s:g} s after the first rank")]
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
