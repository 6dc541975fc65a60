"""Agents' networks on loopback: in this process (one loop for all), or in processes of their own that can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.addresses import Address
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.transport import Transport

PATIENCE_S = float(os.environ.get("PATIENCE_S", "60"))
"""Only a hanging test gets this far; nothing here depends on speed."""


class Agent:
    """A transport and what it told."""

    def __init__(
        self, reactor: Reactor, node: str, incarnation: int = 1, job: str = "job", version: int = 1, **more: Any
    ) -> None:
        self.got: list[tuple[Identity, bytes]] = []
        self.links: list[Any] = []
        self.lost: list[Identity] = []
        self.found: list[tuple[Address, Identity | None]] = []
        self.said: list[str] = []
        self.identity = Identity(node, incarnation)
        self.net = Transport(
            reactor,
            identity=self.identity,
            label=job_label(job),
            version=version,
            on_message=self._got,
            on_lost=self.lost.append,
            on_found=lambda address, who: self.found.append((address, who)),
            say=self.said.append,
            **more,
        )

    def _got(self, source: Identity, payload: bytes, link: Any) -> None:
        self.got.append((source, payload))
        self.links.append(link)

    @property
    def place(self) -> Address:
        return Address("127.0.0.1", self.net.port)

    def count(self, name: str) -> int:
        return self.net.counters()[name]


class Process:
    """An agent in a process of its own: sends every message back, see `lone_peer.py`."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("lone_peer.py")), *args]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.place = Address("127.0.0.1", self.port)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Net:
    def __init__(self) -> None:
        self.reactor = Reactor()
        self._closing: list[Callable[[], None]] = []

    def agent(self, node: str, **more: Any) -> Agent:
        agent = Agent(self.reactor, node, **more)
        self._closing.append(agent.net.close)
        return agent

    def process(self, *args: str) -> Process:
        process = Process(*args)
        self._closing.append(process.close)
        return process

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Serve the loop until the condition holds."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never came: {what or condition}"
            self.reactor.turn(0.05)

    def serve(self, turns: int) -> None:
        """Give what should not happen a chance to happen."""
        for _ in range(turns):
            self.reactor.turn(0.005)

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


@pytest.fixture
def free_ports() -> Callable[[int], int]:
    """The first of that many ports in a row that nobody uses, also none of the jobs that other tests start (20000 and up)."""

    def find(count: int) -> int:
        import random
        import socket

        while True:
            first = random.randrange(10000, 17000)
            with contextlib.ExitStack() as held:
                try:
                    for port in range(first, first + count):
                        held.enter_context(socket.create_server(("127.0.0.1", port)))
                except OSError:
                    continue
                return first

    return find
