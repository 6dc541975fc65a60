"""The one place that waits for children: workers, helpers, and the orphans that a subreaper adopts.

A worker may be killed before its pid is known here (the forkserver tells it), so the end of an unknown child is kept until somebody
asks for that pid, or until `forget` at the next attempt. Pids come round: a kept end counts only if nobody lives under the number.
Source: waitpid(2), prctl(2) PR_SET_CHILD_SUBREAPER.
"""

import os
from collections.abc import Callable

from hyperpodrun.agent import family
from hyperpodrun.agent.reactor import Reactor


class Children:
    """`reap` is to be called at SIGCHLD; callbacks get the wait status, once, from the loop."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._watched: dict[int, Callable[[int], None]] = {}
        self._unclaimed: dict[int, int] = {}

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call back with the wait status of this child, also when it was reaped a moment ago."""
        status = self._unclaimed.pop(pid, None)
        if status is not None and family.read_process(pid) is None:
            self._reactor.call_later(0, lambda: on_exit(status))
        else:
            self._watched[pid] = on_exit

    def forget(self) -> None:
        """The ends kept so far are nobody's: what is started from now on has pids of its own."""
        self._unclaimed.clear()

    def reap(self) -> None:
        """Take leave of every dead child."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if callback := self._watched.pop(pid, None):
                callback(status)
            else:
                self._unclaimed[pid] = status
