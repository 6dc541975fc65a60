"""Which of the connections at the link's door speaks for which rank.

A worker's main process does, where it connects. Where that is only a shell around the training process, the first restartable process
below it does. Other children that connect for themselves (an evaluation that the rank starts) are greeted, but are not promised any
restart in place, and speak for nobody: theirs are plain calls, which nobody would ever tell to begin.

Invariants: at most one connection a rank; a rank without one hears nothing, and is told of as unlinked once it has lost one; who loses
its part to the main process, which came later, is cut off.
"""

from collections.abc import Callable, Mapping

from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.doors.link import Connection, LinkDoor
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import link

_PLAIN = link.Welcome(inplace=False, abort_timeout_s=0.0)


class WorkerLinks:
    """`alive()` is local rank -> pid of the workers that run; `said` and `unlinked` tell of ranks."""

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        alive: Callable[[], Mapping[int, int]],
        said: Callable[[int, link.FromWorker], None],
        unlinked: Callable[[int], None],
    ) -> None:
        self._reactor = reactor
        self._welcome = link.Welcome(config.inprocess_restart, config.abort_timeout_s, config.hang_timeout_s)
        self._alive = alive
        self._said = said
        self._unlinked = unlinked
        self._speakers: dict[int, Connection] = {}
        self._door: LinkDoor | None = None

    def open(self, run_dir: str, say: Callable[[str], None]) -> None:
        """Listen in the launcher's folder. Raises OSError; without a door workers can only be restarted as processes."""
        self._door = LinkDoor(self._reactor, run_dir, say, self._message, self._closed, self._alive)

    @property
    def address(self) -> str:
        """For the workers (`names.LINK`); "": nobody listens."""
        return self._door.address if self._door is not None else ""

    def send(self, local_rank: int, message: link.ToWorker) -> bool:
        """To this rank. False: it has no connection, and hears nothing."""
        connection = self._speakers.get(local_rank)
        if connection is None:
            return False
        connection.send(message)
        return True

    def ended(self, pid: int) -> None:
        """A worker's process was reaped."""
        if self._door is not None:
            self._door.drop(pid)

    def close(self) -> None:
        """Nobody is heard any more."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def _message(self, connection: Connection, message: link.FromWorker) -> None:
        local_rank = connection.local_rank
        if isinstance(message, link.Hello):
            former = self._speakers.get(local_rank)
            if connection.main or (message.restartable and not self._speaks(local_rank)):
                self._speakers[local_rank] = connection
                if former is not None and former.pid != connection.pid:
                    former.close("it spoke for its rank, until the rank's main process came to do that itself")
            mine = self._speakers.get(local_rank) is connection
            connection.send(self._welcome if mine else _PLAIN)
        if self._speakers.get(local_rank) is connection and local_rank in self._alive():
            self._said(local_rank, message)

    def _speaks(self, local_rank: int) -> bool:
        connection = self._speakers.get(local_rank)
        return connection is not None and not connection.closed

    def _closed(self, connection: Connection) -> None:
        local_rank = connection.local_rank
        if self._speakers.get(local_rank) is connection:
            del self._speakers[local_rank]
            if local_rank in self._alive():
                self._unlinked(local_rank)
