"""The pre- and post-train scripts: one program of the user's, run on each node before an attempt or after success.

An executable file is run as it is, a `.py` file with the workers' interpreter, anything else with sh. It has a session of its own,
so that ending it ends all it started; stopping is TERM first, KILL after the grace.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from hyperpodrun.agent import open_files
from hyperpodrun.agent.reactor import Reactor, Timer


class Script:
    """Runs one script at a time. `watch_child` tells the wait status of a pid once it was reaped."""

    def __init__(self, reactor: Reactor, watch_child: Callable[[int, Callable[[int], None]], None], python: str) -> None:
        self._reactor = reactor
        self._watch_child = watch_child
        self._python = python or sys.executable
        self._pid: int | None = None
        self._timer: Timer | None = None

    def start(
        self, path: str, args: Sequence[str], env: Mapping[bytes, bytes], streams: tuple[int, int], on_end: Callable[[int], None]
    ) -> None:
        """Run it; `on_end` gets the wait status. Raises OSError when it cannot be started."""
        if os.access(path, os.X_OK):
            argv = [os.path.abspath(path), *args]
        elif path.endswith(".py"):
            argv = [self._python, "-u", path, *args]
        else:
            argv = ["/bin/sh", path, *args]
        out, err = streams
        self._pid = os.posix_spawn(
            argv[0],
            argv,
            dict(env),
            file_actions=[(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, err, 2)],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2],
        )
        open_files.give_back(self._pid)
        self._watch_child(self._pid, lambda status: self._ended(status, on_end))

    def stop(self, kill: bool, grace_s: float) -> None:
        """End it: SIGTERM now and SIGKILL after the grace, or SIGKILL to its whole session at once."""
        if self._pid is None:
            return
        if kill:
            self._kill()
            return
        os.kill(self._pid, signal.SIGTERM)
        os.kill(self._pid, signal.SIGCONT)
        self._timer = self._reactor.call_later(grace_s, self._kill)

    def _kill(self) -> None:
        if self._pid is not None:
            os.killpg(self._pid, signal.SIGKILL)

    def _ended(self, status: int, on_end: Callable[[int], None]) -> None:
        self._pid = None
        if self._timer:
            self._timer.cancel()
        on_end(status)
