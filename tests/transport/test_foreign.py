"""Other jobs, other secrets, other versions, other programs: refused with one line on both sides, and nobody is hurt."""

import socket
import time

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from hyperpodrun.agent.transport import frames
from hyperpodrun.agent.transport.addresses import Address
from hyperpodrun.agent.transport.frames import Hello, Identity, Refused, Welcome, job_label
from hyperpodrun.agent.transport.inbox import LINKS_A_NODE
from hyperpodrun.agent.transport.keys import derive
from hyperpodrun.agent.transport.zsocket import Settings

ONE, OTHER = b"1" * 32, b"2" * 32


def stranger(net, a, b, side_a, side_b):
    """b dials a and is refused; c, who belongs to a, is served meanwhile. Both sides have said one line."""
    b.net.connect("a", [a.place])
    b.net.send("a", b"let me in")
    net.until(lambda: a.said and b.said)
    assert len(a.said) == 1 and side_a in a.said[0], a.said
    assert len(b.said) == 1 and side_b in b.said[0], b.said
    # Who is gone before it could be looked at has no address (inbox.py).
    assert ("127.0.0.1" in a.said[0] or "an address that was not seen" in a.said[0]) and str(a.place) in b.said[0]
    attempts = b.count("attempts")
    net.until(lambda: b.count("attempts") >= attempts + 3, "it tries again: the other side may be put right")
    unseen = "an address that was not seen" in a.said[0]  # then its address is news, once
    assert len(a.said) <= 1 + unseen and len(b.said) == 1, "said once, however often it is tried"
    assert not a.got and not a.lost and not b.lost
    assert a.count("refused") >= 1 and b.count("turned_away") >= 1


@pytest.mark.parametrize(
    ("mine", "its", "side_a", "side_b"),
    [
        (ONE, OTHER, "it has another job secret", "it has another job secret"),
        (ONE, None, "it has no job secret and this one has", "job secret"),
        (None, ONE, "it has a job secret and this one has none", "job secret"),
    ],
    ids=["different", "only-mine", "only-its"],
)
def test_another_secret_is_refused_with_one_line_on_both_sides(net, mine, its, side_a, side_b):
    a, b, c = net.agent("a", secret=mine), net.agent("b", secret=its), net.agent("c", secret=mine)
    stranger(net, a, b, side_a, side_b)
    c.net.connect("a", [a.place])
    c.net.send("a", b"still there?")
    net.until(lambda: a.got)
    assert a.got == [(c.identity, b"still there?")]


def test_a_job_with_another_id_is_refused_with_one_line_on_both_sides(net):
    stranger(net, net.agent("a"), net.agent("b", job="another"), "a job with another id", "a job with another id")


def test_a_job_with_the_same_secret_and_another_id_fails_the_handshake(net):
    a, b = net.agent("a", secret=ONE), net.agent("b", secret=ONE, job="another")
    stranger(net, a, b, "another job secret or belongs to a job with another id", "belongs to a job with another id")


def test_another_version_is_refused_with_one_line_on_both_sides(net):
    a, b = net.agent("a"), net.agent("b", version=2)
    stranger(
        net,
        a,
        b,
        "speaks version 2 of the mesh protocol, this one version 1",
        "speaks version 1 of the mesh protocol, this one version 2",
    )


def test_the_right_server_key_with_another_client_key_does_not_get_in(net):
    """The second wall (ZAP): it holds even for somebody who got hold of the inbox's public key."""
    a = net.agent("a", secret=ONE)
    with zmq.Context() as context:
        thief = context.socket(zmq.DEALER)
        thief.setsockopt(zmq.LINGER, 0)
        thief.curve_serverkey = derive(ONE, job_label("job")).server.public
        thief.curve_publickey, thief.curve_secretkey = zmq.curve_keypair()
        thief.connect(f"tcp://127.0.0.1:{a.net.port}")
        thief.send(WELL_FORMED)
        net.until(lambda: a.said)
        context.destroy(0)
    assert "it has another job secret" in a.said[0]
    assert a.count("refused") >= 1 and a.count("malformed") == 0


def hang_up(net, a, greeting):
    """Connect to a, send that, leave when a has seen who it is."""
    with socket.create_connection(("127.0.0.1", a.net.port)) as peer:
        peer.sendall(greeting)
        net.until(lambda: a.net._inbox._accepted)


@pytest.mark.parametrize("mine", [ONE, None], ids=["secret", "none"])
def test_a_peer_that_sees_the_other_mechanism_first_and_leaves_without_a_word_is_told(net, mine):
    """Whose greeting arrives first is a race: that peer may hang up before its own mechanism was seen here."""
    a = net.agent("a", secret=mine)
    signature = b"\xff" + bytes(8) + b"\x7f"
    for count in (1, 2, 3):
        assert not a.said, "a port check is no news"
        hang_up(net, a, signature)
        net.until(lambda count=count: a.count("handshakes_failed") == count)
    net.until(lambda: a.said)
    assert len(a.said) == 1 and "job secret" in a.said[0] and "or it is no agent" in a.said[0], a.said
    assert "127.0.0.1" in a.said[0]


def test_port_checks_are_not_told_however_many(net, monkeypatch):
    a = net.agent("a", secret=ONE)
    monkeypatch.setattr("hyperpodrun.agent.transport.inbox.WORDLESS_S", 0.0)  # each comes long after the one before
    for count in range(1, 9):
        hang_up(net, a, b"")
        net.until(lambda count=count: a.count("handshakes_failed") == count)
    net.serve(3)
    assert not a.said


def test_the_mesh_may_refuse_a_peer_by_its_greeting(net):
    a = net.agent("a", admit=lambda who, greeting: None if greeting == b"roster 1" else "it has another roster")
    b, c = net.agent("b", greeting=b"roster 2"), net.agent("c", greeting=b"roster 1")
    stranger(net, a, b, "node 'b' at 127.0.0.1 was refused: it has another roster", "refused this one: it has another roster")
    c.net.connect("a", [a.place])
    c.net.send("a", b"let me in")
    net.until(lambda: a.got)


def test_two_agents_of_one_node_are_told(net):
    first, second, b = net.agent("a", incarnation=1), net.agent("a", incarnation=2), net.agent("b")
    second.net.find(first.place)
    net.until(lambda: first.said and second.said)
    assert "claims to be node 'a' too" in first.said[0]
    assert "node 'a' is already taken" in second.said[0]
    for _ in range(2):  # seen by a third: who comes back after the other one is no restart
        for each in (first, second):
            each.net.forget("b")
            each.net.connect("b", [b.place])
            net.until(lambda each=each: each.net.is_up("b"))
    assert any("two agents claim to be node 'a'" in line for line in b.said), b.said


# --- junk

HEADER = bytes([1]) + job_label("job")
WELL_FORMED = frames.header(1, job_label("job"), frames.HELLO) + frames.encode(
    Hello("x", 1, bytes(8), "", ("127.0.0.1",), 9, b"")
)


def raw_dealer(context, port, name=b""):
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if name:
        dealer.setsockopt(zmq.ROUTING_ID, name)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return dealer


part = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda tail: HEADER + tail),
    st.binary(max_size=300).map(lambda tail: HEADER + b"H" + tail),
    st.binary(max_size=64).map(lambda tail: HEADER + b"M" + tail),
    st.integers(0, 255).map(lambda version: bytes([version]) + WELL_FORMED[1:]),
    st.integers(0, len(WELL_FORMED)).map(lambda end: WELL_FORMED[:end]),
    st.tuples(st.integers(0, len(WELL_FORMED) - 1), st.integers(0, 255)).map(
        lambda change: WELL_FORMED[: change[0]] + bytes([change[1]]) + WELL_FORMED[change[0] + 1 :]
    ),
    st.builds(
        lambda *fields: HEADER + b"H" + frames.encode(fields),
        st.text(max_size=20) | st.integers(0, 9),
        st.integers(-(2**63), 2**64 - 1),
        st.binary(max_size=9),
        st.text(max_size=5),
        st.lists(st.text(max_size=5), max_size=40),
        st.integers(-1, 70000),
        st.binary(max_size=5),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(part, min_size=1, max_size=4), min_size=1, max_size=6))
def test_no_frame_of_a_stranger_hurts(served, messages):
    net, a, good, dealer = served
    a.got.clear()
    for parts in messages:
        dealer.send_multipart(parts)
    good.net.send("a", b"still served?")
    # Without a secret a hello that is right introduces a stranger, and what it sends then are messages.
    net.until(lambda: [payload for who, payload in a.got if who == good.identity] == [b"still served?"])


@pytest.fixture
def served(net):
    a, good = net.agent("a"), net.agent("good")
    good.net.connect("a", [a.place])
    net.until(lambda: good.net.is_up("a"))
    with zmq.Context() as context:
        yield net, a, good, raw_dealer(context, a.net.port)
        context.destroy(0)


def test_messages_before_a_hello_and_from_foreign_names_are_dropped(net):
    a = net.agent("a")
    with zmq.Context() as context:
        dealers = [raw_dealer(context, a.net.port, name) for name in (b"", b"a" + bytes(16), b"x" * 255)]
        for dealer in dealers:
            dealer.send(HEADER + b"M" + b"payload")
        net.until(lambda: a.count("malformed") == 3)
        context.destroy(0)
    assert not a.got and len(a.said) == 1
    assert f"port {a.net.port} receives frames that no agent sends" in a.said[0]


def answer_to(net, a, hello, header=HEADER):
    """What the inbox of `a` answers to a stranger's hello."""
    with zmq.Context() as context:
        dealer = raw_dealer(context, a.net.port)
        dealer.send(header + b"H" + frames.encode(hello))
        net.until(lambda: dealer.poll(0))
        frame = dealer.recv()
        context.destroy(0)
    assert frame.startswith(HEADER)
    return frames.decode_answer(frame)


def test_the_inbox_says_why_it_refuses(net):
    a = net.agent("a", incarnation=9)
    hello = Hello("x", 1, bytes(8), "a", (), 9, b"")
    welcome = answer_to(net, a, hello)
    assert (welcome.node, welcome.incarnation) == ("a", 9)
    assert answer_to(net, a, structs.replace(hello, want="")) == welcome
    assert answer_to(net, a, structs.replace(hello, want="b")) == Refused("wanted", "a")
    assert answer_to(net, a, structs.replace(hello, session=welcome.session)) == Refused("self")
    assert answer_to(net, a, structs.replace(hello, node="a")).why == "unfit"
    assert answer_to(net, a, hello, bytes([7]) + HEADER[1:]) == Refused("version")
    assert answer_to(net, a, hello, HEADER[:-1] + b"?") == Refused("job")


@pytest.mark.parametrize(
    "change",
    [
        {"node": ""},
        {"node": "\x1b[2J"},
        {"node": "n" * 256},
        {"incarnation": -1},
        {"session": b""},
        {"hosts": ("\x1b[2J",)},
        {"hosts": ("h",) * 33},
        {"port": 0},
        {"port": 65536},
        {"greeting": bytes(5000)},
    ],
    ids=str,
)
def test_a_hello_that_cannot_be_is_none(change):
    """What it holds is shown to people and dialled: nothing in it may be odd."""
    hello = Hello("x", 1, bytes(8), "a", ("h", "::1"), 9, b"")
    assert frames.decode_hello(HEADER + b"H" + frames.encode(hello)) == hello
    assert frames.decode_hello(HEADER + b"H" + frames.encode(structs.replace(hello, **change))) is None


@pytest.mark.parametrize(
    "answer",
    [
        HEADER + b"W" + frames.encode(Welcome("somebody else", 1, bytes(8))),
        HEADER + b"W",
        HEADER + b"R" + frames.encode({}),
        HEADER + b"R" + frames.encode(("nonsense", "")),
        HEADER + b"M" + b"no answer",
        WELL_FORMED,
        HEADER[:5],
        b"",
    ],
    ids=["another-node", "empty-welcome", "odd-refusal", "odd-reason", "message", "hello", "cut", "empty"],
)
def test_an_inbox_that_lies_is_not_believed(net, answer):
    a = net.agent("a")
    with zmq.Context() as context:
        liar = context.socket(zmq.ROUTER)
        liar.setsockopt(zmq.LINGER, 0)
        port = liar.bind_to_random_port("tcp://127.0.0.1")
        a.net.connect("b", [Address("127.0.0.1", port)])
        for _ in range(3):
            net.until(lambda: liar.poll(0))
            liar.send_multipart([liar.recv_multipart()[0], answer])
        context.destroy(0)
    assert not a.net.is_up("b") and not a.lost
    assert a.count("malformed") >= 2


def test_of_a_nodes_many_connections_those_that_speak_are_kept(net):
    a = net.agent("a")
    hello = HEADER + b"H" + frames.encode(Hello("x", 1, bytes(8), "", (), 9, b""))
    with zmq.Context() as context:
        dealers = []
        for number in range(3 * LINKS_A_NODE):
            dealers.append(raw_dealer(context, a.net.port))
            dealers[-1].send(hello)
            net.until(lambda: dealers[-1].poll(0))
            dealers[0].send(HEADER + b"M%d" % number)
            net.until(lambda number=number: len(a.got) == number + 1)
        context.destroy(0)
    assert len(a.net._inbox._links) == LINKS_A_NODE


def test_an_oversized_frame_ends_its_connection_and_takes_no_memory(net):
    a, good = net.agent("a", settings=Settings(largest_message_bytes=1 << 16)), net.agent("good")
    good.net.connect("a", [a.place])
    with zmq.Context() as context:
        big = raw_dealer(context, a.net.port)
        with big.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            big.send(WELL_FORMED)
            big.send(HEADER + b"M" + bytes(1 << 20))
            net.until(lambda: monitor.poll(0), "the connection is closed")
            big.disable_monitor()
        context.destroy(0)
    good.net.send("a", b"still served?")
    net.until(lambda: a.got)
    assert a.got == [(good.identity, b"still served?")]


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\xff" * 64,  # a greeting, then nonsense
    b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00NULL"
    + bytes(48)
    + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff"
    + bytes(64),  # a command of 2^64 bytes
    b"\x01\x00\x05\x00" + b"old ZMTP" * 20,
    bytes(4096),
    b"",
]


@pytest.mark.parametrize("secret", [None, ONE], ids=["open", "encrypted"])
def test_tcp_garbage_hurts_nobody(net, secret):
    a, good = net.agent("a", secret=secret), net.agent("good", secret=secret)
    good.net.connect("a", [a.place])
    net.until(lambda: good.net.is_up("a"))
    for garbage in GARBAGE * 10:
        with socket.create_connection(("127.0.0.1", a.net.port)) as raw:
            raw.sendall(garbage)
        net.reactor.turn(0.001)
    good.net.send("a", b"still served?")
    net.until(lambda: a.got)
    assert not good.lost, "the good connection was never broken"


def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("secret", [None, ONE], ids=["open", "encrypted"])
def test_a_million_malformed_frames_while_a_good_peer_is_served(net, secret):
    """With a secret a stranger gets no frame in: there it is the handshake that is flooded."""
    a = net.agent("a", secret=secret)
    good = net.process("good", *(["secret=" + secret.decode()] if secret else []))
    a.net.connect("good", [good.place])
    net.until(lambda: a.net.is_up("good"))
    junk = [b"", b"\0", HEADER, HEADER + b"M" + bytes(100), WELL_FORMED[:-3], b"\2" + WELL_FORMED[1:], bytes(1000), b"H" * 200]
    frames_wanted = 1_000_000 if secret is None else 5_000
    before_mib, most_mib, answered, asked = resident_mib(), 0.0, 0, 0
    with zmq.Context() as context:
        dealers = [raw_dealer(context, a.net.port) for _ in range(4)]
        sent = 0
        give_up_s = time.monotonic() + 250
        while sent < frames_wanted or answered < asked:
            assert time.monotonic() < give_up_s, (sent, answered, asked)
            if secret is not None and sent < frames_wanted:
                with socket.create_connection(("127.0.0.1", a.net.port)) as raw:
                    raw.sendall(GARBAGE[sent % len(GARBAGE)] + junk[sent % len(junk)])
                sent += 1
            else:
                for number in range(400):
                    if sent < frames_wanted:
                        try:
                            dealers[number % 4].send(junk[sent % len(junk)], zmq.NOBLOCK)
                            sent += 1
                        except zmq.Again:
                            break
            if asked == answered and sent < frames_wanted:
                asked += 1
                assert a.net.send("good", b"%d" % asked), "a good peer takes what it is sent"
            net.reactor.turn(0.001)
            answered = len(a.got)
            most_mib = max(most_mib, resident_mib())
        if secret is None:
            net.until(lambda: a.count("malformed") + a.count("refused") >= frames_wanted)
        context.destroy(0)
    assert [payload for _, payload in a.got] == [b"%d" % number for number in range(1, asked + 1)]
    assert {who for who, _ in a.got} == {Identity("good", 1)}
    assert answered > 100 and not a.lost
    assert most_mib - before_mib < 64, f"grew by {most_mib - before_mib:.0f} MiB"
    assert len(a.said) <= 8, a.said[:20]
