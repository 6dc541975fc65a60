"""What one heartbeat costs in CPU time: codec, core, transport and loop, each side in a process of its own.

Two agents' worth of the real thing without the agents: the sender encodes a heartbeat as the mesh driver does and hands it to
its Transport; the receiver's Transport decodes it and gives it to a settled `Node`. Heartbeats come one at a time with a pause
(`apart`: each wakes both processes up, as in an idle mesh), as fast as the receiver takes them over one connection (`in a row`), or
one from each of many peers at once (`in a burst`: what a roll call of a large job is made of). CPU time is the kernel's, with
ZeroMQ's own thread.
"""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import msgspec
from side_by_side import BenchmarkError

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh.view import brief_of, digest_of
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.transport import Transport
from hyperpodrun.agent.wire.mesh import Heartbeat, Member, Message, View, Vote

RECEIVED = "one heartbeat in a row: receiver, CPU us"
BURST = "one heartbeat in a burst: receiver, CPU us"
PEERS = 64
ASSUMED_US = 30.0
"""Where this part was left out."""
APART_S = 0.005
LIMIT_S = 60.0


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """As in agent/mesh_driver.py."""

    incarnation: int
    message: Message
    store: str = ""


def world() -> tuple[View, str]:
    """A running view of two."""
    members = tuple(Member(name, number, "active", addresses=("127.0.0.1:1",)) for number, name in enumerate(("a", "b"), 1))
    view = View("chain", 0, 0, 0, "", members, "a", ("a", "b"), "run")
    return view, digest_of(view)


def receive(pipe: Connection) -> None:
    """The receiver's process: says where it listens, then counts until it was told the number to expect."""
    view, _ = world()
    now = time.monotonic_ns()
    node = Node(MeshConfig(slots=2, min_nodes=1, max_nodes=2), view.members[0], 1, now, Vote(1, view))
    decoder = msgspec.msgpack.Decoder(Envelope)
    reactor = Reactor()
    heard = 0

    def message(who: Identity, payload: bytes, _link: object) -> None:
        nonlocal heard
        heard += 1
        envelope = decoder.decode(payload)
        node.receive(time.monotonic_ns(), (who.node, envelope.incarnation), envelope.message)

    transport = Transport(
        reactor, identity=Identity("a", 1), label=job_label("bench"), version=1, on_message=message,
        on_lost=lambda _who: None, say=print, bind_hosts=("127.0.0.1",), advertise=("127.0.0.1",),
    )  # fmt: skip
    pipe.send(str(transport.addresses[0]))
    try:
        while True:
            while not pipe.poll():
                reactor.turn(0.05)
            want = pipe.recv()
            if want is None:
                return
            heard, began_s = 0, time.process_time()
            pipe.send(None)
            end_s = time.monotonic() + LIMIT_S
            while heard < want and time.monotonic() < end_s:
                reactor.turn(1.0)
            pipe.send((heard, time.process_time() - began_s))
    finally:
        transport.close()


def sender(reactor: Reactor, name: str, incarnation: int) -> Transport:
    """One peer's end."""
    return Transport(
        reactor, identity=Identity(name, incarnation), label=job_label("bench"), version=1, on_message=lambda *_: None,
        on_lost=lambda _who: None, say=print, bind_hosts=("127.0.0.1",), advertise=("127.0.0.1",),
    )  # fmt: skip


def connect(reactor: Reactor, transports: list[Transport], address: str) -> None:
    """To the receiver, each."""
    from hyperpodrun.agent.transport.addresses import parse_address

    for transport in transports:
        transport.connect("a", [parse_address(address)])
    end_s = time.monotonic() + LIMIT_S
    while not all(transport.is_up("a") for transport in transports) and time.monotonic() < end_s:
        reactor.turn(0.1)


def taken(ours: Connection, many: int) -> float:
    """CPU seconds that `many` heartbeats took the receiver."""
    if not ours.poll(LIMIT_S):
        raise BenchmarkError("the receiver did not receive")
    heard, received_s = ours.recv()
    if heard < many:
        raise BenchmarkError(f"{heard} of {many} heartbeats came")
    return float(received_s)


def measure(count: int) -> dict[str, float]:
    """Figures in microseconds of CPU time a heartbeat; `count` heartbeats in a row, a tenth of it apart, a fifth in bursts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(LIMIT_S):
        process.kill()
        raise BenchmarkError("the receiver did not start")
    reactor = Reactor()
    transports = [sender(reactor, "b", 2)]
    encode = msgspec.msgpack.Encoder().encode
    view, digest = world()
    beat = Heartbeat(brief_of(view, digest, True))
    figures: dict[str, float] = {}
    try:
        address = ours.recv()
        connect(reactor, transports, address)
        for name, many, apart_s in (("apart", max(200, count // 10), APART_S), ("in a row", count, 0.0)):
            ours.send(many)
            ours.recv()
            began_s, sent = time.process_time(), 0
            while sent < many:
                if transports[0].send("a", encode(Envelope(2, beat))):
                    sent += 1
                else:
                    reactor.turn(0.001)  # the queue is full
                if apart_s:
                    time.sleep(apart_s)
            received_s = taken(ours, many)
            figures[f"one heartbeat {name}: sender, CPU us"] = 1e6 * (time.process_time() - began_s) / sent
            figures[f"one heartbeat {name}: receiver, CPU us"] = 1e6 * received_s / many
        transports += (sender(reactor, f"p{place}", 2) for place in range(PEERS))
        connect(reactor, transports[1:], address)
        received_s, bursts = 0.0, max(10, count // 5 // PEERS)
        for _ in range(bursts):
            ours.send(PEERS)
            ours.recv()
            for transport in transports[1:]:
                if not transport.send("a", encode(Envelope(2, beat))):
                    raise BenchmarkError("a burst could not be sent")
            received_s += taken(ours, PEERS)
        figures[BURST] = 1e6 * received_s / bursts / PEERS
        ours.send(None)
    finally:
        for transport in transports:
            transport.close()
        process.join(5)
        if process.is_alive():
            os.kill(process.pid or 0, 9)
    return figures
