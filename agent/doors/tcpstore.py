"""Door 1: the protocol of torch's TCPStore client, so that an unmodified script's store is the agent (MESH S7).

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

import errno
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hyperpodrun.agent.mesh.keyspace import KeySpace, Pending
from hyperpodrun.agent.mesh.shard import PER_ROUND, Client
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.wire import store as op

MAGIC = 0x3C85F7CE
MOST_KEY_BYTES = 1 << 20
MOST_STRINGS = 1 << 21
MOST_MESSAGE_BYTES = 256 << 20
MOST_HELD_BYTES = 1 << 30
"""By all connections together, of requests that are not complete."""
MOST_CONNECTIONS = 16384
CHOKED_BYTES = 8 << 20
MOST_UNACKNOWLEDGED = 1000
LARGE_BYTES = 1 << 16
"""Larger values travel one at a time."""
HALF_S = 60.0
PATIENCE_S = 30.0
"""So long a rank that makes its process group again waits for its peers to do so too; then it takes what there is."""
INIT_KEY = b"init/"
"""Every client that is told the number of workers adds one to it first; clones are not."""
SWEEP_S = 10.0
READ_BYTES = 1 << 16
READ_MORE_BYTES = 1 << 20

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_READY, _CANCELED = b"\0", b"\1"
_CHECK, _WAIT, _MULTI_GET, _MULTI_SET, _CANCEL_WAIT = 5, 6, 10, 11, 12


class _Incomplete(Exception):
    """More has to come; `args[0]` is how long the whole is at least, in bytes."""


class _Refused(Exception):
    """The client does not keep to the protocol; `args[0]` says how."""


class Processes:
    """Who is connected in one generation.

    A *session* of a process lasts from its first connection to its last. Its *round* counts the process groups that it has begun:
    connections that torch's rendezvous made (their first request adds to `INIT_KEY`) and that went on to a key of PER_ROUND.
    """

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._open: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._rounds: dict[int, int] = {}

    def enter(self, pid: int) -> Client:
        """A connection of this process was made."""
        number = self._numbers.setdefault(pid, len(self._numbers) + 1)
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

    def leave(self, pid: int) -> None:
        """A connection closed."""
        self._open[pid] -= 1
        if not self._open[pid]:
            del self._open[pid]
            self._space.left(self._numbers[pid], self._sessions[pid])


class Connection:
    """One client. Everything happens in callbacks of the loop."""

    __slots__ = (
        "_buffer",
        "_client",
        "_door",
        "_drained",
        "_encode",
        "_ending",
        "_left",
        "_many",
        "_many_bytes",
        "_need_bytes",
        "_out",
        "_out_bytes",
        "_parsing",
        "_patience",
        "_patient_until_s",
        "_paused",
        "_pending",
        "_pid",
        "_processes",
        "_rendezvous",
        "_socket",
        "_space",
        "_strings",
        "_unacknowledged",
        "_unacknowledged_at",
        "_valid",
        "since_s",
    )

    def __init__(self, door: "TcpStoreDoor", opened: socket.socket, space: KeySpace, processes: Processes) -> None:
        self.since_s: float | None = door.reactor.now_s()
        """Since when something is missing of a request; None when nothing is."""
        self._door = door
        self._socket = opened
        self._space = space
        self._processes = processes
        self._client: Client | None = None
        self._unacknowledged = 0
        self._unacknowledged_at = ""
        self._drained: Pending | None = None
        self._ending = False
        self._rendezvous = False
        self._patient_until_s = 0.0
        self._patience: Timer | None = None
        self._pid: int | None = None
        self._valid = False
        self._buffer = bytearray()
        self._need_bytes = 1
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._pending: Pending | None = None
        self._parsing = False
        self._paused = False
        self._encode: Callable[[Connection, Any], None] | None = None
        self._many = 0
        self._left = 0
        self._many_bytes = 0
        self._strings: list[bytes] = []
        door.reactor.on_readable(opened.fileno(), self._readable)

    def close(self, why: str = "") -> None:
        """End it; a sentence is for the log."""
        if self._socket.fileno() < 0:
            return
        self._door.forget(self, len(self._buffer))
        self._door.reactor.forget(self._socket.fileno())
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
            self._door.reactor.forget_readable(self._socket.fileno())
            self._leave_if_done()
            return
        if self._buffer or self._pending is not None or self._out_bytes > CHOKED_BYTES:
            self._hold(data)
            if self._socket.fileno() >= 0 and len(self._buffer) >= self._need_bytes:
                self._resume()
            return
        self._parse(data)

    def _leave_if_done(self) -> None:
        """The client is gone: what it still waits for does not matter, what it wrote does."""
        asks = self._pending is not None and self._pending is not self._drained and self._encode is not Connection._say_nothing
        if self._ending and (asks or (self._pending is None and len(self._buffer) < self._need_bytes) or self._out_bytes):
            self.close()

    def _hold(self, data: bytes) -> None:
        self._buffer += data
        if not self._door.held(len(data)):
            self.close(f"too much is held for all clients together: {MOST_HELD_BYTES >> 20} MiB of unfinished requests")
        elif len(self._buffer) > op.MOST_VALUE_BYTES + 2 * READ_MORE_BYTES:
            # Only a client that does not wait for its answers gets here: it has to wait now.
            self._paused = True
            self._door.reactor.forget_readable(self._socket.fileno())

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
            self._door.reactor.on_readable(self._socket.fileno(), self._readable)
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
        if self._socket.fileno() < 0:
            return
        if at < end:
            self._hold(data[at:])
        self.since_s = self._door.reactor.now_s() if (at < end or self._left) and self._pending is None else None
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

    def _enter(self, pid: int) -> None:
        self._pid = pid
        self._client = self._processes.enter(pid)

    def _set(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._ask(op.Set(key, value), Connection._say_nothing)
        return at

    def _compare_set(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        expected, at = self._value(data, at)
        desired, at = self._value(data, at)
        self._ask(op.CompareSet(key, expected, desired), Connection._say_string)
        return at

    def _get(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Get(key), Connection._say_string)
        return at

    def _add(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        amount, at = self._number(data, at, _I64)
        self._rendezvous = self._rendezvous or key == INIT_KEY
        self._ask(op.Add(key, amount), Connection._say_number)
        return at

    def _num_keys(self, _data: bytes, at: int) -> int:
        self._ask_all(op.NumKeys(), Connection._say_sum)
        return at

    def _delete(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Delete(key), Connection._say_number)
        return at

    def _append(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._ask(op.Append(key, value), Connection._say_nothing)
        return at

    def _cancel_wait(self, _data: bytes, at: int) -> int:
        self._say(_CANCELED)
        return at

    def _queue_push(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._ask(op.Push(key, value), Connection._say_nothing)
        return at

    def _queue_pop(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Pop(key), Connection._say_item)
        return at

    def _queue_len(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        self._ask(op.Length(key), Connection._say_number)
        return at

    def _list_keys(self, _data: bytes, at: int) -> int:
        self._ask_all(op.ListKeys(), Connection._say_keys)
        return at

    def _barrier(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        size, at = self._number(data, at, _I64)
        self._ask(op.Arrive(key, size), Connection._say_ready)
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
        encode: Callable[[Connection, Any], None]
        match self._many:
            case 5:
                operations, encode = [op.Check(key) for key in strings], Connection._say_whether_all
            case 6:
                self._wait(strings)
                return
            case 10:
                operations, encode = [op.Get(key) for key in strings], Connection._say_strings
            case _:
                keys = iter(strings)
                operations, encode = [op.Set(key, next(keys)) for key in keys], Connection._say_nothing
        self._ask_each(operations, encode)

    def _who(self) -> Client:
        if self._client is None:
            self._enter(-self._door.nameless())  # a client that does not ping stands for itself
            assert self._client is not None
        return self._client

    def _wait(self, keys: list[bytes]) -> None:
        """Until all are there: those of this round, while there is patience."""
        rest_s = self._patient_until_s - self._door.reactor.now_s() if self._patient_until_s else 0.0
        self._ask_each([op.Watch(key, rest_s <= 0) for key in keys], Connection._say_ready)
        if rest_s > 0 and (pending := self._pending) is not None:

            def impatient() -> None:
                if self._pending is pending:
                    pending.cancel()
                    self._pending, self._patient_until_s = None, 0.0
                    self._wait(keys)
                    self._go_on()

            self._patience = self._door.reactor.call_later(rest_s, impatient)

    def _ask_each(self, operations: Sequence[op.KeyOperation], encode: "Callable[[Connection, Any], None]") -> None:
        if self._rendezvous and any(operation.key.startswith(PER_ROUND) for operation in operations):
            self._begin_round()
        if len(operations) == 1 and encode is not Connection._say_strings:
            self._ask(operations[0], encode)
        elif self._unacknowledged:
            self._when_drained(lambda: self._ask_each(operations, encode))
        else:
            self._settle(self._space.call_each(self._who(), operations, self._done), encode)

    def _ask(self, operation: op.KeyOperation, encode: "Callable[[Connection, Any], None]") -> None:
        if self._rendezvous and operation.key.startswith(PER_ROUND):
            self._begin_round()
        if self._unacknowledged:
            owner = self._space.owner(operation.key)
            if owner != self._unacknowledged_at or self._unacknowledged >= MOST_UNACKNOWLEDGED:
                self._when_drained(lambda: self._ask(operation, encode))
                return
        if encode is not Connection._say_nothing or len(operation.value) > LARGE_BYTES:  # type: ignore[union-attr]
            self._settle(self._space.call(self._client or self._who(), operation, self._done), encode)
            return
        answer = self._space.call(self._client or self._who(), operation, self._acknowledged)
        if type(answer) is Pending:
            self._unacknowledged += 1
            self._unacknowledged_at = self._space.owner(operation.key)
        elif answer is not None:
            self._trouble(answer, encode)

    def _acknowledged(self, answer: Any) -> None:
        """A write that needs no answer was carried out."""
        self._unacknowledged -= 1
        if self._socket.fileno() < 0:
            return
        if answer is not None:
            self._trouble(answer, Connection._say_nothing)
        elif not self._unacknowledged and (waiting := self._drained) is not None:
            self._drained = None
            then, waiting.done = waiting.done, None
            if then is not None:
                self._pending = None
                then(None)
                self._go_on()

    def _when_drained(self, then: Callable[[], None]) -> None:
        self._pending = self._drained = Pending(lambda _: then(), lambda _: None)

    def _begin_round(self) -> None:
        self._rendezvous = False
        if self._pid is not None:
            self._client = self._processes.begin_round(self._pid)
            if self._client[3] > 1:
                self._patient_until_s = self._door.reactor.now_s() + PATIENCE_S

    def _ask_all(self, operation: op.NumKeys | op.ListKeys, encode: "Callable[[Connection, Any], None]") -> None:
        if self._unacknowledged:
            self._when_drained(lambda: self._ask_all(operation, encode))
        else:
            self._settle(self._space.call_all(self._who(), operation, self._done), encode)

    def _settle(self, answer: Any, encode: "Callable[[Connection, Any], None]") -> None:
        if type(answer) is Pending:
            self._pending, self._encode = answer, encode
        elif type(answer) is op.Trouble:
            self._trouble(answer, encode)
        else:
            encode(self, answer)

    def _done(self, answer: Any) -> None:
        """What was asked has its answer."""
        encode, self._pending = self._encode, None
        if self._socket.fileno() < 0 or encode is None:
            return
        self._settle(answer, encode)
        self._go_on()

    def _go_on(self) -> None:
        if self._parsing:
            return
        if self._buffer and len(self._buffer) >= self._need_bytes and self._socket.fileno() >= 0:
            self._resume()
        if self._out:
            self._flush()
        if self._ending:
            self._leave_if_done()

    def _trouble(self, trouble: op.Trouble, encode: "Callable[[Connection, Any], None] | None") -> None:
        """The protocol has no word for it but the end; a wait that is cut short is told as such first."""
        if encode is Connection._say_ready:
            self._say(_CANCELED)
            self._flush()
        self.close("" if self._space.ended else trouble.text)

    # --- out

    def _say(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)

    def _say_nothing(self, answer: Any) -> None:
        if type(answer) is list:
            self._first_trouble(answer)

    def _say_ready(self, answer: Any) -> None:
        if type(answer) is not list or not self._first_trouble(answer, Connection._say_ready):
            self._say(_READY)

    def _say_number(self, answer: Any) -> None:
        self._say(_I64.pack(answer))

    def _say_string(self, answer: Any) -> None:
        if answer is None:
            self.close("a key was deleted between a client's wait for it and its get")
            return
        self._say(_U64.pack(len(answer)) + answer)

    def _say_strings(self, answers: list[Any]) -> None:
        if not self._first_trouble(answers):
            for answer in answers:
                self._say_string(answer)

    def _say_item(self, answer: Any) -> None:
        self._say(_I64.pack(0) if answer is None else _I64.pack(1) + _U64.pack(len(answer)) + answer)

    def _say_whether_all(self, answer: Any) -> None:
        if type(answer) is list:
            if self._first_trouble(answer):
                return
            answer = all(answer)
        self._say(_READY if answer else _CANCELED)

    def _say_sum(self, answers: list[Any]) -> None:
        if not self._first_trouble(answers):
            self._say(_I64.pack(sum(answers)))

    def _say_keys(self, answers: list[Any]) -> None:
        if not self._first_trouble(answers):
            keys = [key for part in answers for key in part]
            self._say(_U64.pack(len(keys)) + b"".join(_U64.pack(len(key)) + key for key in keys))

    def _first_trouble(self, answers: list[Any], encode: "Callable[[Connection, Any], None] | None" = None) -> bool:
        trouble = next((answer for answer in answers if type(answer) is op.Trouble), None)
        if trouble is not None:
            self._trouble(trouble, encode)
        return trouble is not None

    def _flush(self) -> None:
        if self._socket.fileno() < 0 or not self._out:
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
            self._door.reactor.on_writable(self._socket.fileno(), self._writable)
        else:
            self._out = []

    def _writable(self) -> None:
        self._flush()
        if self._socket.fileno() >= 0 and not self._out:
            self._door.reactor.forget_writable(self._socket.fileno())
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
        """The generation is over: its connections end."""
        self._space = self._processes = None
        for connection in list(self._connections):
            connection.close()

    def close(self) -> None:
        """Stop listening."""
        self.shut()
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
