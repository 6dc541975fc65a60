"""The job's store as this node's agent runs it: a key space a generation, the door for workers, the way to the other agents.

`open` begins a generation, `end` ends it with a reason. Frames from other agents that have begun earlier are kept until this
one begins too. Frames leave at the end of the turn in which they were made, so that what belongs together travels together.
"""

import os
from collections.abc import Callable, Sequence

import msgspec

from hyperpodrun.agent.doors.tcpstore import TcpStoreDoor
from hyperpodrun.agent.job_facts import JobFacts
from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.wire import facts
from hyperpodrun.agent.wire.store import MARK, Frame
from hyperpodrun.agent.workers import rendezvous

KEPT_FRAMES = 4096
PORT_TRIES = 20
MOST_HELD_BYTES = 1 << 30
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Store:
    """`send(node, payload)` is the network (None: this node is the job). `port` is a wish, `facts_path` the file of the job's facts
    ("" for none)."""

    def __init__(
        self,
        reactor: Reactor,
        say: Callable[[str], None],
        send: Callable[[str, bytes], object] | None = None,
        port: int | None = None,
        facts_path: str = "",
    ) -> None:
        self._reactor = reactor
        self._say = say
        self._send = send
        self._life = int.from_bytes(os.urandom(8)) >> 1
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._memory_bytes = memory_bytes()
        self._limit_bytes = self._memory_bytes // 4
        self._space: KeySpace | None = None
        self._kept: list[tuple[str, Frame]] = []
        self._generation = -1
        self._flushing = False
        self._timer: Timer | None = None
        self._facts = JobFacts(reactor, facts_path, self._send_facts, say)
        self._door = self._listen(port)

    @property
    def address(self) -> tuple[str, int]:
        """Where workers of this host find the store: host, port."""
        return self._door.host, self._door.port

    @property
    def space(self) -> KeySpace | None:
        """The keys of the generation that is open."""
        return self._space

    def open(self, generation: int, node: str, order: Sequence[str], place: facts.Place | None = None) -> None:
        """A generation begins; this agent is `node` among the world's nodes `order`, whose ranks listen at `place`."""
        self.end("a newer generation began")
        self._generation = generation
        self._space = KeySpace(generation, node, order, self._life, self._limit_bytes, self._wake)
        self._door.open(self._space)
        self._facts.begin(generation, order, place or facts.Place(node, self._door.host, 0, 0))
        kept, self._kept = self._kept, []
        for source, frame in kept:
            self._take(source, frame)

    def end(self, reason: str) -> None:
        """The generation is over: whoever waits is told at once."""
        space, self._space = self._space, None
        if space is not None:
            space.end(reason)
            self._door.shut()
            self._facts.end()
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def received(self, node: str, payload: bytes) -> None:
        """A message with MARK in front came from another node's agent."""
        if payload.startswith(MARK + facts.MARK):
            self._facts.received(node, payload[len(MARK + facts.MARK) :])
            return
        try:
            frame = self._decoder.decode(memoryview(payload)[len(MARK) :])
        except (msgspec.DecodeError, RecursionError):
            return  # of this job, but no frame: not worth a line
        self._take(node, frame)

    def close(self) -> None:
        """No more stores."""
        self.end("the job is over")
        self._door.close()

    # --- inside

    def _listen(self, port: int | None) -> TcpStoreDoor:
        complaints = Complaints(self._say, self._reactor.now_s)
        host = rendezvous.loopback()

        def door(port: int) -> TcpStoreDoor:
            held_bytes = min(MOST_HELD_BYTES, self._memory_bytes // 8)
            return TcpStoreDoor(self._reactor, host, port, complaints, held_bytes, self._facts.call)

        if port:
            try:
                return door(port)
            except OSError as error:
                self._say(f"port {port} ({host}) cannot be had for the store: {error.strerror}; another one is taken")
        for left in reversed(range(PORT_TRIES)):
            try:
                return door(rendezvous.choose_port())
            except OSError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _take(self, node: str, frame: Frame) -> None:
        if self._space is not None and frame.generation == self._generation:
            self._space.receive(node, frame, self._now_ns())
            self._wake()
        elif frame.generation > self._generation:
            if len(self._kept) >= KEPT_FRAMES:
                self._kept.clear()  # what is lost here is sent again
            self._kept.append((node, frame))

    def _send_facts(self, node: str, payload: bytes) -> None:
        if self._send is not None:
            self._send(node, MARK + payload)

    def _now_ns(self) -> int:
        return int(self._reactor.now_s() * 1e9)

    def _wake(self) -> None:
        """Something may have to be sent."""
        if self._send is not None and not self._flushing:
            self._flushing = True
            self._reactor.call_later(0, self._flush)

    def _flush(self) -> None:
        self._flushing = False
        space, send = self._space, self._send
        if space is None or send is None:
            return
        now_ns = self._now_ns()
        space.tick(now_ns)
        for node, frame in space.frames(now_ns):
            send(node, MARK + self._encoder.encode(frame))
        if self._timer:
            self._timer.cancel()
        deadline_ns = space.next_deadline_ns()
        self._timer = None if deadline_ns is None else self._reactor.call_at(deadline_ns / 1e9, self._flush)


def memory_bytes(limits: Sequence[str] = CGROUP_LIMITS) -> int:
    """What this host has, or this container may have."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in limits:
        try:
            with open(path) as file:
                sizes.append(int(file.read()))
        except (OSError, ValueError):
            continue  # no such cgroup, or no limit ("max")
    return min(sizes)
