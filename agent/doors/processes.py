"""Which connections belong to one process, and to which coming of it (API section 4, MESH S7)."""

from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.mesh.shard import Client

INIT_KEY = b"init/"
"""Every client that is told the number of workers adds one to it first; clones are not told."""
MOST_KNOWN = 1 << 14
"""Processes of a generation that are remembered when they have left."""


class Processes:
    """Who is connected in one generation.

    A *session* of a process lasts from its first connection to its last. Its *round* counts the process groups that it has begun:
    connections that torch's rendezvous made (their first request adds to `INIT_KEY`) and that went on to a key of PER_ROUND.
    """

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._next = 0
        self._writers: set[int] = set()
        self._open: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._rounds: dict[int, int] = {}

    def enter(self, pid: int) -> Client:
        """A connection of this process was made."""
        if (number := self._numbers.get(pid)) is None:
            number = self._numbers[pid] = self._next = self._next + 1
        count = self._open[pid] = self._open.get(pid, 0) + 1
        if count == 1:
            session = self._sessions[pid] = self._sessions.get(pid, 0) + 1
            if session > 1:
                self._space.began(session)
        return self._space.client(number, self._sessions[pid], self._rounds.get(pid, 1))

    def begin_round(self, pid: int) -> Client:
        """This connection is the first one of a process group."""
        self._rounds[pid] = self._rounds.get(pid, 0) + 1
        return self._space.client(self._numbers[pid], self._sessions[pid], self._rounds[pid])

    def leave(self, pid: int, wrote: bool) -> None:
        """A connection closed; did it write anything?"""
        if wrote:
            self._writers.add(pid)
        self._open[pid] -= 1
        if self._open[pid]:
            return
        del self._open[pid]
        if pid in self._writers:
            self._space.left(self._numbers[pid], self._sessions[pid])
        if pid < 0 or pid not in self._writers:
            self._forget(pid)
        elif len(self._numbers) > MOST_KNOWN:
            self._forget(next(known for known in self._numbers if known not in self._open))

    def _forget(self, pid: int) -> None:
        """It left nothing behind, or it is nobody who can be known again, or there are too many."""
        self._writers.discard(pid)
        for table in (self._numbers, self._sessions, self._rounds):
            table.pop(pid, None)
