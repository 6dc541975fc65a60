"""Ending one worker alone, and what it left behind, while the others of its node live on.

A rank's remains are ended once its process is gone; it is done when they are and its output has been read. What is theirs is told by
session, by having been seen below it when it was killed, and by its own error file's name in their environment (`family.remains`).

States of a rank here: none, *killed* (its descendants are noted), *ended*, *swept* (its output is still being read), *done*.
"""

import os
import signal
from collections.abc import Callable
from functools import partial

from hyperpodrun.agent import family
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.workers.sweep import Sweeper


class Remains:
    """`error_file(local_rank)` is the rank's own; `on_done(local_rank, left)` tells that nothing but `left` is there."""

    def __init__(
        self, sweeper: Sweeper, error_file: Callable[[int], str], on_done: Callable[[int, tuple[str, ...]], None]
    ) -> None:
        self._sweeper = sweeper
        self._error_file = error_file
        self._on_done = on_done
        self._sessions: dict[int, int] = {}
        self._known: dict[int, dict[int, int]] = {}
        self._reading: set[int] = set()
        self._swept: dict[int, tuple[str, ...]] = {}
        self._attempt = 0

    def forget(self) -> None:
        """The attempt is over: all that was left has been ended with it."""
        self._attempt += 1
        self._sessions.clear()
        self._known.clear()
        self._reading.clear()
        self._swept.clear()

    def kill(self, local_rank: int, pid: int) -> None:
        """SIGKILL to this rank's process; not reaped yet, so it is still the worker."""
        below = family.descendants(pid, family.all_processes())
        self._known[local_rank] = {process.pid: process.started_ticks for process in below}
        os.kill(pid, signal.SIGKILL)

    def ended(self, local_rank: int, pid: int) -> None:
        """The rank's process was reaped; its output is being read."""
        self._sessions[local_rank] = pid
        self._reading.add(local_rank)

    def drained(self, local_rank: int) -> None:
        """Its output has been read."""
        self._reading.discard(local_rank)
        self._check(local_rank)

    def sweep(self, local_rank: int) -> None:
        """End what it left."""
        self._sweeper.alone(
            {self._sessions[local_rank]},
            self._known.pop(local_rank, {}),
            {f"{names.ERROR_FILE}={self._error_file(local_rank)}"},
            partial(self._sweep_done, self._attempt, local_rank),
        )

    def _sweep_done(self, attempt: int, local_rank: int, left: tuple[str, ...]) -> None:
        if attempt == self._attempt:
            self._swept[local_rank] = left
            self._check(local_rank)

    def _check(self, local_rank: int) -> None:
        if local_rank not in self._reading and local_rank in self._swept:
            self._on_done(local_rank, self._swept.pop(local_rank))
