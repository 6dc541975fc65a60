"""Which connection at the link's door is which worker's.

A worker is known by its pid, which the kernel vouches for. Where the worker's main process is a wrapper around the training process
(a shell script), the connection comes from below it: then the first restartable one speaks for the rank. Children of a worker that
connect for themselves (data loaders) are heard, but speak for nobody.

States of a connection: *unknown* (nothing said yet, or a stranger's), *a rank's*.
Invariants: at most one connection a rank; what it said before its process was known here is kept until `started`.
"""

import os
from collections.abc import Callable, Mapping

from hyperpodrun.agent import family
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.doors.link import LinkDoor, Peer
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import link, names

_GENERATIONS_DEEP = 8
"""So many parents up a worker is looked for."""


class WorkerLinks:
    """`alive()` is local rank -> pid of the workers that run; `said` and `unlinked` tell of ranks."""

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        folder: str,
        alive: Callable[[], Mapping[int, int]],
        said: Callable[[int, link.FromWorker], None],
        unlinked: Callable[[int], None],
    ) -> None:
        self._welcome = link.Welcome(config.inprocess_restart, config.abort_timeout_s, config.hang_timeout_s)
        self._alive = alive
        self._said = said
        self._unlinked = unlinked
        self._ranks: dict[Peer, int] = {}
        self._peers: dict[int, Peer] = {}
        self._door = LinkDoor(reactor, os.path.join(folder, "link"), self._message, self._closed)

    def variables(self) -> dict[bytes, bytes]:
        """What tells a worker where to connect."""
        return {names.LINK.encode(): b"unix:" + os.fsencode(self._door.path)}

    def send(self, local_rank: int, message: link.ToWorker) -> None:
        """To this rank; one without a connection hears nothing."""
        if peer := self._peers.get(local_rank):
            peer.send(message)

    def close(self) -> None:
        """Nobody is heard any more."""
        self._door.close()

    def _message(self, peer: Peer, message: link.FromWorker) -> None:
        local_rank = self._ranks.get(peer)
        if isinstance(message, link.Hello):
            peer.send(self._welcome)
            local_rank = self._owner(peer.pid, message)
            if local_rank is None:
                return
            if (older := self._peers.get(local_rank)) is not None:
                self._ranks.pop(older, None)
            self._ranks[peer] = local_rank
            self._peers[local_rank] = peer
        if local_rank is not None and local_rank in self._alive():
            self._said(local_rank, message)

    def _owner(self, pid: int, hello: link.Hello) -> int | None:
        """For which rank this process speaks; None: for none."""
        by_pid = {worker: local_rank for local_rank, worker in self._alive().items()}
        if pid in by_pid:
            return by_pid[pid]
        if not hello.restartable:
            return None
        for _ in range(_GENERATIONS_DEEP):
            process = family.read_process(pid)
            if process is None:
                return None
            pid = process.parent
            if pid in by_pid:
                local_rank = by_pid[pid]
                return local_rank if local_rank not in self._peers else None
        return None

    def _closed(self, peer: Peer) -> None:
        local_rank = self._ranks.pop(peer, None)
        if local_rank is not None and self._peers.get(local_rank) is peer:
            del self._peers[local_rank]
            if local_rank in self._alive():
                self._unlinked(local_rank)
