"""What a client of door 1 sends, taken apart: torch's TCPStore protocol (MESH S7). The first third of a connection.

A request is one byte and its arguments, numbers little-endian, strings with their length as 64 bit in front:

     0 validate (32 bit number)         5 check (n, keys) -> 0 all there | 1    10 multi-get (n, keys) -> n strings
     1 set (key, value)                 6 wait (n, keys) -> 0, later            11 multi-set (n, key, value, ...)
     2 compare-set (key, a, b) -> string 7 num-keys -> 64 bit                   12 cancel-wait -> 1
     3 get (key) -> string              8 delete (key) -> 64 bit                13 ping (32 bit) -> the same
     4 add (key, 64 bit) -> 64 bit      9 append (key, value)                   14 queue-push (key, value)
    15 queue-pop (key) -> 64 bit [string]   16 queue-len (key) -> 64 bit
    17 list-keys -> n, strings          18 barrier (key, 64 bit) -> 0, later

Clients wait for a value with 6 before 3, 10 and a blocking 15. The number in a ping is the process's pid; by it the connections of one
process are known to belong together. Torch 2.4 to 2.8 know 0 to 13, 2.9 adds 14 to 16, later ones 17 and 18; nothing else differs.
A compare-set on one reserved key is no operation of the store but a question about the job (wire/facts.py).

`Asker` asks what is read here; `Connection` gives it the bytes.

Source: the client of torch 2.13, recorded; 2.4, 2.6 and 2.9 tried; torch/csrc/distributed/c10d/TCPStoreBackend.hpp for the
numbers' names.
"""

import struct
from collections.abc import Callable

from hyperpodrun.agent.doors.asking import CANCELED, Asker, Encode, Job
from hyperpodrun.agent.doors.processes import INIT_KEY, Processes
from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import facts
from hyperpodrun.agent.wire import store as op

MAGIC = 0x3C85F7CE
MOST_KEY_BYTES = 1 << 20
MOST_STRINGS = 1 << 20
MOST_MESSAGE_BYTES = 256 << 20
STRING_BYTES = 48
"""What a string costs beside its bytes."""

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_CHECK, _WAIT, _MULTI_GET, _MULTI_SET, CANCEL_WAIT = 5, 6, 10, 11, 12


class Incomplete(Exception):
    """More has to come; `args[0]` is how long the whole is at least, in bytes."""


class Refused(Exception):
    """The client does not keep to the protocol; `args[0]` says how."""


class Requests(Asker):
    """One client's requests; `_one` takes one of them, or a part of a long one."""

    __slots__ = ("_left", "_many", "_many_bytes", "_need_bytes", "_strings", "_valid", "_wrote")

    def __init__(self, reactor: Reactor, space: KeySpace, processes: Processes, job: Job) -> None:
        super().__init__(reactor, space, processes, job)
        self._valid = False
        self._wrote = False
        self._need_bytes = 1
        self._many = 0
        self._left = 0
        self._many_bytes = 0
        self._strings: list[bytes] = []

    def _hold(self, data: bytes) -> None:
        """Keep what cannot be taken yet."""
        raise NotImplementedError

    def _one(self, data: bytes, at: int) -> int:
        """Take what begins at `at`; where it ends. Raises Incomplete and Refused."""
        if self._pending is not None:
            self._pending.cancel()  # a cancel-wait: the client's patience is over
            self._pending, self._asked_bytes = None, 0
        if self._left:
            return self._take_strings(data, at)
        request = _REQUESTS.get(data[at])
        if request is None:
            raise Refused(f"request {data[at]} is not one that this version knows")
        if not self._valid and data[at] != 0:
            raise Refused("it does not begin as torch's TCPStore client does")
        return request(self, data, at + 1)

    def _string(self, data: bytes, at: int, most_bytes: int) -> tuple[bytes, int]:
        if at + 8 > len(data):
            raise Incomplete(at + 8)
        (length,) = _U64.unpack_from(data, at)
        if length > most_bytes:
            raise Refused(f"a string is too long: {length} bytes, the limit is {most_bytes}")
        at += 8
        if at + length > len(data):
            raise Incomplete(at + length)
        return data[at : at + length], at + length

    def _key(self, data: bytes, at: int) -> tuple[bytes, int]:
        return self._string(data, at, MOST_KEY_BYTES)

    def _value(self, data: bytes, at: int) -> tuple[bytes, int]:
        return self._string(data, at, op.MOST_VALUE_BYTES)

    def _number(self, data: bytes, at: int, form: struct.Struct) -> tuple[int, int]:
        if at + form.size > len(data):
            raise Incomplete(at + form.size)
        return form.unpack_from(data, at)[0], at + form.size

    # --- requests

    def _validate(self, data: bytes, at: int) -> int:
        number, at = self._number(data, at, _U32)
        if number != MAGIC:
            raise Refused("it does not begin as torch's TCPStore client does")
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
        self._wrote = True
        self._ask(op.Set(key, value), Asker._say_nothing)
        return at

    def _compare_set(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        expected, at = self._value(data, at)
        desired, at = self._value(data, at)
        if key == facts.SENT_KEY:
            self._ask_job(expected, desired)
            return at
        self._wrote = True
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
        self._wrote = True
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
        self._wrote = True
        self._ask(op.Append(key, value), Asker._say_nothing)
        return at

    def _cancel_wait(self, _data: bytes, at: int) -> int:
        self._say(CANCELED)
        return at

    def _queue_push(self, data: bytes, at: int) -> int:
        key, at = self._key(data, at)
        value, at = self._value(data, at)
        self._wrote = True
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
        self._wrote = True
        self._ask(op.Arrive(key, size), Asker._say_ready)
        return at

    def _begin_many(self, data: bytes, at: int) -> int:
        """5, 6, 10, 11: what follows is taken string by string as it comes."""
        count, after = self._number(data, at, _U64)
        strings = 2 * count if data[at - 1] == _MULTI_SET else count
        if strings > MOST_STRINGS:
            raise Refused(f"too many keys in one request: {count}")
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
                self._many_bytes += len(string) + STRING_BYTES
                self._left -= 1
                if self._many_bytes > MOST_MESSAGE_BYTES:
                    raise Refused(f"a request is too long: it takes {self._many_bytes} bytes, the limit is {MOST_MESSAGE_BYTES}")
        except Incomplete as more:
            self._need_bytes = more.args[0] - at
            if at == len(data):
                return at
            self._hold(data[at:])
            return len(data)
        self._ask_many()
        return at

    def _ask_many(self) -> None:
        strings, self._strings, self._many_bytes = self._strings, [], 0
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
                self._wrote = True
                keys = iter(strings)
                operations, encode = [op.Set(key, next(keys)) for key in keys], Asker._say_nothing
        self._ask_each(operations, encode)


_REQUESTS: dict[int, Callable[[Requests, bytes, int], int]] = {
    0: Requests._validate,
    1: Requests._set,
    2: Requests._compare_set,
    3: Requests._get,
    4: Requests._add,
    _CHECK: Requests._begin_many,
    _WAIT: Requests._begin_many,
    7: Requests._num_keys,
    8: Requests._delete,
    9: Requests._append,
    _MULTI_GET: Requests._begin_many,
    _MULTI_SET: Requests._begin_many,
    CANCEL_WAIT: Requests._cancel_wait,
    13: Requests._ping,
    14: Requests._queue_push,
    15: Requests._queue_pop,
    16: Requests._queue_len,
    17: Requests._list_keys,
    18: Requests._barrier,
}
