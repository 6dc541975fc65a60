"""What the job does next: the life of a job on one node as a pure state machine.

States
- NEW       nothing has happened
- PRE       the pre-train script runs
- TRAINING  an attempt runs (see `workers/group.py`)
- STOPPING  a stop order came; the attempt or the script is being ended
- POST      all ranks succeeded, the post-train script runs
- ENDED     `End` was said, exactly once; nothing moves any more

Invariants
- A stop order always ends the job with 128 + its signal, however cleanly the workers ended, and it is never undone by a restart.
- Each restart spends one of `--max-restarts`, save two kinds that are not the job's fault: the death of an agent (the node failure
  budget counts those) and a rendezvous port that another program took in the moment between choosing and using it (bounded).
- `restart_count` grows by one with every new attempt or generation, whatever the reason, and is what all ranks see.
- With --inprocess-restart the rung of each restart is `policy/escalation.py`'s word; a rung that takes processes is followed once the
  attempt is over, and asked for once.

`handle` is the only door. Pure: standard library and `wire` only.
"""

from enum import Enum

import msgspec

from hyperpodrun.agent.policy.budget import Total, Window
from hyperpodrun.agent.policy.escalation import decide
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.rungs import UNKNOWN, Decision, Fault, Incident, Rules, Situation, Symptoms

MAX_PORT_RETRIES = 5
# A person cannot press Ctrl-C twice this fast; a signal sent to keeper and agent alike arrives twice within it.
SAME_PRESS_S = 0.2


class State(Enum):
    """See the module's head."""

    NEW = "new"
    PRE = "pre-train"
    TRAINING = "training"
    STOPPING = "stopping"
    POST = "post-train"
    ENDED = "ended"


# --- events


class Begin(msgspec.Struct, frozen=True):
    """The agent is up. `reborn`: an earlier agent of this job died."""

    reborn: bool = False


class ScriptEnded(msgspec.Struct, frozen=True):
    """The pre- or post-train script ended with this exit code."""

    code: int


class AttemptOver(msgspec.Struct, frozen=True):
    """The attempt is over and nothing of it is left.

    `code`: 0, or the exit code of the rank to blame. `port_taken`: it failed because the rendezvous port was in use.
    `final`: trying again cannot help (the program cannot be executed). `symptoms`: what is known of the failure.
    """

    code: int
    port_taken: bool = False
    final: bool = False
    symptoms: Symptoms = UNKNOWN


class AttemptBack(msgspec.Struct, frozen=True):
    """The generation is over and its workers wait at the restart barrier, or are gone. Fields as in AttemptOver."""

    code: int
    symptoms: Symptoms = UNKNOWN


class StopSignal(msgspec.Struct, frozen=True):
    """A signal that ends the job. `at_once`: without the grace (its default action was asked for, or the keeper is gone)."""

    number: int
    at_once: bool = False


Event = Begin | ScriptEnded | AttemptOver | AttemptBack | StopSignal

# --- effects


class RunScript(msgspec.Struct, frozen=True):
    """Run the "pre" or "post" train script; answer with `ScriptEnded`."""

    which: str


class EndScript(msgspec.Struct, frozen=True):
    """End the script that runs."""

    kill: bool


class RunAttempt(msgspec.Struct, frozen=True):
    """Start all workers (`in_place`: those that wait at the barrier go on, and the missing are started); answer with `AttemptOver`,
    or `AttemptBack`.
    """

    restart_count: int
    in_place: bool = False


class StopAttempt(msgspec.Struct, frozen=True):
    """End all workers, with the grace or (`kill`) at once; answer with `AttemptOver`. `part`: others take over what they hold."""

    kill: bool
    part: bool = False


class Restarting(msgspec.Struct, frozen=True):
    """To be told: another attempt follows. `left`: restarts that remain (None: no number was given); `free`: this one was not counted.
    `in_place`: as this generation, with the processes that are there.
    """

    left: int | None
    free: bool
    in_place: bool = False
    generation: int = 0


class GivingUp(msgspec.Struct, frozen=True):
    """To be told: no further attempt, for this reason."""

    reason: str


class End(msgspec.Struct, frozen=True):
    """The job is over; leave with this code."""

    code: int


Effect = RunScript | EndScript | RunAttempt | StopAttempt | Restarting | GivingUp | End


class Job:
    """`restart_count` and `restarts_used` come from the previous agent's memo, 0 at first."""

    def __init__(
        self,
        restarts: Total,
        node_failures: Window,
        pre_script: bool = False,
        post_script: bool = False,
        restart_count: int = 0,
        rules: Rules | None = None,
    ) -> None:
        self.rules = rules or Rules(max_restarts=restarts.limit)
        self.history: tuple[Fault, ...] = ()
        self._decided: Decision | None = None
        """What follows once the attempt is over; None: nothing was decided yet."""
        self.restarts = restarts
        self.node_failures = node_failures
        self.pre_script = pre_script
        self.post_script = post_script
        self.restart_count = restart_count
        self.state = State.NEW
        self.stopped_by: int | None = None
        self.port_retries = 0
        self._attempt_runs = False
        self._script_runs = False
        self._last_interrupt_s: float | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event; the effects are to be carried out in order."""
        match event:
            case Begin(reborn) if self.state is State.NEW:
                return self._begin(reborn, now_s)
            case ScriptEnded(code) if self._script_runs:
                self._script_runs = False
                return self._script_ended(code)
            case AttemptOver() if self._attempt_runs:
                self._attempt_runs = False
                return self._attempt_over(event, now_s)
            case AttemptBack() if self._attempt_runs and self.stopped_by is None:
                return self._attempt_back(event, now_s)
            case StopSignal(number, at_once):
                return self._stop(number, at_once, now_s)
        return []

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert not (self._attempt_runs and self._script_runs), "script and workers at the same time"
        assert self.state is not State.ENDED or not (self._attempt_runs or self._script_runs), "ended with something running"
        assert (self.stopped_by is None) or self.state in (State.STOPPING, State.ENDED), "a stop order was forgotten"

    def _begin(self, reborn: bool, now_s: float) -> list[Effect]:
        if reborn:
            self.restart_count += 1
            if not self.node_failures.spend(now_s):
                return [GivingUp("the agent died more often than --max-node-failures allows"), *self._end(exit_codes.INTERNAL)]
        return self._next_attempt()

    def _next_attempt(self) -> list[Effect]:
        if self.pre_script:
            self.state = State.PRE
            self._script_runs = True
            return [RunScript("pre")]
        return self._train()

    def _train(self) -> list[Effect]:
        self.state = State.TRAINING
        self._attempt_runs = True
        return [RunAttempt(self.restart_count)]

    def _script_ended(self, code: int) -> list[Effect]:
        if self.stopped_by is not None:
            return self._end_stopped(self.stopped_by)
        if self.state is State.PRE and code == 0:
            return self._train()
        which = "pre" if self.state is State.PRE else "post"
        told: list[Effect] = [GivingUp(f"the {which}-train script ended with code {code}")] if code else []
        return told + self._end(code)

    def _attempt_over(self, event: AttemptOver, now_s: float) -> list[Effect]:
        decided, self._decided = self._decided, None
        if self.stopped_by is not None:
            return self._end_stopped(self.stopped_by)
        if event.code == 0:
            if self.post_script:
                self.state = State.POST
                self._script_runs = True
                return [RunScript("post")]
            return self._end(0)
        if event.final:
            return [GivingUp("another attempt would fail the same way"), *self._end(event.code)]
        free = event.port_taken and self.port_retries < MAX_PORT_RETRIES
        if free:
            self.port_retries += 1
        elif self.rules.inprocess:
            decision = decided or self._decide(event, now_s)
            if decision.rung == "end":
                return [GivingUp(decision.reason), *self._end(decision.code)]
        elif not self.restarts.spend():
            limit = self.restarts.limit
            spent = f"all {limit} restarts are spent" if limit > 1 else "the one restart is spent"
            reason = spent if limit else "no restarts were asked for (--max-restarts)"
            return [GivingUp(reason), *self._end(event.code)]
        self.restart_count += 1
        return [Restarting(self._left, free), *self._next_attempt()]

    def _attempt_back(self, event: AttemptBack, now_s: float) -> list[Effect]:
        decision = self._decide(event, now_s)
        if decision.rung != "inplace":
            self._decided = decision
            return [StopAttempt(kill=False, part=True)]
        self.restart_count += 1
        told = Restarting(self._left, free=False, in_place=True, generation=self.restart_count)
        return [told, RunAttempt(self.restart_count, in_place=True)]

    def _decide(self, event: AttemptOver | AttemptBack, now_s: float) -> Decision:
        """With --inprocess-restart: what the policy of rungs says. This node is the whole job."""
        generation = self.restart_count
        decision = decide(
            Situation(
                rules=self.rules,
                generation=generation,
                restarts=self.restarts.used,
                history=self.history,
                incidents=(Incident("failed", generation, "", event.code, "", event.symptoms),),
                now_s=int(now_s),
            )
        )
        self.history = decision.history
        self.restarts.used += decision.counted
        return decision

    @property
    def _left(self) -> int | None:
        return None if self.rules.max_restarts is None else self.restarts.left

    def _stop(self, number: int, at_once: bool, now_s: float) -> list[Effect]:
        if self.state is State.ENDED:
            return []
        kill = at_once or self._is_second_interrupt(number, now_s)
        first = self.stopped_by is None
        if first:
            self.stopped_by = number
        self.state = State.STOPPING
        if not (first or kill):
            return []  # schedulers repeat SIGTERM: that does not shorten the grace
        if self._script_runs:
            return [EndScript(kill)]
        if self._attempt_runs:
            return [StopAttempt(kill)]
        return self._end_stopped(self.stopped_by or number)

    def _is_second_interrupt(self, number: int, now_s: float) -> bool:
        if exit_codes.signal_name(number) != "SIGINT":
            return False
        last_s, self._last_interrupt_s = self._last_interrupt_s, now_s
        return last_s is not None and now_s - last_s >= SAME_PRESS_S

    def _end_stopped(self, number: int) -> list[Effect]:
        return [GivingUp(f"stopped by {exit_codes.signal_name(number)}"), *self._end(exit_codes.for_signal(number))]

    def _end(self, code: int) -> list[Effect]:
        self.state = State.ENDED
        return [End(code)]
