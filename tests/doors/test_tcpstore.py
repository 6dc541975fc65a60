"""Door 1 as bytes: whatever arrives, in whatever pieces, harms nobody but who sent it."""

import contextlib
import os
import random
import socket
import struct

import pytest
from spoken import EXCHANGES, alive, closed, number, read, text

from hyperpodrun.agent.doors import connection, requests, tcpstore

MAGIC = struct.pack("<BI", 0, requests.MAGIC)


def test_every_request_is_answered(served):
    with served.connect() as client:
        for request, answer in EXCHANGES:
            client.sendall(request)
            assert read(client, len(answer)) == answer, request
    assert not served.said


@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_requests_come_in_any_pieces(served, size):
    stream = b"".join(request for request, _ in EXCHANGES)
    with served.connect(b"") as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(MAGIC + stream), size):
            client.sendall((MAGIC + stream)[at : at + size])
        answers = b"".join(answer for _, answer in EXCHANGES)
        assert read(client, len(answers)) == answers


def test_a_wait_is_answered_when_the_last_key_comes(served):
    with served.connect() as waiting, served.connect() as other:
        waiting.sendall(b"\6" + number(2) + text(b"a") + text(b"b"))
        other.sendall(b"\1" + text(b"a") + text(b"") + b"\7")
        assert read(other, 8) == number(1)
        waiting.settimeout(0.05)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        other.sendall(b"\1" + text(b"b") + text(b""))
        waiting.settimeout(20)
        assert read(waiting, 1) == b"\0"


@pytest.mark.parametrize(
    "sent, why",
    [
        (b"\xff", "request 255"),
        (b"\x13", "request 19"),
        (b"\1" + struct.pack("<Q", 1 << 63), "too long"),
        (b"\3" + struct.pack("<Q", (1 << 64) - 1), "too long"),
        (b"\6" + struct.pack("<Q", 1 << 63), "too many keys"),
        (b"\x0b" + struct.pack("<Q", 1 << 40), "too many keys"),
        (b"\1" + text(b"k") + text(b"abc") + b"\4" + text(b"k") + number(1), "is no number"),
        (b"\3" + text(b"never there"), "deleted"),
    ],
)
def test_who_breaks_the_rules_is_sent_away_with_one_line(served, sent, why):
    with served.connect() as client:
        client.sendall(sent)
        assert closed(client)
    assert alive(served)
    assert len(served.said) == 1 and why in served.said[0], served.said


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0\0", b"\1" + text(b"k"), b"\x16\x03\x01" * 30])
def test_who_does_not_begin_as_a_client_is_sent_away(served, sent):
    with served.connect(b"") as client:
        client.sendall(sent)
        assert closed(client)
    assert alive(served)
    assert len(served.said) == 1, served.said


def test_noise_harms_nobody(served):
    chooser = random.Random(11)
    requests = [request for request, _ in EXCHANGES]
    for _ in range(400):
        raw = bytearray(b"".join(chooser.sample(requests, 4)))
        for _ in range(chooser.randrange(4)):
            raw[chooser.randrange(len(raw))] = chooser.randrange(256)
        with served.connect(b"") as client, contextlib.suppress(OSError):
            client.sendall(MAGIC + bytes(raw[: chooser.randrange(len(raw))]))
    assert alive(served)
    held = served.do(lambda: (served.store._door._held_bytes, len(served.store._door._connections)))
    while held != (0, 0):  # connections that have closed are seen one after another
        held = served.do(lambda: (served.store._door._held_bytes, len(served.store._door._connections)))
    assert served.do(lambda: served.store.space._shard.waiting()) == 0


def test_a_client_that_never_reads_its_answers_is_not_read_any_more(served):
    with served.connect() as greedy, served.connect() as other:
        other.sendall(b"\1" + text(b"big") + text(b"x" * (1 << 20)) + b"\5" + number(1) + text(b"big"))
        assert read(other, 1) == b"\0"
        greedy.settimeout(0.3)
        with pytest.raises(TimeoutError):
            for _ in range(1 << 22):
                greedy.sendall((b"\3" + text(b"big")) * 100)
        assert alive(served)
        out = served.do(lambda: max(one._out_bytes for one in served.store._door._connections))
        assert out < 3 * connection.CHOKED_BYTES


def test_half_a_request_is_not_waited_for_without_end(served, monkeypatch):
    monkeypatch.setattr(tcpstore, "HALF_S", -1.0)
    with served.connect(b"") as silent, served.connect() as half, served.connect() as idle:
        half.sendall(b"\1" + text(b"key") + struct.pack("<Q", 100) + b"only the beginning")
        idle.sendall(b"\x0d\1\2\3\4")
        assert read(idle, 4) == b"\1\2\3\4"
        assert alive(served)
        served.do(served.store._door._sweep)
        assert closed(silent) and closed(half)
        idle.sendall(b"\x0d\1\2\3\4")
        assert read(idle, 4) == b"\1\2\3\4"


def test_nothing_is_done_of_what_follows_the_request_that_ended_a_connection(served):
    with served.connect() as client:
        wrong = b"\1" + text(b"k") + text(b"abc") + b"\4" + text(b"k") + number(1)
        client.sendall(wrong + b"\1" + text(b"late") + text(b"v") + b"\6" + number(1) + text(b"never"))
        assert closed(client)
    assert served.do(lambda: served.store.space._shard.waiting()) == 0
    assert b"late" not in served.do(lambda: served.store.space._shard._values)


def test_the_end_of_the_generation_ends_its_waits_and_connections(served):
    with served.connect() as waiting, served.connect() as idle:
        waiting.sendall(b"\1" + text(b"k") + text(b"old") + b"\6" + number(1) + text(b"missing"))
        idle.sendall(b"\x0d\1\2\3\4")
        assert read(idle, 4) == b"\1\2\3\4"
        served.do(lambda: served.store.end("rank 3 failed"))
        assert read(waiting, 2) == b"\1", "a wait that is cut short is told so, then the connection ends"
        assert closed(idle)
    served.do(lambda: served.store.open(1, "n", ["n"]))
    with served.connect() as client:
        client.sendall(b"\7")
        assert read(client, 8) == number(0)


def test_who_connects_when_the_generation_has_ended_is_greeted_and_sent_away(served):
    early = served.connect(b"")
    served.do(lambda: served.store.end("rank 3 failed"))
    late = served.connect(b"")
    for client in (early, late):
        with client:
            client.sendall(MAGIC + ping(77))
            assert read(client, 4) == ping(77)[1:]
            client.sendall(b"\4" + text(b"init/") + number(1))
            assert closed(client)
    assert not served.said


def test_a_real_client_raises_when_the_generation_has_ended(served):
    dist = pytest.importorskip("torch.distributed")
    served.do(lambda: served.store.end("rank 3 failed"))
    with pytest.raises(dist.DistNetworkError):
        dist.TCPStore(*served.store.address, 2, False)


def ping(pid):
    return b"\x0d" + struct.pack("<I", pid)


def test_keys_of_a_process_go_with_its_last_connection_once_it_is_back(served):
    first, second = served.connect(), served.connect()
    for client in (first, second):
        client.sendall(ping(77))
        read(client, 4)
    first.sendall(b"\1" + text(b"k") + text(b"v") + b"\7")
    assert read(first, 8) == number(1)
    first.close()
    second.sendall(b"\7")
    assert read(second, 8) == number(1)
    second.close()
    with served.connect() as other:
        other.sendall(ping(88) + b"\7")
        assert read(other, 12)[4:] == number(1)
        while served.do(lambda: len(served.store._door._connections)) > 1:
            pass
        with served.connect() as back:
            back.sendall(ping(77) + b"\7")
            assert read(back, 12)[4:] == number(0)


def test_descriptors_do_not_grow(served):
    def count():
        return len(os.listdir("/proc/self/fd"))

    alive(served)
    before = count()
    for _ in range(200):
        with served.connect() as client:
            client.sendall(b"\xff")
            assert closed(client)
    assert count() <= before + 1
