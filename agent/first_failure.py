"""How a node tells the others of the first failure of its attempt: at once, in one line, but not before the victims' culprit.

Theory. What a rank wrote last is in its pipes when its end is seen, so that is read first (`READ_S` at most). A rank that fails
because another one did (its connection broke) is likely the victim of a rank elsewhere; its node waits `VICTIM_WAIT_S` for the
culprit's own word, which makes this one needless. The lost peer may also be a node: its agent died with its workers, or its host.
While one is missed, a victim waits for what is decided about it, `DOUBT_S` at most, or the loss of a node would be counted as
a failure of the workers that noticed it first. The whole report follows for the console of rank 0's node.

States: *quiet*, *reading* (a rank failed), *waiting* (it looks like a victim), *told*.
Invariants: told at most once an attempt; an attempt that is over is passed on once, after the mesh was told or needn't be.
"""

from collections.abc import Callable
from enum import Enum

from hyperpodrun.agent.failure import FailureDesk, Verdict
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.workers.group_words import End

READ_S = 0.05
VICTIM_WAIT_S = 0.3
DOUBT_S = 4.0
"""An agent that died is back within 1.8 s or is taken for lost (keeper.py), a silent host is dropped after 2 s."""
LOOK_AGAIN_S = 0.1


class _State(Enum):
    QUIET = "quiet"
    READING = "reading"
    WAITING = "waiting"
    TOLD = "told"


class FirstFailure:
    """`tell` is for the mesh, `ship(text)` for rank 0's node. `is_missed()`: is some node missed now?"""

    def __init__(
        self,
        reactor: Reactor,
        desk: FailureDesk,
        tell: Callable[[Verdict], None],
        ship: Callable[[str], None],
        is_missed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reactor = reactor
        self._desk = desk
        self._tell = tell
        self._ship = ship
        self._is_missed = is_missed
        self._timer: Timer | None = None
        self.begin()

    def begin(self) -> None:
        """A new attempt starts."""
        self._to(_State.QUIET)
        self._end: End | None = None
        self._drained = False
        self._words = Verdict(1)
        self._pass_on: Callable[[], None] | None = None
        self._until_s = 0.0

    def failed(self, end: End) -> None:
        """A rank failed, the first one here."""
        if self._state is _State.QUIET:
            self._begin(end)

    def further(self, end: End) -> None:
        """Another rank failed here: maybe the one of which the first is a victim."""
        if self._state is _State.WAITING:
            self._begin(end)

    def _begin(self, end: End) -> None:
        self._end, self._drained = end, False
        self._to(_State.READING, READ_S, self._read)
        if end.fault is not None or end.why:  # its own words came with it
            self._drained = True
            self._read()

    def drained(self, local_rank: int) -> None:
        """All that this rank wrote has been read."""
        if self._end is None or self._end.local_rank != local_rank or self._drained:
            return
        self._drained = True
        if self._state is _State.READING:
            self._reactor.call_later(0, self._read)
        elif self._state is _State.TOLD:
            self._ship(self._desk.first_report(self._end))

    def over(self, verdict: Verdict, pass_on: Callable[[], None]) -> None:
        """The attempt is over and nothing of it is left, or its workers wait at the restart barrier: `pass_on` tells the job core."""
        self._pass_on = pass_on
        if self._state is _State.READING:
            self._read()
        elif verdict.code and (self._state is _State.QUIET or (self._state is _State.WAITING and not verdict.victim)):
            self._words = verdict
            self._say()
        elif self._state is not _State.WAITING:
            self._pass_it_on()

    def settle(self) -> None:
        """Something was decided elsewhere, or a person wants an end: nothing needs to be waited for."""
        if self._state in (_State.READING, _State.WAITING):
            self._to(_State.TOLD)
        self._pass_it_on()

    def _read(self) -> None:
        if self._state is not _State.READING or self._end is None:
            return
        self._words = self._desk.first_words(self._end)
        if self._words.victim:
            self._until_s = self._reactor.now_s() + DOUBT_S
            self._to(_State.WAITING, VICTIM_WAIT_S, self._waited)
        else:
            self._say()

    def _waited(self) -> None:
        if self._is_missed() and self._reactor.now_s() < self._until_s:
            self._to(_State.WAITING, LOOK_AGAIN_S, self._waited)
        else:
            self._say()

    def _say(self) -> None:
        self._to(_State.TOLD)
        self._tell(self._words)
        if self._end is not None and (self._drained or self._pass_on is not None):
            self._drained = True
            self._ship(self._desk.first_report(self._end))
        self._pass_it_on()

    def _pass_it_on(self) -> None:
        pass_on, self._pass_on = self._pass_on, None
        if pass_on is not None:
            pass_on()

    def _to(self, state: _State, limit_s: float | None = None, then: Callable[[], None] = lambda: None) -> None:
        self._state = state
        if self._timer:
            self._timer.cancel()
        self._timer = None if limit_s is None else self._reactor.call_later(limit_s, then)
