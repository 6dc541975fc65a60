"""Job-scoped facts joined to the clock, the network and a file: the driver of `mesh/facts.py`.

The file outlives the agent, not the launcher: an agent that is started again keeps what it had acknowledged.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hyperpodrun.agent.mesh.facts import Facts
from hyperpodrun.agent.mesh.keyspace import Pending
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.wire.facts import MARK, Message, Outcome, Place, Record

_ARGUMENTS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    b"set": msgspec.msgpack.Decoder(tuple[str, bytes | None]),
    b"get": msgspec.msgpack.Decoder(str),
    b"names": msgspec.msgpack.Decoder(None),
    b"places": msgspec.msgpack.Decoder(None),
}
_MESSAGE = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


class JobFacts:
    """`path` is the file ("" for none), `send(node, payload)` the network."""

    def __init__(self, reactor: Reactor, path: str, send: Callable[[str, bytes], object], say: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._path = path
        self._send = send
        self._say = say
        self._broken = False
        self._timer: Timer | None = None
        self._facts = Facts(self._read(), self._say_to, self._keep)

    def begin(self, generation: int, order: Sequence[str], place: Place) -> None:
        """A generation begins; `place` is this node's part of the ranks' data addresses."""
        self._facts.begin(generation, order, place, self._now_ns())
        self._set_timer()

    def end(self) -> None:
        """The generation is over."""
        self._facts.end()
        self._set_timer()

    def received(self, node: str, payload: bytes | memoryview) -> None:
        """Another node's agent says something; MARK is gone already."""
        try:
            message = _MESSAGE.decode(payload)
        except msgspec.DecodeError:
            return  # of this job, but no message: not worth a line
        self._facts.receive(node, message, self._now_ns())
        self._set_timer()

    def call(self, verb: bytes, argument: bytes, done: Callable[[bytes], None]) -> bytes | Pending:
        """A worker asks: the encoded Outcome, or a Pending whose answer goes to `done`."""
        try:
            asked = _ARGUMENTS[verb].decode(argument)
        except (msgspec.DecodeError, KeyError):
            return _ENCODER.encode(Outcome(error=f"this version of the launcher does not know the request {verb[:40]!r}"))
        answer = self._facts.call(verb.decode(), asked, self._now_ns(), lambda outcome: done(_ENCODER.encode(outcome)))
        self._set_timer()
        return answer if isinstance(answer, Pending) else _ENCODER.encode(answer)

    def _say_to(self, node: str, message: Message) -> None:
        self._send(node, MARK + _ENCODER.encode(message))

    def _now_ns(self) -> int:
        return int(self._reactor.now_s() * 1e9)

    def _set_timer(self) -> None:
        due_ns = self._facts.next_deadline_ns()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due_ns is None else self._reactor.call_at(due_ns / 1e9, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._facts.tick(self._now_ns())
        self._set_timer()

    def _read(self) -> Record:
        try:
            with open(self._path, "rb") as file:
                return msgspec.msgpack.decode(file.read(), type=Record)
        except (OSError, msgspec.DecodeError):
            return Record()

    def _keep(self, record: Record) -> None:
        if not self._path:
            return
        draft = f"{self._path}.new"
        try:
            with open(draft, "wb") as file:
                file.write(_ENCODER.encode(record))
            os.replace(draft, self._path)
            self._broken = False
        except OSError as error:
            if not self._broken:
                self._broken = True
                self._say(
                    f"the job's facts cannot be written to {self._path} ({error.strerror}): should this agent die, it gets them from "
                    "the other nodes, if there are any"
                )
