"""What a client of door 1 asks of the key space, and how it is told the answer: the middle of a connection.

Writes that need no answer go on their way together, to one node at a time; everything else is asked when what was asked before has
its answer. `Connection` reads requests above this and sends answers below it.

Invariants: at most one question is open (`_pending`), and none while writes to another node are not acknowledged.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

from hyperpodrun.agent.doors.processes import Processes
from hyperpodrun.agent.mesh.keyspace import KeySpace, Pending
from hyperpodrun.agent.mesh.shard import PER_ROUND, Client
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.wire import store as op

MOST_UNACKNOWLEDGED = 1000
LARGE_BYTES = 1 << 14
"""Larger values travel one at a time."""
MOST_ANSWER_BYTES = 1 << 30
OPEN_BYTES = 600
"""What waiting for one key costs."""
PATIENCE_S = 30.0
"""So long a rank that makes its process group again waits for its peers to do so too; then it takes what there is."""

_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
READY, CANCELED = b"\0", b"\1"


Job = Callable[[bytes, bytes, Callable[[bytes], None]], bytes | Pending]
"""(verb, argument, done) -> the answer, or a Pending whose answer goes to `done`: what is asked about the job, see wire/facts.py."""


class Asker:
    """One client in one generation."""

    __slots__ = (
        "_asked_bytes",
        "_client",
        "_closed",
        "_drained",
        "_encode",
        "_job",
        "_out",
        "_out_bytes",
        "_patience",
        "_patient_until_s",
        "_pending",
        "_pid",
        "_processes",
        "_reactor",
        "_rendezvous",
        "_space",
        "_unacknowledged",
        "_unacknowledged_at",
    )

    def __init__(self, reactor: Reactor, space: KeySpace, processes: Processes, job: Job) -> None:
        self._reactor = reactor
        self._job = job
        self._asked_bytes = 0
        self._space = space
        self._processes = processes
        self._closed = False
        self._client: Client | None = None
        self._pid: int | None = None
        self._pending: Pending | None = None
        self._encode: Encode | None = None
        self._unacknowledged = 0
        self._unacknowledged_at = ""
        self._drained: Pending | None = None
        self._rendezvous = False
        self._patient_until_s = 0.0
        self._patience: Timer | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0

    def close(self, why: str = "", topic: str = "") -> None:
        """End it; a sentence is for the log, where each topic is told of once a minute."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """A question has its answer: read on."""
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _nameless(self) -> int:
        raise NotImplementedError

    def _enter(self, pid: int) -> None:
        self._pid = pid
        self._client = self._processes.enter(pid)

    def _who(self) -> Client:
        if self._client is None:
            self._enter(-self._nameless())  # a client that does not ping stands for itself
            assert self._client is not None
        return self._client

    def _wait(self, keys: list[bytes]) -> None:
        """Until all are there: those of this round, while there is patience."""
        rest_s = self._patient_until_s - self._reactor.now_s() if self._patient_until_s else 0.0
        self._ask_each([op.Watch(key, rest_s <= 0) for key in keys], Asker._say_ready)
        if rest_s > 0 and (pending := self._pending) is not None:

            def impatient() -> None:
                if self._pending is pending:
                    pending.cancel()
                    self._pending, self._patient_until_s = None, 0.0
                    self._wait(keys)
                    self._go_on()

            self._patience = self._reactor.call_later(rest_s, impatient)

    def _ask_each(self, operations: Sequence[op.KeyOperation], encode: "Encode") -> None:
        if self._rendezvous and any(operation.key.startswith(PER_ROUND) for operation in operations):
            self._begin_round()
        if len(operations) == 1 and encode is not Asker._say_strings:
            self._ask(operations[0], encode)
        elif self._unacknowledged:
            self._when_drained(lambda: self._ask_each(operations, encode))
        else:
            self._settle(self._space.call_each(self._who(), operations, self._done), encode)
            if self._pending is not None:
                self._asked_bytes = OPEN_BYTES * len(operations)

    def _ask(self, operation: op.KeyOperation, encode: "Encode") -> None:
        if self._rendezvous and operation.key.startswith(PER_ROUND):
            self._begin_round()
        if self._unacknowledged:
            owner = self._space.owner(operation.key)
            if owner != self._unacknowledged_at or self._unacknowledged >= MOST_UNACKNOWLEDGED:
                self._when_drained(lambda: self._ask(operation, encode))
                return
        if encode is not Asker._say_nothing or len(operation.value) > LARGE_BYTES:  # type: ignore[union-attr]
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
        if self._closed:
            return
        if answer is not None:
            self._trouble(answer, Asker._say_nothing)
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
                self._patient_until_s = self._reactor.now_s() + PATIENCE_S

    def _ask_all(self, operation: op.NumKeys | op.ListKeys, encode: "Encode") -> None:
        if self._unacknowledged:
            self._when_drained(lambda: self._ask_all(operation, encode))
        else:
            self._settle(self._space.call_all(self._who(), operation, self._done), encode)

    def _ask_job(self, verb: bytes, argument: bytes) -> None:
        if self._unacknowledged:
            self._when_drained(lambda: self._ask_job(verb, argument))
        else:
            self._settle(self._job(verb, argument, self._done), Asker._say_string)

    def _settle(self, answer: Any, encode: "Encode") -> None:
        if type(answer) is Pending:
            self._pending, self._encode = answer, encode
        elif type(answer) is op.Trouble:
            self._trouble(answer, encode)
        else:
            encode(self, answer)

    def _done(self, answer: Any) -> None:
        """What was asked has its answer."""
        encode, self._pending, self._asked_bytes = self._encode, None, 0
        if self._closed or encode is None:
            return
        self._settle(answer, encode)
        self._go_on()

    def _trouble(self, trouble: op.Trouble, encode: "Encode | None") -> None:
        """The protocol has no word for it but the end; a wait that is cut short is told as such first."""
        if encode is Asker._say_ready:
            self._say(CANCELED)
            self._flush()
        self.close("" if self._space.ended else trouble.text, trouble.text[:12])  # texts that begin alike say the same

    def _say(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)

    def _say_nothing(self, answer: Any) -> None:
        if type(answer) is list:
            self._first_trouble(answer)

    def _say_ready(self, answer: Any) -> None:
        if type(answer) is not list or not self._first_trouble(answer, Asker._say_ready):
            self._say(READY)

    def _say_number(self, answer: Any) -> None:
        self._say(_I64.pack(answer))

    def _say_string(self, answer: Any) -> None:
        if answer is None:
            self.close("a key was deleted between a client's wait for it and its get", "deleted")
            return
        if self._out_bytes > MOST_ANSWER_BYTES:
            self.close(f"an answer is too long: the limit is {MOST_ANSWER_BYTES >> 20} MiB", "answer")
            return
        self._say(_U64.pack(len(answer)) + answer)

    def _say_strings(self, answers: list[Any]) -> None:
        if not self._first_trouble(answers):
            for answer in answers:
                if not self._closed:
                    self._say_string(answer)

    def _say_item(self, answer: Any) -> None:
        self._say(_I64.pack(0) if answer is None else _I64.pack(1) + _U64.pack(len(answer)) + answer)

    def _say_whether_all(self, answer: Any) -> None:
        if type(answer) is list:
            if self._first_trouble(answer):
                return
            answer = all(answer)
        self._say(READY if answer else CANCELED)

    def _say_sum(self, answers: list[Any]) -> None:
        if not self._first_trouble(answers):
            self._say(_I64.pack(sum(answers)))

    def _say_keys(self, answers: list[Any]) -> None:
        if not self._first_trouble(answers):
            keys = [key for part in answers for key in part]
            self._say(_U64.pack(len(keys)) + b"".join(_U64.pack(len(key)) + key for key in keys))

    def _first_trouble(self, answers: list[Any], encode: "Encode | None" = None) -> bool:
        trouble = next((answer for answer in answers if type(answer) is op.Trouble), None)
        if trouble is not None:
            self._trouble(trouble, encode)
        return trouble is not None


Encode = Callable[[Asker, Any], None]
"""Puts an answer into bytes, or does what is to be done about it."""
