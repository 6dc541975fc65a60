"""Keys, complaints, probes and names: the parts that need no second agent."""

import socket

import pytest
import zmq
from zmq.utils import z85

from hyperpodrun.agent.transport import frames, kept, keys, resolver
from hyperpodrun.agent.transport.complaints import EVERY_S, MOST_TOPICS, Complaints
from hyperpodrun.agent.transport.probe import own_addresses, plain, probe_tcp
from hyperpodrun.agent.transport.resolver import Resolver


def test_hkdf_gives_the_vectors_of_rfc_5869():
    first = keys.hkdf_sha256(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    third = keys.hkdf_sha256(b"\x0b" * 22, b"", b"", 42)
    assert third.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"


def test_keys_depend_on_secret_job_and_side_and_on_nothing_else():
    one, other = frames.job_label("one"), frames.job_label("other")
    pairs = [keys.derive(secret, label) for secret in (b"x" * 32, b"y" * 32) for label in (one, other)]
    privates = {pair.private for both in pairs for pair in (both.server, both.client)}
    assert len(privates) == 8
    assert keys.derive(b"x" * 32, one) == pairs[0]
    assert z85.encode(pairs[0].server.public) == zmq.curve_public(z85.encode(pairs[0].server.private))
    assert "private" not in repr(pairs[0]).replace("KeyPair(...)", "")
    with pytest.raises(ValueError, match="has 31 bytes and needs 32"):
        keys.derive(b"x" * 31, one)


def test_job_labels_take_any_id():
    labels = {frames.job_label(job) for job in ("", "a", "b", "x" * 1000, "ü", "\udc80")}
    assert len(labels) == 6 and all(len(label) == frames.LABEL_BYTES for label in labels)


def test_a_complaint_is_said_at_once_then_once_a_minute_with_a_count():
    said, now = [], [0.0]
    complaints = Complaints(said.append, lambda: now[0])
    for _ in range(1000):
        complaints.about("junk", "there is junk")
    complaints.about("else", "something else")
    assert said == ["there is junk", "something else"]
    now[0] += EVERY_S
    complaints.about("junk", "there is junk")
    assert said[2:] == ["there is junk (999 more since)"]
    complaints.over("junk")
    complaints.about("junk", "there is junk")
    assert said[3:] == ["there is junk"]
    for topic in range(10 * MOST_TOPICS):
        complaints.about(f"topic {topic}", "")
    assert len(complaints._topics) == MOST_TOPICS


def test_a_plain_connect_tells_refused_from_accepted_and_silence(net, free_ports):
    outcomes = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        probe_tcp(net.reactor, "127.0.0.1", port, outcomes.append)
        net.until(lambda: outcomes)
        # Nobody accepts, so the backlog is full now, and what comes next is dropped: the same as a host that is silent.
        probe_tcp(net.reactor, "127.0.0.1", port, outcomes.append, timeout_s=0.05)
        net.until(lambda: len(outcomes) == 2)
    probe_tcp(net.reactor, "127.0.0.1", free_ports(1), outcomes.append)
    assert len(outcomes) == 2, "never before it returns"
    probe_tcp(net.reactor, "fe80::1%none", 9, outcomes.append)
    net.until(lambda: len(outcomes) == 4)
    assert outcomes[:2] == ["accepted", "timeout"]
    assert sorted(outcomes[2:]) == ["refused", "unreachable"]


def test_a_first_packet_that_is_lost_is_not_waited_for(net):
    """The kernel would send it again after 1 s; a peer that is only badly heard must not look like a host that is gone."""
    outcomes = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        place = server.getsockname()
        with socket.create_connection(place):  # the backlog is full: what comes next is dropped
            probe_tcp(net.reactor, *place, outcomes.append, timeout_s=0.95)
            net.serve(3)
            server.accept()[0].close()
            net.until(lambda: outcomes)
    assert outcomes == ["accepted"]


def test_own_addresses_are_those_that_others_can_use():
    for host in own_addresses():
        assert not host.startswith(("127.", "fe80:")) and host != "::1"
    assert plain("::ffff:10.0.0.1") == "10.0.0.1" and plain("::1") == "::1"


def test_names_resolve_off_the_loop_and_numbers_at_once(net, monkeypatch):
    answers = []
    names = Resolver(net.reactor)
    names.ask("10.0.0.1", lambda hosts, reason: answers.append((hosts, reason)))
    assert answers == [(["10.0.0.1"], "")]
    for _ in range(3):
        names.ask("localhost", lambda hosts, reason: answers.append((hosts, reason)))
    names.ask("no-such-host.invalid", lambda hosts, reason: answers.append((hosts, reason)))
    names.ask("\udc80", lambda hosts, reason: answers.append((hosts, reason)))
    assert len(answers) == 1
    net.until(lambda: len(answers) == 6)
    good = [hosts for hosts, _ in answers[1:] if hosts]
    assert len(good) == 3 and all("127.0.0.1" in hosts for hosts in good)
    assert all(reason for hosts, reason in answers if not hosts)
    names.close()


def test_a_resolver_may_be_closed_at_any_time(net, monkeypatch):
    """A thread that answers late must not ring at a descriptor that belongs to somebody else by then."""
    import threading

    release, done = threading.Event(), threading.Event()
    real = resolver._look_up

    def slow(*args):
        release.wait()
        real(*args)
        done.set()

    monkeypatch.setattr(resolver, "_look_up", slow)
    names = Resolver(net.reactor)
    names.ask("localhost", lambda hosts, reason: pytest.fail("nobody waits any more"))
    names.close()
    ends = socket.socketpair()  # takes the descriptor that became free
    with ends[0], ends[1]:
        release.set()
        assert done.wait(60)
        for end in ends:
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(1)


def test_a_started_program_inherits_none_of_the_descriptors(net):
    import fcntl
    import os

    a, b = net.agent("a", secret=b"s" * 32), net.agent("b", secret=b"s" * 32)
    before = set(os.listdir("/proc/self/fd"))
    c = net.agent("c", secret=b"s" * 32)
    c.net.connect("a", [a.place])
    b.net.connect("c", [c.place])
    net.until(lambda: c.net.is_up("a") and b.net.is_up("c"))
    new = {int(name) for name in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{name}")}
    assert len(new) > 5
    assert [fd for fd in new if not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC] == []


def test_closing_gives_back_every_descriptor(net, free_ports):
    import gc
    import os

    def descriptors():
        gc.collect()  # what other tests left must not go away in between
        return len(os.listdir("/proc/self/fd"))

    from hyperpodrun.agent.transport.addresses import Address

    warm = net.agent("warm", secret=b"s" * 32)
    warm.net.close()
    before = descriptors()
    a = net.agent("a", secret=b"s" * 32)
    nobody = free_ports(1)
    a.net.connect("b", [Address("127.0.0.1", nobody)])
    net.until(lambda: a.count("attempts") >= 6)
    a.net.close()
    assert descriptors() == before


def test_first_words_are_few_young_and_counted():
    counters = {"dropped": 0}
    queue = kept.Kept(counters)
    assert not queue.keep(0.0, bytes(kept.KEPT_BYTES + 1)) and counters["dropped"] == 1
    for number in range(kept.KEPT + 5):
        assert queue.keep(0.0, b"%d" % number)
    assert counters["dropped"] == 6
    assert queue.take(0.0) == [b"%d" % number for number in range(5, kept.KEPT + 5)] and queue.take(0.0) == []
    half = bytes(kept.KEPT_BYTES // 2)
    for _ in range(3):
        queue.keep(0.0, half)
    assert counters["dropped"] == 7
    queue.keep(kept.KEPT_S + 0.1, b"young")
    assert queue.take(kept.KEPT_S + 0.1) == [b"young"] and counters["dropped"] == 9
    queue.keep(10.0, b"old")
    assert queue.take(10.1 + kept.KEPT_S) == [] and counters["dropped"] == 10
    queue.keep(20.0, b"forgotten")
    queue.forget()
    assert queue.take(20.0) == [] and counters["dropped"] == 11
