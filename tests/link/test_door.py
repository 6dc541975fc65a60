"""The agent's end of the link: who may connect, what malformed packets, floods and deaf workers cost."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys

import msgspec
import pytest

from hyperpodrun.agent.doors import link as door_module
from hyperpodrun.agent.doors.link import LinkDoor
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import link as wire

NOBODY = 65534
CLIENT = """
import os, socket, sys
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""


def hello(generation=0):
    return msgspec.msgpack.encode(wire.Hello(0, generation))


def closed(client):
    """Does the other end close it?"""
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


def test_processes_below_a_worker_are_known_by_the_kernels_word(agent):
    with agent.connect() as mine:
        mine.send(hello(1))
        code = CLIENT + f"client.connect({agent.door.address[5:]!r}); client.send({hello(2)!r}); client.recv(100)"
        subprocess.run(
            [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"], check=True
        )
        agent.wait(lambda: len(agent.heard) == 2)
        seen = {m.generation: (c.local_rank, c.main, c.pid == os.getpid()) for c, m in agent.heard}
        assert seen == {1: (0, True, True), 2: (0, False, False)}


def test_strangers_are_refused_and_told_once(agent):
    agent.workers = {0: 1 << 30}
    for _ in range(100):
        with agent.connect() as client, contextlib.suppress(OSError):
            client.send(hello())
            assert closed(client)
    assert agent.heard == [] and agent.do(lambda: agent.door.connections) == []
    assert len(agent.said) == 1 and f"pid {os.getpid()}" in agent.said[0]
    agent.workers = {0: os.getpid()}
    assert agent.served()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused(agent):
    for folder in (agent.folder, *agent.folder.parents):
        if folder.stat().st_uid == os.getuid() and folder.is_relative_to("/tmp") and folder.as_posix() != "/tmp":
            folder.chmod(0o711)
    os.chmod(agent.door.address[5:], 0o777)
    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(agent.door.address[5:])
        os._exit(not closed(client))
    assert os.waitpid(child, 0)[1] == 0
    assert agent.heard == [] and "uid 65534" in agent.said[0]


def malformed():
    """Packets that are none: every kind of wrong there is."""
    yield from (
        b"\xc1",
        b"\x81",
        b"\xff" * 1000,
        b"\x91" * 100000,
        hello() + b"x",
        hello()[:-1],
        b"{}",
        b"x" * (wire.PACKET_BYTES + 500),
    )
    for message in ({"type": "alien"}, {"type": "hello", "local_rank": "0", "generation": 0}, {"type": "welcome"}, [], 1, None):
        yield msgspec.msgpack.encode(message)
    yield msgspec.msgpack.encode({"type": "beat", "generation": 1, "stage": "alien"})
    yield struct.pack(">B4sBI", 0x82, b"\xa4typ", 0xDD, 0xFFFFFFFF)


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_malformed_packets_end_their_connection_only(agent, count):
    packets, began_s = list(malformed()), agent.reactor.now_s()
    with agent.connect() as worker:
        worker.send(hello())
        worker.recv(100)
        sent = 0
        while sent < count:
            with agent.connect() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(door_module.MOST_MALFORMED):
                    client.send(packets[sent % len(packets)])
                    sent += 1
                    if sent % 7 == 0 and sent % 5 == 0:
                        break  # gone with some unread
                else:
                    assert closed(client)
        worker.send(hello(5))
        worker.recv(100)
    agent.wait(lambda: agent.messages == [wire.Hello(0, 0), wire.Hello(0, 5)])
    assert agent.served()
    assert all("malformed" in sentence for sentence in agent.said)
    assert 1 <= len(agent.said) <= 1 + (agent.reactor.now_s() - began_s) // 60  # once a minute


def test_a_few_malformed_packets_are_forgiven(agent):
    with agent.connect() as client:
        for packet in list(malformed())[: door_module.MOST_MALFORMED - 1]:
            client.send(packet)
        client.send(hello())
        assert client.recv(100)


def test_second_agent_cannot_take_the_socket(agent):
    reactor = Reactor()
    with pytest.raises(OSError, match="another agent listens there"):
        LinkDoor(reactor, str(agent.folder), print, print, print, dict)
    reactor._epoll.close()
    assert agent.served()


def test_socket_of_an_agent_that_died_is_taken_over(lone_agent, tmp_path):
    lone_agent.process.kill()
    lone_agent.process.wait()
    assert (tmp_path / "link").is_socket()
    reactor = Reactor()
    door = LinkDoor(reactor, str(tmp_path), print, print, print, dict)
    door.close()
    door.close()
    assert not (tmp_path / "link").exists()
    reactor._epoll.close()


def test_path_may_be_longer_than_an_address(agent_in, tmp_path, worker):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    agent = agent_in(folder)
    code = "from hyperpodrun.link import Link; from hyperpodrun.agent.wire.link import Hello; Link.current().send(Hello(0, 0))"
    assert worker(agent.door.address, code).end() == ("", "", 0)
    agent.wait(lambda: agent.messages == [wire.Hello(0, 0)])
    agent.do(agent.door.close)
    assert os.listdir(folder) == ["link.lock"]


def test_worker_that_reads_nothing_loses_its_connection_and_nobody_waits(agent, worker):
    code = """
from hyperpodrun.link import Inbox, Link
from hyperpodrun.agent.wire.link import Hello
Link.current().send(Hello(0, 0))
Inbox(Link.current()).get(60)
print("up", flush=True)
input()
"""
    process = worker(agent.door.address, code)
    assert process.line() == "up"
    process.send_signal(signal.SIGSTOP)
    with agent.connect() as other:
        other.send(hello())
        other.recv(100)
        (deaf,) = [c for c in agent.do(lambda: agent.door.connections) if c.pid == process.pid]

        def tell():
            for generation in range(100_000):
                deaf.send(wire.Interrupt(generation, "x" * 1000))
                if deaf.closed:
                    return generation
            return None

        told = agent.do(tell)
        assert told is not None and told <= door_module.MOST_QUEUED + 1000
        agent.wait(lambda: agent.closed == [deaf])
        assert "does not read" in agent.said[0]
        other.send(hello())
        assert other.recv(100)
    process.send_signal(signal.SIGCONT)


def test_held_messages_arrive_in_order_when_the_worker_reads_again(agent):
    with agent.connect() as client:
        client.send(hello())
        client.recv(100)
        (connection,) = agent.do(lambda: agent.door.connections)
        count = door_module.MOST_QUEUED + 20  # more than the kernel takes at this size, less than is held
        agent.do(lambda: [connection.send(wire.Released(n)) for n in range(20)])
        agent.do(lambda: [connection.send(wire.Interrupt(n, "x" * 50000)) for n in range(20, count - 30)])
        decoder = msgspec.msgpack.Decoder(wire.ToWorker)
        assert [decoder.decode(client.recv(wire.PACKET_BYTES)).generation for _ in range(count - 30)] == list(range(count - 30))
        agent.do(lambda: connection.send(wire.Released(7)))
        assert decoder.decode(client.recv(100)) == wire.Released(7)


def test_storm_of_one_worker_leaves_room_for_the_others(agent, worker):
    code = """
import sys
from hyperpodrun.link import Link
from hyperpodrun.agent.wire.link import Beat
link = Link.current()
while True:
    link.send(Beat(0, "function"))
"""
    storm = worker(agent.door.address, code)
    agent.wait(lambda: len(agent.heard) > 1000)
    for _ in range(50):
        assert agent.served()
    before = len(agent.heard)
    agent.wait(lambda: len(agent.heard) > before + 1000)
    storm.kill()
    agent.wait(lambda: any(c.pid == storm.pid for c in agent.closed))


def test_turn_takes_so_many_packets_of_one_worker_and_goes_on_to_the_next(agent):
    with agent.connect() as first, agent.connect() as second:
        for client in (first, second):
            client.send(hello())
            client.recv(100)

        first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # room for all of them

        def both_at_once():
            for generation in range(100):
                first.send(msgspec.msgpack.encode(wire.AtBarrier(generation)))
            second.send(msgspec.msgpack.encode(wire.Returned(0)))

        agent.do(both_at_once)
        agent.wait(lambda: len(agent.heard) == 103)
        assert agent.messages.index(wire.Returned(0)) < 100


def test_processes_below_one_worker_cannot_take_all_places(agent):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(agent.connect()) for _ in range(door_module.MOST_BELOW)]
        agent.do(lambda: None)
        assert closed(stack.enter_context(agent.connect()))
        assert "was refused: 64 links are open there" in agent.said[0]
        clients[0].close()
        agent.wait(lambda: agent.closed)
        assert agent.served()


def test_end_of_a_process_ends_its_connection_though_a_child_holds_the_socket(agent):
    with agent.connect() as client:
        client.send(hello())
        client.recv(100)
        agent.do(lambda: agent.door.drop(os.getpid() + 1))
        assert agent.do(lambda: len(agent.door.connections)) == 1
        agent.do(lambda: agent.door.drop(os.getpid()))
        assert closed(client)
        agent.wait(lambda: len(agent.closed) == 1)


def test_closed_connection_takes_messages_and_delivers_none(agent):
    with agent.connect() as client:
        client.send(hello())
        client.recv(100)
        (connection,) = agent.do(lambda: agent.door.connections)

        def close_and_send():
            connection.close()
            connection.send(wire.Released(0))
            connection.close()

        agent.do(close_and_send)
        agent.wait(lambda: agent.closed == [connection])
        assert closed(client)
    with pytest.raises(ValueError, match="too long"):
        connection.send(wire.Interrupt(0, "x" * wire.PACKET_BYTES))
