"""Door 1: a port of this host on which the agent is the TCPStore server of torch's clients (MESH S7).

An unmodified script's store is then the agent: its C++ client needs no interpreter, and no rank serves another. The protocol is in
connection.py. The port stays through all generations; a connection belongs to the one in which it was made and ends with it.

States: *open* (a generation is, connections are taken), *shut* (in between they are closed at once), *closed*.
"""

import errno
import socket

from hyperpodrun.agent.doors.connection import MOST_HELD_BYTES, Connection
from hyperpodrun.agent.doors.processes import Processes
from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport.complaints import Complaints

MOST_CONNECTIONS = 16384
HALF_S = 60.0
SWEEP_S = 10.0


class TcpStoreDoor:
    """The listening socket on `host`:`port`. Raises OSError when it cannot be bound.

    Connections are taken while a generation is open (`space`), and closed at once in between.
    """

    def __init__(self, reactor: Reactor, host: str, port: int, complaints: Complaints) -> None:
        self.reactor = reactor
        self.complaints = complaints
        self.host = host
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
        """
        for connection in list(self._connections):
            connection.close()

    def close(self) -> None:
        """Stop listening."""
        self.shut()
        self._space = self._processes = None
        self._sweeper.cancel()
        if self._socket.fileno() >= 0:
            self.reactor.forget(self._socket.fileno())
            self._socket.close()

    # --- for connections

    def held(self, more_bytes: int) -> bool:
        """Account for what a connection holds; False when it is too much for all together."""
        self._held_bytes += more_bytes
        return self._held_bytes <= MOST_HELD_BYTES

    def forget(self, connection: Connection, held_bytes: int) -> None:
        """It closed."""
        self._held_bytes -= held_bytes
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
            if self._space is None or self._processes is None or len(self._connections) >= MOST_CONNECTIONS:
                opened.close()
                continue
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[Connection(self, opened, self._space, self._processes)] = None

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self.reactor.on_readable(self._socket.fileno(), self._accept)

    def _sweep(self) -> None:
        self._sweeper = self.reactor.call_later(SWEEP_S, self._sweep)
        old_s = self.reactor.now_s() - HALF_S
        for connection in list(self._connections):
            if connection.since_s is not None and connection.since_s < old_s:
                connection.close(f"half a request: the rest did not come within {HALF_S:.0f} s")
