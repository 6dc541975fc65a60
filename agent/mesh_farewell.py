"""Leaving a job that is over: soon, but not before those who depend on this agent's word know that it is.

Theory. The last view is decided by a quorum; everybody else learns of it from somebody who stays until they did. So an agent stays
until its neighbours in the rings have shown that they know (they tell theirs, and the rings reach everyone), or are gone. Then it
says once more that it knows, for they wait for that, and leaves.

States: *working* (the job is not over, or this agent has still something to end), *telling* (`begin` was called), *leaving* (everyone
near knows), *gone* (`on_gone` was called, once).
"""

from collections.abc import Callable

from hyperpodrun.agent.reactor import Reactor

LONGEST_S = 5.0
AGAIN_S = 0.1
LAST_WORD_S = 0.05
REPORT_S = 1.0
"""So long rank 0's node waits for the report of the rank that ended the job."""


class Farewell:
    """`neighbours` gives the nodes to tell, `tell` says to one of them that this agent knows."""

    def __init__(self, reactor: Reactor, neighbours: Callable[[], set[str]], tell: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._neighbours = neighbours
        self._tell = tell
        self._know: set[str] = set()
        self._on_gone: Callable[[], None] | None = None
        self._awaits_report = False
        self._leaving = False

    def knows(self, node: str) -> None:
        """This node shows that it knows of the end, or it is gone."""
        self._know.add(node)
        self._leave_if_told()

    def tell_all(self) -> None:
        """Say to all who have not shown that they know."""
        for node in sorted(self._neighbours() - self._know):
            self._tell(node)

    def begin(self, awaits_report: bool, on_gone: Callable[[], None]) -> None:
        """This agent has nothing else to do any more."""
        self._on_gone = on_gone
        self._reactor.call_later(LONGEST_S, self._go)
        if awaits_report:
            self._awaits_report = True
            self._reactor.call_later(REPORT_S, self.report_came)
        self._again()

    def at_once(self, on_gone: Callable[[], None]) -> None:
        """Nobody needs this agent's word; only a moment for what is on its way."""
        self._on_gone = on_gone
        self._reactor.call_later(LAST_WORD_S, self._go)

    def report_came(self) -> None:
        """What was to be told of the end is told, or comes too late."""
        self._awaits_report = False
        self._leave_if_told()

    def _again(self) -> None:
        if self._on_gone is None or self._leaving:
            return
        self.tell_all()
        self._leave_if_told()
        if not self._leaving:
            self._reactor.call_later(AGAIN_S, self._again)

    def _leave_if_told(self) -> None:
        if self._on_gone is None or self._awaits_report or self._leaving or not self._neighbours() <= self._know:
            return
        self._leaving = True
        for node in sorted(self._neighbours()):
            self._tell(node)
        self._reactor.call_later(LAST_WORD_S, self._go)

    def _go(self) -> None:
        then, self._on_gone = self._on_gone, None
        if then is not None:
            then()
