"""Door 1 under a rain of malformed requests: a real client is served, memory is bounded, the log is not flooded.

HYPERPODRUN_FIRE says how many requests are fired (1000000 for the whole trial) and HYPERPODRUN_FIRE_SEED from which seed.
"""

import contextlib
import os
import random
import socket
import struct
import threading

import pytest
from spoken import EXCHANGES, alive, closed, number, read, text

from hyperpodrun.agent import store as agent_store
from hyperpodrun.agent.doors import requests

SHOTS = int(os.environ.get("HYPERPODRUN_FIRE", "20000"))
SEED = int(os.environ.get("HYPERPODRUN_FIRE_SEED", "1"))
PER_CONNECTION = 5
MAGIC = struct.pack("<BI", 0, requests.MAGIC)
LENGTHS = [0, 1, 7, 1 << 20, (1 << 20) + 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]


def shot(chooser):
    """One request that a client of torch would not send, or not so."""
    kind = chooser.randrange(6)
    whole = chooser.choice(EXCHANGES)[0]
    if kind == 0:
        return chooser.randbytes(chooser.randrange(1, 60))
    if kind == 1:
        return whole[: chooser.randrange(len(whole))]
    if kind == 2:
        raw = bytearray(whole)
        raw[chooser.randrange(len(raw))] = chooser.randrange(256)
        return bytes(raw)
    if kind == 3:
        return (
            bytes([chooser.randrange(19)]) + struct.pack("<Q", chooser.choice(LENGTHS)) + chooser.randbytes(chooser.randrange(40))
        )
    if kind == 4:
        return b"\x0d" + chooser.randbytes(4) + whole  # one more process that is none
    return whole


def fire(address, shots, seed):
    """Many requests on each connection; the door ends most of them early."""
    chooser = random.Random(seed)
    while shots > 0:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=20) as client:
            volley = [shot(chooser) for _ in range(PER_CONNECTION)]
            shots -= PER_CONNECTION
            client.sendall((MAGIC if chooser.random() < 0.9 else b"") + b"".join(volley))


def memory_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_real_client_is_served_while_noise_rains(served):
    print(f"{SHOTS} requests, seed {SEED}")
    gunners = [threading.Thread(target=fire, args=(served.store.address, SHOTS // 2, SEED + n)) for n in range(2)]
    fire(served.store.address, 4000, SEED + 100)  # tables have their usual sizes now
    before = memory_bytes()
    for gunner in gunners:
        gunner.start()
    rounds = 0
    with served.connect() as client:
        while any(gunner.is_alive() for gunner in gunners) or not rounds:
            client.sendall(b"\1" + text(b"/mine") + text(b"%d" % rounds) + b"\3" + text(b"/mine"))
            wanted = text(b"%d" % rounds)
            assert read(client, len(wanted)) == wanted
            rounds += 1
    for gunner in gunners:
        gunner.join()
    assert alive(served)
    grown = memory_bytes() - before
    assert grown < 100 << 20, f"{grown >> 20} MiB more are held"
    # One line for each kind of fault and minute, however many clients; kinds are few.
    kinds = {line.partition("was closed: ")[2].split(",")[0][:12] for line in served.said}
    assert len(kinds) <= 8 and len(served.said) <= len(kinds) * (2 + SHOTS // 20000), served.said
    while served.do(lambda: len(served.store._door._connections)):
        pass
    assert served.do(lambda: served.store.space._shard.waiting()) == 0
    assert served.do(lambda: served.store._door._held_bytes) == 0
    assert served.do(lambda: len(served.store._door._processes._numbers)) <= 2 * served.do(lambda: 1 << 14)


def test_unfinished_requests_of_many_clients_are_bounded_together(served, monkeypatch):
    limit = 24 << 20
    served.do(lambda: setattr(served.store._door, "_limit_bytes", limit))
    small = served.connect()
    small.sendall(b"\1" + text(b"k") + struct.pack("<Q", 20000) + b"x" * 19000)
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(served.connect()) for _ in range(8)]
        for client in greedy:
            with contextlib.suppress(OSError):
                client.sendall(b"\1" + text(b"k") + struct.pack("<Q", 40 << 20) + b"x" * (6 << 20))
        assert alive(served)
        assert served.do(lambda: served.store._door._held_bytes) <= limit
    small.sendall(b"x" * 1000 + b"\3" + text(b"k"))
    assert read(small, 8) == number(20000), "the greatest had to go, not this one"
    small.close()
    assert len(served.said) == 1 and "too much is held" in served.said[0], served.said


def test_keys_that_nobody_can_count_are_charged(served):
    served.do(lambda: setattr(served.store._door, "_limit_bytes", 8 << 20))
    keys = 100_000
    with served.connect() as client:
        client.sendall(b"\6" + number(keys) + text(b"missing") * (keys - 1))
        with contextlib.suppress(OSError):
            client.sendall(text(b"missing"))
        assert closed(client)
    assert alive(served)
    assert served.do(lambda: served.store.space._shard.waiting()) == 0


def test_a_wait_that_was_given_up_costs_nothing(served):
    with served.connect() as client:
        client.sendall(b"\6" + number(1000) + text(b"missing") * 1000 + b"\x0c" + b"\x0d\1\2\3\4")
        assert read(client, 5) == b"\1\1\2\3\4"
        assert served.do(lambda: served.store._door._held_bytes) == 0


def test_answers_that_are_not_read_are_charged(served):
    with served.connect() as other:
        other.sendall(b"\1" + text(b"big") + text(b"x" * (4 << 20)) + b"\5" + number(1) + text(b"big"))
        assert read(other, 1) == b"\0"
    served.do(lambda: setattr(served.store._door, "_limit_bytes", 32 << 20))
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(served.connect()).sendall((b"\3" + text(b"big")) * 4)
        assert alive(served)
        assert served.do(lambda: served.store._door._held_bytes) <= 32 << 20


def test_an_answer_has_a_limit(served, monkeypatch):
    monkeypatch.setattr("hyperpodrun.agent.doors.asking.MOST_ANSWER_BYTES", 10 << 20)
    with served.connect() as client:
        client.sendall(b"\1" + text(b"big") + text(b"x" * (4 << 20)) + b"\x0a" + number(1000) + text(b"big") * 1000)
        assert closed(client)
    assert alive(served)
    assert "an answer is too long" in served.said[0]


def test_clients_that_say_nothing_make_room_for_one_that_does(served):
    served.do(lambda: setattr(served.store._door, "_most_connections", 20))
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(served.connect(b""))
        assert alive(served)
        assert served.do(lambda: len(served.store._door._connections)) <= 20
    assert len(served.said) == 1


def test_processes_that_came_and_went_are_forgotten(served, monkeypatch):
    monkeypatch.setattr("hyperpodrun.agent.doors.processes.MOST_KNOWN", 10)
    for pid in range(1, 100):
        with served.connect() as client:
            client.sendall(b"\x0d" + struct.pack("<I", pid) + (b"\1" + text(b"k") + text(b"v") if pid % 2 else b"") + b"\7")
            read(client, 12)
    while served.do(lambda: len(served.store._door._connections)):
        pass
    assert served.do(lambda: len(served.store._door._processes._numbers)) <= 11


def test_memory_is_the_containers_where_that_is_less(tmp_path):
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    assert agent_store.memory_bytes([str(tmp_path / "limit")]) == 1000000
    assert agent_store.memory_bytes([str(tmp_path / "none"), str(tmp_path / "absent")]) > 1 << 28
