"""One client of door 1: torch's TCPStore protocol, read and answered (MESH S7).

A request is one byte and its arguments, numbers little-endian, strings with their length as 64 bit in front:

     0 validate (32 bit number)         5 check (n, keys) -> 0 all there | 1    10 multi-get (n, keys) -> n strings
     1 set (key, value)                 6 wait (n, keys) -> 0, later            11 multi-set (n, key, value, ...)
     2 compare-set (key, a, b) -> string 7 num-keys -> 64 bit                   12 cancel-wait -> 1
     3 get (key) -> string              8 delete (key) -> 64 bit                13 ping (32 bit) -> the same
     4 add (key, 64 bit) -> 64 bit      9 append (key, value)                   14 queue-push (key, value)
    15 queue-pop (key) -> 64 bit [string]   16 queue-len (key) -> 64 bit
    17 list-keys -> n, strings          18 barrier (key, 64 bit) -> 0, later

Clients wait for a value with 6 before 3, 10 and a blocking 15. What a client asks takes effect in the order asked. Writes that
need no answer (1, 9, 14) may be on their way together as long as they go to one node, where they are done in that order; before
anything is asked of another node they are acknowledged. The number in a ping is the
process's pid; by it the connections of one process are known to belong together.

States of a connection: *new* (not validated), *ready*, *asking* (a request is not answered yet, or waits for writes to be
acknowledged; only a cancel is looked at), *ending* (the client is gone, its last writes are still carried out), *choked* (the
client does not read its answers), *closed*. It belongs to the generation in which it was made and ends with it.

Invariants: a client harms only itself. What it sends is held up to the limits below; half a message is waited for
`HALF_S`; an answer that nobody reads stops the reading of requests.
Source: the client of torch 2.13, recorded; torch/csrc/distributed/c10d/TCPStoreBackend.hpp for the numbers' names.
"""

import socket
import struct
from collections.abc import Callable
from typing import Protocol

from hyperpodrun.agent.doors.asking import CANCELED, Asker, Encode
from hyperpodrun.agent.doors.processes import INIT_KEY, Processes
from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.wire import store as op

MAGIC = 0x3C85F7CE
MOST_KEY_BYTES = 1 << 20
MOST_STRINGS = 1 << 21
MOST_MESSAGE_BYTES = 256 << 20
MOST_HELD_BYTES = 1 << 30
"""By all connections together, of requests that are not complete."""
CHOKED_BYTES = 8 << 20
READ_BYTES = 1 << 16
READ_MORE_BYTES = 1 << 20

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_CHECK, _WAIT, _MULTI_GET, _MULTI_SET, _CANCEL_WAIT = 5, 6, 10, 11, 12


class _Incomplete(Exception):
    """More has to come; `args[0]` is how long the whole is at least, in bytes."""


class _Refused(Exception):
    """The client does not keep to the protocol; `args[0]` says how."""


class Door(Protocol):
    """What a connection needs of the door it came through."""

    reactor: Reactor
    complaints: Complaints

    def held(self, more_bytes: int) -> bool:
        """Account for what is held of unfinished requests; False when it is too much for all together."""
        ...

    def forget(self, connection: "Connection", held_bytes: int) -> None:
        """It closed."""
        ...

    def nameless(self) -> int:
        """A number for a client that does not tell its pid."""
        ...


class Connection(Asker):
    """One client. Everything happens in callbacks of the loop."""

    __slots__ = (
        "_buffer",
        "_door",
        "_ending",
        "_left",
        "_many",
        "_many_bytes",
        "_need_bytes",
        "_parsing",
        "_paused",
        "_socket",
        "_strings",
        "_valid",
        "since_s",
    )

    def __init__(self, door: Door, opened: socket.socket, space: KeySpace, processes: Processes) -> None:
        super().__init__(door.reactor, space, processes)
        self.since_s: float | None = door.reactor.now_s()
        """Since when something is missing of a request; None when nothing is."""
        self._door = door
        self._socket = opened
        self._ending = False
        self._valid = False
        self._buffer = bytearray()
        self._need_bytes = 1
        self._parsing = False
        self._paused = False
        self._many = 0
        self._left = 0
        self._many_bytes = 0
        self._strings: list[bytes] = []
        door.reactor.on_readable(opened.fileno(), self._readable)

    def close(self, why: str = "") -> None:
        """End it; a sentence is for the log."""
        if self._closed:
            return
        self._closed = True
        self._door.forget(self, len(self._buffer))
        self._reactor.forget(self._socket.fileno())
        self._socket.close()
        self._buffer.clear()
        self._out.clear()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._patience is not None:
            self._patience.cancel()
        if self._pid is not None:
            self._processes.leave(self._pid)
        if why:
            who = f"a process (pid {self._pid})" if self._pid and self._pid > 0 else "somebody"
            self._door.complaints.about(why.partition(":")[0], f"the connection of {who} to the store was closed: {why}")

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
        if not self._door.held(len(data)):
            self.close(f"too much is held for all clients together: {MOST_HELD_BYTES >> 20} MiB of unfinished requests")
        elif len(self._buffer) > op.MOST_VALUE_BYTES + 2 * READ_MORE_BYTES:
            # Only a client that does not wait for its answers gets here: it has to wait now.
            self._paused = True
            self._reactor.forget_readable(self._socket.fileno())

    def _resume(self) -> None:
        """Go on with what is held."""
        if self._parsing or self._out_bytes > CHOKED_BYTES or not self._buffer:
            return
        if self._pending is not None and self._buffer[0] != _CANCEL_WAIT:
            return
        data = bytes(self._buffer)
        self._door.held(-len(data))
        self._buffer.clear()
        if self._paused and not self._ending:
            self._paused = False
            self._reactor.on_readable(self._socket.fileno(), self._readable)
        if data:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._parsing = True
        at, end = 0, len(data)
        self._need_bytes = 1
        try:
            while at < end and self._out_bytes <= CHOKED_BYTES:
                if self._pending is not None:
                    if data[at] != _CANCEL_WAIT:
                        break
                    self._pending.cancel()  # the client's patience is over
                    self._pending = None
                if self._left:
                    at = self._take_strings(data, at)
                else:
                    request = _REQUESTS.get(data[at])
                    if request is None:
                        raise _Refused(f"request {data[at]} is not one that this version knows")
                    if not self._valid and data[at] != 0:
                        raise _Refused("it does not begin as torch's TCPStore client does")
                    at = request(self, data, at + 1)
        except _Incomplete as more:
            self._need_bytes = more.args[0] - at
        except _Refused as why:
            self.close(why.args[0])
        finally:
            self._parsing = False
        if self._closed:
            return
        if at < end:
            self._hold(data[at:])
        self.since_s = self._reactor.now_s() if (at < end or self._left) and self._pending is None else None
        if self._out:
            self._flush()

    def _string(self, data: bytes, at: int, most_bytes: int) -> tuple[bytes, int]:
        if at + 8 > len(data):
            raise _Incomplete(at + 8)
        (length,) = _U64.unpack_from(data, at)
        if length > most_bytes:
            raise _Refused(f"a string is too long: {length} bytes, the limit is {most_bytes}")
        at += 8
        if at + length > len(data):
            raise _Incomplete(at + length)
        return data[at : at + length], at + length

    def _key(self, data: bytes, at: int) -> tuple[bytes, int]:
        return self._string(data, at, MOST_KEY_BYTES)

    def _value(self, data: bytes, at: int) -> tuple[bytes, int]:
        return self._string(data, at, op.MOST_VALUE_BYTES)

    def _number(self, data: bytes, at: int, form: struct.Struct) -> tuple[int, int]:
        if at + form.size > len(data):
            raise _Incomplete(at + form.size)
        return form.unpack_from(data, at)[0], at + form.size

    # --- requests

    def _validate(self, data: bytes, at: int) -> int:
        number, at = self._number(data, at, _U32)
        if number != MAGIC:
            raise _Refused("it does not begin as torch's TCPStore client does")
        self._valid = True
        return at

    def _ping(self, data: bytes, at: int) -> int:
        number, at = self._number(data, at, _U32)
        if self._pid is None:
            self._enter(number)
        self._say(_U32.pack(number))
        return at

    def _set(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._ask(op.Set(key, value), Asker._say_nothing)
        return at

    def _compare_set(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        expected, at = self._value(data, at)
        desired, at = self._value(data, at)
        self._ask(op.CompareSet(key, expected, desired), Asker._say_string)
        return at

    def _get(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Get(key), Asker._say_string)
        return at

    def _add(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        amount, at = self._number(data, at, _I64)
        self._rendezvous = self._rendezvous or key == INIT_KEY
        self._ask(op.Add(key, amount), Asker._say_number)
        return at

    def _num_keys(self, _data: bytes, at: int) -> int:
        self._ask_all(op.NumKeys(), Asker._say_sum)
        return at

    def _delete(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Delete(key), Asker._say_number)
        return at

    def _append(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._ask(op.Append(key, value), Asker._say_nothing)
        return at

    def _cancel_wait(self, _data: bytes, at: int) -> int:
        self._say(CANCELED)
        return at

    def _queue_push(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._ask(op.Push(key, value), Asker._say_nothing)
        return at

    def _queue_pop(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Pop(key), Asker._say_item)
        return at

    def _queue_len(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Length(key), Asker._say_number)
        return at

    def _list_keys(self, _data: bytes, at: int) -> int:
        self._ask_all(op.ListKeys(), Asker._say_keys)
        return at

    def _barrier(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        size, at = self._number(data, at, _I64)
        self._ask(op.Arrive(key, size), Asker._say_ready)
        return at

    def _begin_many(self, data: bytes, at: int) -> int:
        """5, 6, 10, 11: what follows is taken string by string as it comes."""
        count, after = self._number(data, at, _U64)
        strings = 2 * count if data[at - 1] == _MULTI_SET else count
        if strings > MOST_STRINGS:
            raise _Refused(f"too many keys in one request: {count}")
        self._many, self._left, self._many_bytes = data[at - 1], strings, 0
        if not strings:
            self._ask_many()
        return after

    def _take_strings(self, data: bytes, at: int) -> int:
        pairs = self._many == _MULTI_SET
        try:
            while self._left:
                string, at = self._key(data, at) if not pairs or self._left % 2 == 0 else self._value(data, at)
                self._strings.append(string)
                self._many_bytes += len(string)
                self._left -= 1
                if self._many_bytes > MOST_MESSAGE_BYTES:
                    raise _Refused(f"a request is too long: {self._many_bytes} bytes, the limit is {MOST_MESSAGE_BYTES}")
        except _Incomplete as more:
            self._need_bytes = more.args[0] - at
            if at == len(data):
                return at
            self._hold(data[at:])
            return len(data)
        self._ask_many()
        return at

    def _ask_many(self) -> None:
        strings, self._strings = self._strings, []
        operations: list[op.KeyOperation]
        encode: Encode
        match self._many:
            case 5:
                operations, encode = [op.Check(key) for key in strings], Asker._say_whether_all
            case 6:
                self._wait(strings)
                return
            case 10:
                operations, encode = [op.Get(key) for key in strings], Asker._say_strings
            case _:
                keys = iter(strings)
                operations, encode = [op.Set(key, next(keys)) for key in keys], Asker._say_nothing
        self._ask_each(operations, encode)

    def _go_on(self) -> None:
        if self._parsing:
            return
        if self._buffer and len(self._buffer) >= self._need_bytes and not self._closed:
            self._resume()
        if self._out:
            self._flush()
        if self._ending:
            self._leave_if_done()

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
        if not self._closed and not self._out:
            self._reactor.forget_writable(self._socket.fileno())
            if self._buffer:
                self._resume()


_REQUESTS: dict[int, Callable[[Connection, bytes, int], int]] = {
    0: Connection._validate,
    1: Connection._set,
    2: Connection._compare_set,
    3: Connection._get,
    4: Connection._add,
    _CHECK: Connection._begin_many,
    _WAIT: Connection._begin_many,
    7: Connection._num_keys,
    8: Connection._delete,
    9: Connection._append,
    _MULTI_GET: Connection._begin_many,
    _MULTI_SET: Connection._begin_many,
    _CANCEL_WAIT: Connection._cancel_wait,
    13: Connection._ping,
    14: Connection._queue_push,
    15: Connection._queue_pop,
    16: Connection._queue_len,
    17: Connection._list_keys,
    18: Connection._barrier,
}
