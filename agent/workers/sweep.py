"""Ending what workers left behind: children in sessions of their own, daemons, orphans.

Theory: the agent is a subreaper, so everything the job started is below it (see `family.py`). After the main processes are gone
each process that is left there, the launcher's own helpers apart, belongs to the finished attempt. It gets SIGTERM, SIGKILL 0.3 s
later, and after 5 s it is reported as unkillable. Where cgroup v2 was delegated to us, one write to cgroup.kill ends all at once.

Where the other workers live on, one worker's remains alone are looked for (`alone`, see `family.remains`); what cannot be told apart
from theirs stays until all are swept.

Drives itself with reactor timers; nothing blocks.
"""

import os
import signal
from collections.abc import Callable, Collection, Mapping

from hyperpodrun.agent import family
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.workers.cgroup import WorkerCgroup

GENTLE_S = 0.3
LIMIT_S = 5.0
_LOOK_AGAIN_S = 0.01


class Sweeper:
    """`spare` gives the pids of helpers that stay (asked anew at every look)."""

    def __init__(
        self, reactor: Reactor, mark: str, spare: Callable[[], Collection[int]], reap: Callable[[], None], cgroup: WorkerCgroup
    ) -> None:
        self._reactor = reactor
        self._mark = mark
        self._spare = spare
        self._reap = reap
        self._cgroup = cgroup

    def sweep(self, on_done: Callable[[tuple[str, ...]], None], gentle: bool = True, marked: bool = False) -> None:
        """Call `on_done` with a description of each process that cannot be ended, usually with none."""
        self._look(
            lambda: family.members(os.getpid(), self._mark, self._spare(), marked=marked),
            on_done,
            self._reactor.now_s(),
            gentle,
            set(),
        )

    def alone(
        self,
        sessions: Collection[int],
        known: Mapping[int, int],
        variables: Collection[str],
        on_done: Callable[[tuple[str, ...]], None],
    ) -> None:
        """The same for what workers left that have ended while others live on; see `family.remains`."""
        self._look(
            lambda: family.remains(os.getpid(), sessions, known, variables),
            on_done,
            self._reactor.now_s(),
            True,
            set(),
            alone=True,
        )

    def kill_now(self) -> None:
        """SIGKILL to all that is there; does not wait."""
        self._cgroup.kill()
        for process in family.members(os.getpid(), self._mark, self._spare()):
            family.send(process, signal.SIGKILL)

    def _look(
        self,
        find: Callable[[], list[family.Process]],
        on_done: Callable[[tuple[str, ...]], None],
        began_s: float,
        gentle: bool,
        asked: set[int],
        alone: bool = False,
    ) -> None:
        self._reap()
        left = find()
        spent_s = self._reactor.now_s() - began_s
        if not left:
            on_done(())
            return
        if spent_s > LIMIT_S:
            on_done(tuple(f"process {p.pid} ({p.name}, state {p.state})" for p in left))
            return
        kill = not gentle or spent_s >= GENTLE_S
        if kill and not alone:
            self._cgroup.kill()
        for process in left:
            if kill:
                family.send(process, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                family.send(process, signal.SIGTERM)
                family.send(process, signal.SIGCONT)
        self._reactor.call_later(_LOOK_AGAIN_S, lambda: self._look(find, on_done, began_s, gentle, asked, alone))
