"""What a frame costs an agent with many peers: CPU time of the real transport and loop, without what the frame says.

One process echoes whatever comes, as an owner answers; another holds `peers` transports, each of which sends one frame, waits for all
to come back, and sends the next. The CPU time of the first is the kernel's, with ZeroMQ's own thread. With one peer every frame wakes
the loop up; with many, those that arrive together share a turn. From both: what a turn costs, and a frame in it, either way.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from side_by_side import BenchmarkError

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.addresses import parse_address
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.transport import Transport

PEERS = 32
LARGE_BYTES = 1 << 16
FRAMES = 6000
LIMIT_S = 60.0


class Cost(NamedTuple):
    """CPU time, in microseconds, of a turn of the loop, of a frame in it and of each KiB of that, on either side."""

    turn_us: float
    frame_us: float
    kib_us: float

    def of(self, payload: bytes) -> float:
        """Of this frame."""
        return self.frame_us + len(payload) / 1024 * self.kib_us


def measure() -> Cost:
    """On this machine, now."""
    alone_us, together_us = echo_us(1, FRAMES // 6, 100), echo_us(PEERS, FRAMES, 100)
    frame_us = (PEERS * together_us - alone_us) / (2 * (PEERS - 1))
    large_us = echo_us(PEERS, FRAMES // 6, LARGE_BYTES)
    return Cost(alone_us - 2 * frame_us, frame_us, max(0.0, large_us - together_us) / 2 / (LARGE_BYTES / 1024))


def echo_us(peers: int, frames: int, size_bytes: int) -> float:
    """CPU time of the echoing process for a frame in and out again."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    reactor = Reactor()
    back = 0

    def came(*_: object) -> None:
        nonlocal back
        back += 1

    def hear() -> str:
        _until(reactor, ours.poll)
        return str(ours.recv())

    def round_trips(count: int) -> None:
        for _ in range(count):
            due = back + peers
            for one in crew:
                if not one.send("echo", payload):
                    raise BenchmarkError("a frame was not taken")
            _until(reactor, lambda due=due: back == due)  # type: ignore[misc]

    payload = b"f" * size_bytes
    crew = [_transport(reactor, f"p{index}", came) for index in range(peers)]
    try:
        ours.send([str(one.addresses[0]) for one in crew])
        there = parse_address(hear())
        for one in crew:
            one.connect("echo", [there])
        _until(reactor, lambda: all(one.is_up("echo") for one in crew))
        hear()
        round_trips(2)
        ours.send("begin")
        hear()
        round_trips(frames // peers)
        ours.send("end")
        return 1e6 * float(hear()) / (frames // peers * peers)
    finally:
        for one in crew:
            one.close()
        process.join(5)
        if process.is_alive():
            process.kill()


def _transport(reactor: Reactor, name: str, came: Callable[[Identity, bytes, object], object]) -> Transport:
    job = os.getppid() if name == "echo" else os.getpid()
    return Transport(
        reactor, identity=Identity(name, 1), label=job_label(f"frames-{job}"), version=1, on_message=came,
        on_lost=lambda _who: None, say=print, bind_hosts=("127.0.0.1",), advertise=("127.0.0.1",),
    )  # fmt: skip


def _until(reactor: Reactor, done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > end_s:
            raise BenchmarkError("frames are missing")
        reactor.turn(0.1)


def _echo(line: Connection) -> None:
    """The process that is measured."""
    reactor = Reactor()
    transport = _transport(reactor, "echo", lambda who, payload, _link: transport.send(who.node, payload))
    began_s = 0.0

    def told() -> None:
        nonlocal began_s
        if line.recv() == "begin":
            began_s = time.process_time()
            line.send("")
        else:
            line.send(str(time.process_time() - began_s))
            reactor.stop()

    addresses = line.recv()
    line.send(str(transport.addresses[0]))
    for index, address in enumerate(addresses):
        transport.connect(f"p{index}", [parse_address(address)])
    _until(reactor, lambda: all(transport.is_up(f"p{index}") for index in range(len(addresses))))
    line.send("")
    reactor.on_readable(line.fileno(), told)
    reactor.run()
    transport.close()


if __name__ == "__main__":
    print(measure())
