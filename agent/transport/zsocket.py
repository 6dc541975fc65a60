"""ZeroMQ sockets on the agent's epoll: the one place that knows how they differ from descriptors.

A ZeroMQ socket's descriptor only says "look again": it is edge-triggered, and any call on the socket may swallow the edge. So a
`Source` reads until the socket says Again, and whoever sends on a socket that is also read calls `pump` afterwards. At most
`MESSAGES_A_TURN` are read in one turn of the loop (Z1); the rest follows in the next one.

Monitors are PAIR sockets that libzmq's I/O thread writes to, blocking: theirs has no high-water mark here, or a flood of
connections could stop all traffic of the process.

Source: zmq_getsockopt(3) ZMQ_FD, zmq_socket_monitor(3), zmq_setsockopt(3).
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from hyperpodrun.agent.reactor import Reactor

MESSAGES_A_TURN = 256

Socket = zmq.Socket[bytes]
_EVENT = struct.Struct("=HI")
NOBLOCK = int(zmq.NOBLOCK)

HANDSHAKE_FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Settings(msgspec.Struct, frozen=True):
    """Z3. Durations in milliseconds, as libzmq counts them."""

    high_water_mark: int = 1000
    backlog: int = 4096
    handshake_ms: int = 3000
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 3000
    largest_message_bytes: int = 64 << 20


class Source:
    """Calls `read_one` for every message of a socket; `read_one` returns False, or raises zmq.Again, when there is none left."""

    def __init__(self, reactor: Reactor, socket: Socket, read_one: Callable[[], bool]) -> None:
        self._reactor = reactor
        self._fd = int(socket.getsockopt(zmq.FD))
        self._read_one = read_one
        self._open = True
        self._again = False
        reactor.on_readable(self._fd, self.pump)
        reactor.call_later(0, self.pump)  # what came before the descriptor was watched

    def pump(self) -> None:
        """Read what is there."""
        try:
            for _ in range(MESSAGES_A_TURN):
                if not self._open or not self._read_one():
                    return
        except zmq.Again:
            return
        if not self._again:
            self._again = True
            self._reactor.call_later(0, self._pump_again)

    def close(self) -> None:
        """Stop reading; to be called before the socket is closed."""
        if self._open:
            self._open = False
            self._reactor.forget(self._fd)

    def _pump_again(self) -> None:
        self._again = False
        self.pump()


class Monitor:
    """Tells what happens to a socket's connections: `on_event(event, value)`, see zmq_socket_monitor(3) for the values.

    `on_drained`: all that has happened until now was told.
    """

    _count = 0

    def __init__(
        self,
        reactor: Reactor,
        socket: Socket,
        events: int,
        on_event: Callable[[int, int], None],
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        Monitor._count += 1
        place = f"inproc://monitor-{Monitor._count}"
        self._watched = socket
        self._on_event = on_event
        self._on_drained = on_drained
        socket.monitor(place, events)
        self._pair = socket.context.socket(zmq.PAIR)
        self._pair.setsockopt(zmq.LINGER, 0)
        self._pair.setsockopt(zmq.RCVHWM, 0)
        self._pair.connect(place)
        self._source = Source(reactor, self._pair, self._read_one)

    def close(self) -> None:
        """To be called before the watched socket is closed."""
        self._source.close()
        self._watched.disable_monitor()
        self._pair.close()

    def _read_one(self) -> bool:
        try:
            event, value = _EVENT.unpack(self._pair.recv(NOBLOCK))
        except zmq.Again:
            self._on_drained()
            return False
        self._pair.recv(NOBLOCK)
        self._on_event(event, value)
        return True


def new_socket(context: "zmq.Context[Any]", kind: int, settings: Settings) -> Socket:
    """A socket with the settings all of ours share."""
    socket: Socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.SNDHWM, settings.high_water_mark),
        (zmq.RCVHWM, settings.high_water_mark),
        (zmq.HANDSHAKE_IVL, settings.handshake_ms),
    ):
        socket.setsockopt(option, value)
    return socket


def drop_rest(socket: Socket) -> bool:
    """Read and forget the other parts of the message whose first part was just read; whether there were any."""
    some = False
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(NOBLOCK)
        some = True
    return some
