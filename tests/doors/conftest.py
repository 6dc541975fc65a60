"""A store with its door on a loop in a thread, as a launcher's agent would have it."""

import socket
import struct
import sys
import threading
from pathlib import Path

import pytest

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.store import Store

sys.path.insert(0, str(Path(__file__).parent))  # spoken.py
MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)


class Served:
    """`said` are the store's sentences."""

    def __init__(self):
        self.said = []
        self.reactor = Reactor()
        self.store = Store(self.reactor, self.said.append)
        self.generation = 0
        self.store.open(0, "n", ["n"])
        self._bell, self._ring = socket.socketpair()
        self.reactor.on_readable(self._bell.fileno(), self._rung)
        self._calls = []
        self._thread = threading.Thread(target=self.reactor.run)
        self._thread.start()

    def _rung(self):
        self._bell.recv(1)
        function, done = self._calls.pop(0)
        try:
            done.append(function())
        finally:
            done.append(None)

    def do(self, function):
        """Run this on the loop and wait for its value."""
        done = []
        self._calls.append((function, done))
        self._ring.send(b"!")
        while not done:
            self._thread.join(0.001)
            assert done or self._thread.is_alive(), "the loop has died"
        return done[0]

    def close(self):
        self.do(self.store.close)
        self.do(self.reactor.stop)
        self._thread.join()
        self._bell.close()
        self._ring.close()
        self.reactor._epoll.close()

    @property
    def port(self):
        return self.store.address[1]

    def connect(self, first=MAGIC):
        """A client's socket, greeting sent."""
        client = socket.create_connection(self.store.address, timeout=20)
        client.sendall(first)
        return client


@pytest.fixture
def served():
    served = Served()
    yield served
    served.close()
