"""One client of door 1: its socket, what is held for it, its end (MESH S7). What it asks: requests.py, asking.py.

What a client asks takes effect in the order asked. Writes that need no answer may be on their way together as long as they go to one
node, where they are done in that order; before anything is asked of another node they are acknowledged.

States of a connection: *new* (not validated), *ready*, *asking* (a request is not answered yet, or waits for writes to be
acknowledged; only a cancel is looked at), *ending* (the client is gone, its last writes are still carried out), *choked* (the
client does not read its answers), *closed*. It belongs to the generation in which it was made and ends with it.

Invariants: a client harms only itself. What is held for it (requests that are not complete, keys it waits for, answers it has not
read) is charged to the door, which closes the connection with most when all together have too much; half a message is waited for
`HALF_S`; an answer that nobody reads stops the reading of requests.
"""

import socket
from typing import Protocol

from hyperpodrun.agent.doors.asking import Asker, Job
from hyperpodrun.agent.doors.processes import Processes
from hyperpodrun.agent.doors.requests import CANCEL_WAIT, Incomplete, Refused, Requests
from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.wire import store as op

CHOKED_BYTES = 8 << 20
READ_BYTES = 1 << 16
READ_MORE_BYTES = 1 << 20
CHARGED_AT_BYTES = 1 << 14
"""Less is not counted to the byte: a connection's charge moves in steps."""


class Door(Protocol):
    """What a connection needs of the door it came through."""

    reactor: Reactor
    complaints: Complaints
    job: Job

    def charge(self, more_bytes: int) -> None:
        """Account for what is held; the connection with most may be closed for it."""
        ...

    def forget(self, connection: "Connection") -> None:
        """It closed."""
        ...

    def nameless(self) -> int:
        """A number for a client that does not tell its pid."""
        ...


class Connection(Requests):
    """One client. Everything happens in callbacks of the loop."""

    __slots__ = ("_buffer", "_door", "_ending", "_parsing", "_paused", "_socket", "charged_bytes", "since_s")

    def __init__(self, door: Door, opened: socket.socket, space: KeySpace, processes: Processes) -> None:
        super().__init__(door.reactor, space, processes, door.job)
        self.since_s: float | None = door.reactor.now_s()
        """Since when something is missing of a request; None when nothing is."""
        self.charged_bytes = 0
        """What the door was told to be held here."""
        self._door = door
        self._socket = opened
        self._ending = False
        self._buffer = bytearray()
        self._parsing = False
        self._paused = False
        door.reactor.on_readable(opened.fileno(), self._readable)

    def close(self, why: str = "", topic: str = "") -> None:
        """End it; a sentence is for the log, where each topic is told of once a minute."""
        if self._closed:
            return
        self._closed = True
        self._door.charge(-self.charged_bytes)
        self._door.forget(self)
        self._reactor.forget(self._socket.fileno())
        self._socket.close()
        self._buffer.clear()
        self._strings.clear()
        self._out.clear()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._patience is not None:
            self._patience.cancel()
        if self._pid is not None:
            self._processes.leave(self._pid, self._wrote)
        if why:
            who = f"a process (pid {self._pid})" if self._pid and self._pid > 0 else "somebody"
            self._door.complaints.about(topic or why, f"the connection of {who} to the store was closed: {why}")

    @property
    def greeted(self) -> bool:
        """Has it had an answer, or asked for one? Torch's client begins with a ping."""
        return self._client is not None

    # --- in

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES if self._need_bytes < READ_BYTES else READ_MORE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ending = True
            self._reactor.forget_readable(self._socket.fileno())
            self._leave_if_done()
            return
        if self._buffer or self._pending is not None or self._out_bytes > CHOKED_BYTES:
            self._hold(data)
            if not self._closed and len(self._buffer) >= self._need_bytes:
                self._resume()
            return
        self._parse(data)

    def _nameless(self) -> int:
        return self._door.nameless()

    def _leave_if_done(self) -> None:
        """The client is gone: what it still waits for does not matter, what it wrote does."""
        asks = self._pending is not None and self._pending is not self._drained and self._encode is not Asker._say_nothing
        if self._ending and (asks or (self._pending is None and len(self._buffer) < self._need_bytes) or self._out_bytes):
            self.close()

    def _hold(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > op.MOST_VALUE_BYTES + 2 * READ_MORE_BYTES:
            # Only a client that does not wait for its answers gets here: it has to wait now.
            self._paused = True
            self._reactor.forget_readable(self._socket.fileno())
        self._charge()

    def _charge(self) -> None:
        held_bytes = len(self._buffer) + self._many_bytes + self._asked_bytes + self._out_bytes
        more_bytes = held_bytes - self.charged_bytes
        if not -CHARGED_AT_BYTES < more_bytes < CHARGED_AT_BYTES and not self._closed:
            self.charged_bytes = held_bytes
            self._door.charge(more_bytes)

    def _resume(self) -> None:
        """Go on with what is held."""
        if self._parsing or self._out_bytes > CHOKED_BYTES or not self._buffer:
            return
        if self._pending is not None and self._buffer[0] != CANCEL_WAIT:
            return
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._paused and not self._ending:
            self._paused = False
            self._reactor.on_readable(self._socket.fileno(), self._readable)
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._parsing = True
        at, end = 0, len(data)
        self._need_bytes = 1
        try:
            while at < end and not self._closed and self._out_bytes <= CHOKED_BYTES:
                if self._pending is not None and data[at] != CANCEL_WAIT:
                    break
                at = self._one(data, at)
        except Incomplete as more:
            self._need_bytes = more.args[0] - at
        except Refused as why:
            self.close(why.args[0], "protocol")
        finally:
            self._parsing = False
        if self._closed:
            return
        if at < end:
            self._hold(data[at:])
        self.since_s = self._reactor.now_s() if (at < end or self._left) and self._pending is None else None
        if self._out:
            self._flush()
        self._charge()

    def _go_on(self) -> None:
        if self._parsing:
            return
        if self._buffer and len(self._buffer) >= self._need_bytes and not self._closed:
            self._resume()
        if self._out:
            self._flush()
        if self._ending:
            self._leave_if_done()

    # --- out

    def _flush(self) -> None:
        if self._closed or not self._out:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        self._out_bytes = len(data) - sent
        if self._out_bytes:
            self._out = [data[sent:]] if sent else [data]
            self._reactor.on_writable(self._socket.fileno(), self._writable)
        else:
            self._out = []

    def _writable(self) -> None:
        self._flush()
        if not self._closed:
            self._charge()
            if not self._out:
                self._reactor.forget_writable(self._socket.fileno())
                if self._buffer:
                    self._resume()
