"""Door 1: a port of this host on which the agent is the TCPStore server of torch's clients (MESH S7).

An unmodified script's store is then the agent: its C++ client needs no interpreter, and no rank serves another. The protocol is in
connection.py. The port stays through all generations; a connection belongs to the one in which it was made and ends with it.

States: *new* (no generation yet: connections are closed at once), *open* (a generation is), *shut* (it has ended: who connects is
greeted, and refused what it asks for), *closed*.
"""

import errno
import resource
import socket

from hyperpodrun.agent.doors.asking import Job
from hyperpodrun.agent.doors.connection import Connection
from hyperpodrun.agent.doors.processes import Processes
from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport.complaints import Complaints

MOST_CONNECTIONS = 16384
HALF_S = 60.0
"""So long the rest of a request is waited for."""
SWEEP_S = 10.0


class TcpStoreDoor:
    """The listening socket on `host`:`port`. Raises OSError when it cannot be bound.

    Connections are taken while a generation is open (`space`), and closed at once in between. All together may hold `limit_bytes`.
    `job` answers what is asked about the job.
    """

    def __init__(self, reactor: Reactor, host: str, port: int, complaints: Complaints, limit_bytes: int, job: Job) -> None:
        self.reactor = reactor
        self.complaints = complaints
        self.job = job
        self.host = host
        self._limit_bytes = limit_bytes
        # The agent needs descriptors for other things too: half of them stay free.
        self._most_connections = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._held_bytes = 0
        self._nameless_count = 0
        self._space: KeySpace | None = None
        self._processes: Processes | None = None
        self._connections: dict[Connection, None] = {}
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(4096)
            self._socket.setblocking(False)
            self.port = int(self._socket.getsockname()[1])
            reactor.on_readable(self._socket.fileno(), self._accept)
        except OSError:
            self._socket.close()
            raise
        self._sweeper: Timer = reactor.call_later(SWEEP_S, self._sweep)

    def open(self, space: KeySpace) -> None:
        """Connections made from now on belong to this generation."""
        self.shut()
        self._space, self._processes = space, Processes(space)

    def shut(self) -> None:
        """The generation is over: its connections end.

        Whoever connects now is still greeted, and refused when it asks for something: torch's client tries again and again, deaf to
        signals, for as long as it is not greeted (TCPStore.cpp, the constructor), and a worker has to hear that it is to leave.
        Those that wait for their greeting at this moment get it too: a reset would cost them half a second.
        """
        for connection in list(self._connections):
            if connection.greeted:
                connection.close()

    def close(self) -> None:
        """Stop listening."""
        for connection in list(self._connections):
            connection.close()
        self._space = self._processes = None
        self._sweeper.cancel()
        if self._socket.fileno() >= 0:
            self.reactor.forget(self._socket.fileno())
            self._socket.close()

    # --- for connections

    def charge(self, more_bytes: int) -> None:
        """Account for what a connection holds. When that is too much for all together, the one with most goes."""
        self._held_bytes += more_bytes
        while more_bytes > 0 and self._held_bytes > self._limit_bytes and self._connections:
            greatest = max(self._connections, key=lambda connection: connection.charged_bytes)
            if not greatest.charged_bytes:
                return
            greatest.close(
                f"too much is held for all clients together, the limit is {self._limit_bytes >> 20} MiB, and for this one most: "
                f"{greatest.charged_bytes >> 20} MiB",
                "held",
            )

    def forget(self, connection: Connection) -> None:
        """It closed."""
        self._connections.pop(connection, None)

    def nameless(self) -> int:
        """A number for a client that does not tell its pid."""
        self._nameless_count += 1
        return self._nameless_count

    # --- inside

    def _accept(self) -> None:
        for _ in range(64):
            try:
                opened, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return
                self.complaints.about("accept", f"a connection to the store has to wait: {error.strerror}; raise `ulimit -n`")
                self.reactor.forget_readable(self._socket.fileno())
                self.reactor.call_later(0.2, self._accept_again)
                return
            if self._space is None or self._processes is None or not self._has_room():
                opened.close()
                continue
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[Connection(self, opened, self._space, self._processes)] = None

    def _has_room(self) -> bool:
        """For one more; a client that has sent nothing, or half a request, for longest makes room."""
        if len(self._connections) < self._most_connections:
            return True
        self.complaints.about("full", f"{len(self._connections)} clients are connected to the store: no more are taken")
        oldest = next((connection for connection in self._connections if connection.since_s is not None), None)
        if oldest is not None:
            oldest.close()
        return oldest is not None

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self.reactor.on_readable(self._socket.fileno(), self._accept)

    def _sweep(self) -> None:
        self._sweeper = self.reactor.call_later(SWEEP_S, self._sweep)
        old_s = self.reactor.now_s() - HALF_S
        for connection in list(self._connections):
            if connection.since_s is not None and connection.since_s < old_s:
                connection.close(f"half a request: the rest did not come within {HALF_S:.0f} s", "half")
