"""Between the mesh, which decides for the whole job, and this node's workers: a pure state machine.

The mesh says start, stop, end (`mesh/effects.py`); this node's workers start, fail, finish, are gone. Each side hears of the other
through here, in the order that the mesh's rules need (A8): nothing is started while anything of an older generation is here, and
"gone" is said only when it is true.

States
- WAITING   nothing of ours runs; the mesh decides when that changes
- PRE       the pre-train script runs
- TRAINING  an attempt runs
- PARKED    its generation is over here, live workers wait at the restart barrier: they go on in the next world, or end
- DONE      all ranks here ended with 0; the others are not known to have
- BROKEN    the attempt failed and is over here; the mesh has been told
- POST      the job is over and succeeded, the post-train script runs
- ENDED     `End` was said, once

Invariants
- `WorkersGone` only in a state in which nothing runs that trains; `RunAttempt` only in WAITING or after PRE, or in place in PARKED.
- Workers are brought to the barrier only where the mesh says so, or by a failure of their own; a kill, a person's stop and the job's
  end are never answered in place.
- Workers that the mesh replaces come to the barrier first where they can, and part there; what a person stops does not.
- A stop order from a person makes this node leave: its workers end first, then the mesh is told, then the agent ends with 128 + the
  signal. The job goes on elsewhere if it can.
"""

from enum import Enum

import msgspec

from hyperpodrun.agent.policy import job
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.rungs import UNKNOWN, Symptoms


class State(Enum):
    """See the module's head."""

    WAITING = "waiting"
    PRE = "pre-train"
    TRAINING = "training"
    PARKED = "parked"
    DONE = "done"
    BROKEN = "broken"
    POST = "post-train"
    ENDED = "ended"


# --- what the mesh says


class StartHere(msgspec.Struct, frozen=True):
    """Every node is ready: start this node's ranks of that world."""

    world: World


class StopHere(msgspec.Struct, frozen=True):
    """End what runs of `generation` and before; `kill`: without the grace. `in_place`: what can goes to the restart barrier."""

    generation: int
    kill: bool
    in_place: bool = False


class JobOver(msgspec.Struct, frozen=True):
    """The job is over for this agent. `here`: this node had a part in its last world."""

    code: int
    reason: str = ""


# --- what this node says, beside the events of policy/job.py


class RankFailed(msgspec.Struct, frozen=True):
    """The first failure of the attempt here: told at once, before the others of this node are gone.

    `free`: it is not the job's fault (the store's port was taken), so the restart is not to be counted.
    """

    code: int
    detail: str
    free: bool = False
    symptoms: Symptoms = UNKNOWN


Event = (
    StartHere | StopHere | JobOver | RankFailed
    | job.Begin | job.ScriptEnded | job.AttemptOver | job.AttemptBack | job.StopSignal
)  # fmt: skip

# --- effects for the mesh


class TellFailed(msgspec.Struct, frozen=True):
    """Workers of this generation failed here. `free`: see RankFailed."""

    generation: int
    code: int
    detail: str
    free: bool = False
    symptoms: Symptoms = UNKNOWN


class TellFinished(msgspec.Struct, frozen=True):
    """All workers of this generation here ended well."""

    generation: int


class TellGone(msgspec.Struct, frozen=True):
    """No worker of this generation or before runs here. `parked`: live ones wait at the restart barrier."""

    generation: int
    parked: bool = False


class TellLeaving(msgspec.Struct, frozen=True):
    """This node leaves the job; nothing runs here any more."""


class RunAttempt(msgspec.Struct, frozen=True):
    """Start all workers of this node in this world (`in_place`: those that wait at the barrier go on, and the missing are started);
    answer with `AttemptOver`, or `AttemptBack`.
    """

    world: World
    in_place: bool = False


class Recall(msgspec.Struct, frozen=True):
    """Bring the workers out of their generation, in place where that saves a process; answer with `AttemptBack` or `AttemptOver`."""


Effect = (
    TellFailed
    | TellFinished
    | TellGone
    | TellLeaving
    | RunAttempt
    | Recall
    | job.RunScript
    | job.EndScript
    | job.StopAttempt
    | job.End
)

_IDLE = (State.WAITING, State.DONE, State.BROKEN)


class ClusterJob:
    """One node's part of a job of several nodes."""

    """`finished`: all ranks here have ended well, as an agent before this one knew."""

    def __init__(self, pre_script: bool = False, post_script: bool = False, finished: bool = False) -> None:
        self.pre_script = pre_script
        self.post_script = post_script
        self.state = State.WAITING
        self.stopped_by: int | None = None
        self.world: World | None = None
        self._told_failure = False
        self.finished = finished
        self._stop_asked: int | None = None
        self._ending = False
        """The attempt's processes are being ended: nothing of it goes on in place."""
        self._leaving_said = False
        self._over: JobOver | None = None
        self._last_interrupt_s: float | None = None

    @property
    def generation(self) -> int:
        """Of the newest world that was started here; -1 before the first."""
        return self.world.generation if self.world is not None else -1

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event; the effects are to be carried out in order."""
        if self.state is State.ENDED:
            return []
        match event:
            case StartHere(world):
                return self._start(world)
            case StopHere(generation, kill, in_place):
                return self._stop_here(generation, kill, in_place and not kill)
            case JobOver():
                self._over = event
                return self._job_over()
            case RankFailed(code, detail, free, symptoms) if self.state is State.TRAINING:
                return self._tell_failed(code, detail, free, symptoms)
            case job.ScriptEnded(code):
                return self._script_ended(code)
            case job.AttemptOver() if self.state in (State.TRAINING, State.PARKED):
                return self._attempt_over(event)
            case job.AttemptBack() if self.state is State.TRAINING:
                return self._attempt_back(event)
            case job.StopSignal(number, at_once):
                return self._stop_signal(number, at_once, now_s)
        return []

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self.world is not None or self.state in (State.WAITING, State.POST, State.ENDED), "work without a world"
        assert not self._leaving_said or self.state in (*_IDLE, State.ENDED), "left with something running"

    def _start(self, world: World) -> list[Effect]:
        if self.state not in (*_IDLE, State.PARKED) or self.stopped_by is not None or self._over is not None or self._ending:
            return []
        self.world = world
        self._told_failure = self.finished = False
        self._stop_asked = None
        if self.state is State.PARKED:
            self.state = State.TRAINING
            return [RunAttempt(world, in_place=True)]
        if self.pre_script:
            self.state = State.PRE
            return [job.RunScript("pre")]
        self.state = State.TRAINING
        return [RunAttempt(world)]

    def _stop_here(self, generation: int, kill: bool, in_place: bool) -> list[Effect]:
        if self.state in (*_IDLE, State.POST):
            if self.state is not State.POST:
                self.state = State.WAITING
            return [TellGone(generation)]
        if generation < self.generation:
            return []  # about an older world: nothing of it is here any more
        self._stop_asked = generation
        if in_place and not self._ending:
            if self.state is State.TRAINING:
                return [Recall()]
            if self.state is State.PARKED:
                return self._tell_parked()
        return self._end_what_runs(kill, part=not kill)

    def _end_what_runs(self, kill: bool, part: bool = False) -> list[Effect]:
        if self.state in (State.PRE, State.POST):
            return [job.EndScript(kill)]
        self._ending = True
        return [job.StopAttempt(kill, part)]

    def _attempt_back(self, event: job.AttemptBack) -> list[Effect]:
        if self._ending or self.stopped_by is not None or self._over is not None:
            return []  # they are being ended: AttemptOver follows
        self.state = State.PARKED
        told = self._tell_failed(event.code, "the workers failed", symptoms=event.symptoms) if event.code else []
        return told + (self._tell_parked() if self._stop_asked is not None else [])

    def _tell_parked(self) -> list[Effect]:
        asked, self._stop_asked = self._stop_asked, None
        assert asked is not None
        return [TellGone(asked, parked=True)]

    def _tell_failed(self, code: int, detail: str, free: bool = False, symptoms: Symptoms = UNKNOWN) -> list[Effect]:
        if self._told_failure or self._stop_asked is not None or self._over is not None or self.stopped_by is not None:
            return []
        self._told_failure = True
        return [TellFailed(self.generation, code, detail, free, symptoms)]

    def _script_ended(self, code: int) -> list[Effect]:
        if self.state is State.POST:
            return self._end(code)
        if self.state is not State.PRE:
            return []
        if code == 0 and self._stop_asked is None and self.stopped_by is None and self._over is None and self.world is not None:
            self.state = State.TRAINING
            return [RunAttempt(self.world)]
        told = self._tell_failed(code, f"the pre-train script ended with code {code}") if code else []
        return told + self._idle(State.BROKEN)

    def _attempt_over(self, event: job.AttemptOver) -> list[Effect]:
        ordered = self._stop_asked is not None or self.stopped_by is not None or self._over is not None or self._ending
        if event.code == 0 and self.state is State.TRAINING and not ordered:
            self.state = State.DONE
            self.finished = True
            return [TellFinished(self.generation)]
        told = self._tell_failed(event.code, "the workers failed", symptoms=event.symptoms) if event.code else []
        return told + self._idle(State.BROKEN)

    def _idle(self, state: State) -> list[Effect]:
        """Nothing runs any more: say so to whoever waits for it."""
        self.state = state
        self._ending = False
        effects: list[Effect] = []
        if self._stop_asked is not None:
            effects.append(TellGone(self._stop_asked))
            self._stop_asked = None
            self.state = State.WAITING
        if self._over is not None:
            return effects + self._job_over()
        if self.stopped_by is not None:
            effects += self._leave()
        return effects

    def _leave(self) -> list[Effect]:
        if self._leaving_said:
            return []
        self._leaving_said = True
        return [TellLeaving()]  # the mesh asks for what still runs, and `WorkersGone` is only ever an answer

    def _stop_signal(self, number: int, at_once: bool, now_s: float) -> list[Effect]:
        again = exit_codes.signal_name(number) == "SIGINT" and self._last_interrupt_s is not None
        second = again and now_s - (self._last_interrupt_s or 0.0) >= job.SAME_PRESS_S
        if exit_codes.signal_name(number) == "SIGINT":
            self._last_interrupt_s = now_s
        kill = at_once or second
        first = self.stopped_by is None
        if first:
            self.stopped_by = number
        if self.state in _IDLE:
            # A person who asks twice does not want to wait for the others' word.
            return self._end(0) if kill else self._leave()
        return self._end_what_runs(kill) if first or kill else []

    def _job_over(self) -> list[Effect]:
        over = self._over
        assert over is not None
        if self.state in (State.PRE, State.TRAINING, State.PARKED):
            return self._end_what_runs(kill=False, part=self.state is State.PARKED)
        if self.state is State.POST:
            return []
        if over.code == 0 and self.stopped_by is None and self.post_script and self.finished:
            self.state = State.POST
            return [job.RunScript("post")]
        return self._end(over.code)

    def _end(self, code: int) -> list[Effect]:
        self.state = State.ENDED
        return [job.End(code if self.stopped_by is None else exit_codes.for_signal(self.stopped_by))]
