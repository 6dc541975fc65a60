"""The agent's end of the link on a loop in a thread, workers as real processes, and an agent in a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from hyperpodrun.agent.doors.link import LinkDoor
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import address, link, names

LIMIT_S = 60
LONE_AGENT = """
import sys
from hyperpodrun.agent.doors.link import LinkDoor
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import link

def heard(connection, message):
    if isinstance(message, link.Hello):
        connection.send(link.Welcome(inplace=True, abort_timeout_s=1.0))
    if isinstance(message, link.Returned):
        connection.send(link.Released(message.generation))

reactor = Reactor()
door = LinkDoor(reactor, sys.argv[1], lambda line: print(line, flush=True), heard, lambda _: None, lambda: {0: int(sys.argv[2])})
print("listening", flush=True)
reactor.run()
"""


class AgentSide:
    """`heard` are (connection, message), `closed` connections, `said` sentences. This process is the worker of local rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard = []
        self.closed = []
        self.said = []
        self.workers = {0: os.getpid()}
        self.changed = threading.Condition()
        self.reactor = Reactor()
        self._bell, self._ring = socket.socketpair()
        self._calls = []
        self.reactor.on_readable(self._bell.fileno(), self._rung)
        self.door = LinkDoor(self.reactor, str(folder), self.said.append, self._hear, self._close, lambda: self.workers)
        self._thread = threading.Thread(target=self.reactor.run)
        self._thread.start()

    def _hear(self, connection, message):
        with self.changed:
            self.heard.append((connection, message))
            self.changed.notify_all()
        if isinstance(message, link.Hello):
            connection.send(link.Welcome(inplace=True, abort_timeout_s=1.0))
        if isinstance(message, link.Returned):
            connection.send(link.Released(message.generation))

    def _close(self, connection):
        with self.changed:
            self.closed.append(connection)
            self.changed.notify_all()

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

    def wait(self, condition):
        """Until it holds."""
        with self.changed:
            assert self.changed.wait_for(condition, LIMIT_S), (self.said, [m for _, m in self.heard][-5:])

    @property
    def messages(self):
        return [message for _, message in self.heard]

    def connect(self):
        """A bare socket to the door."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(LIMIT_S)
        with address.fitting(self.door.address.removeprefix("unix:")) as path:
            client.connect(path)
        return client

    def served(self):
        """Is a worker who comes now served?"""
        with self.connect() as client:
            client.send(msgspec.msgpack.encode(link.Hello(0, 0)))
            return isinstance(msgspec.msgpack.decode(client.recv(link.PACKET_BYTES), type=link.ToWorker), link.Welcome)

    def close(self):
        self.do(self.door.close)
        self.do(self.reactor.stop)
        self._thread.join()
        self._bell.close()
        self._ring.close()
        self.reactor._epoll.close()


@pytest.fixture
def agent_in():
    """`agent_in(folder)`: an agent that listens there."""
    with contextlib.ExitStack() as stack:

        def listen(folder):
            side = AgentSide(folder)
            stack.callback(side.close)
            return side

        yield listen


@pytest.fixture
def agent(agent_in, tmp_path):
    return agent_in(tmp_path)


class LoneAgent:
    """An agent that can be stopped and killed."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/link"
        self.process = subprocess.Popen(
            [sys.executable, "-c", LONE_AGENT, str(folder), str(os.getpid())], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "listening\n"

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def lone_agent(tmp_path):
    agent = LoneAgent(tmp_path)
    yield agent
    agent.close()


@pytest.fixture
def worker():
    """`worker(address, code or script)`: a process with the link's address; `line()` is what it prints, `end()` waits."""
    running = []

    def start(where, code):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", *([code] if isinstance(code, Path) else ["-c", code])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, names.LINK: where},
        )  # fmt: skip
        process.line = lambda: process.stdout.readline().strip()
        process.end = lambda: (*process.communicate(timeout=LIMIT_S), process.returncode)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
