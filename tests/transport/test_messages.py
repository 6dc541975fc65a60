"""Agents that belong together exchange messages."""

import pytest

from hyperpodrun.agent.transport.addresses import Address
from hyperpodrun.agent.transport.frames import Identity
from hyperpodrun.agent.transport.zsocket import Settings

SECRET = bytes(range(32))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "encrypted"])
def test_two_agents_talk_both_ways_though_only_one_knows_the_other(net, secret):
    a, b = net.agent("a", incarnation=7, secret=secret), net.agent("b", incarnation=2**64 - 1, secret=secret)
    a.net.connect("b", [b.place])
    assert a.net.send("b", b"question")
    net.until(lambda: b.got, "the question")
    assert b.got == [(Identity("a", 7), b"question")]
    assert b.links[0].host == "127.0.0.1"
    assert b.net.send("a", b"answer")  # a's address came with its hello
    net.until(lambda: a.got, "the answer")
    assert a.got == [(Identity("b", 2**64 - 1), b"answer")]
    assert not a.said and not b.said
    assert a.count("sent") == b.count("received") == 1


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "encrypted"])
def test_every_size_arrives_whole_and_in_order(net, secret):
    a, b = net.agent("a", secret=secret), net.agent("b", secret=secret)
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    payloads = [bytes([size % 251]) * size for size in (0, 1, 17, 255, 256, 8192, 65535, 65536, 65537, 1 << 20, 9 << 20)]
    for payload in payloads:
        assert a.net.send("b", payload)
    net.until(lambda: len(b.got) == len(payloads))
    assert [payload for _, payload in b.got] == payloads


def test_more_than_a_turn_of_messages_is_read_to_the_end(net):
    a, b = net.agent("a"), net.agent("b")
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    assert all(a.net.send("b", b"%d" % number) for number in range(900))
    net.until(lambda: len(b.got) == 900)
    assert [payload for _, payload in b.got] == [b"%d" % number for number in range(900)]


def test_a_message_larger_than_peers_take_is_the_senders_fault(net):
    a = net.agent("a", settings=Settings(largest_message_bytes=1000))
    a.net.connect("b", [Address("127.0.0.1", 9)])
    with pytest.raises(ValueError, match="1001 bytes"):
        a.net.send("b", bytes(1001))


def test_a_contact_point_becomes_the_node_that_answers(net):
    a, b = net.agent("a"), net.agent("b")
    a.net.find(b.place)
    a.net.send(b.place, b"to whoever lives there")
    net.until(lambda: a.found and b.got)
    assert a.found == [(b.place, b.identity)]
    assert a.net.is_up("b")
    a.net.send("b", b"by name")
    a.net.send(b.place, b"by place")
    net.until(lambda: len(b.got) == 3)
    assert [peer.peer for peer in a.net.peers()] == ["b"], "one connection a peer"


def test_two_addresses_of_one_agent_end_in_one_connection(net):
    a, b = net.agent("a"), net.agent("b")
    a.net.connect("b", [b.place])
    a.net.find(b.place)
    a.net.find(Address("localhost", b.net.port))
    net.until(lambda: len(a.found) == 2)
    net.until(lambda: a.net.is_up("b"))
    assert [peer.peer for peer in a.net.peers()] == ["b"]
    assert not a.lost, "closing the second connection is no loss"


def test_an_agent_recognises_itself_among_the_contact_points(net):
    a = net.agent("a")
    a.net.find(a.place)
    net.until(lambda: a.found)
    assert a.found == [(a.place, None)]
    assert a.net.peers() == [] and not a.said


def test_agents_on_one_host_take_the_ports_of_their_range_in_turn(net, free_ports):
    first = free_ports(3)
    agents = [net.agent(name, first_port=first, port_span=3) for name in "abc"]
    assert [agent.net.port for agent in agents] == [first, first + 1, first + 2]
    with pytest.raises(OSError, match=f"ports {first} to {first + 2} are all in use"):
        net.agent("d", first_port=first, port_span=3)
    with pytest.raises(OSError, match=f"port {first} is in use on this host"):
        net.agent("d", first_port=first)


def test_ipv6(net):
    a, b = net.agent("a", bind_hosts=["::1"]), net.agent("b", bind_hosts=["::1"])
    assert [str(address) for address in b.net.addresses] == [f"[::1]:{b.net.port}"]
    a.net.connect("b", b.net.addresses)
    a.net.send("b", b"six")
    net.until(lambda: b.got)
    b.net.send("a", b"back")
    net.until(lambda: a.got)
    assert b.links[0].host == "::1"


def test_addresses_are_tried_until_one_leads_to_the_right_agent(net):
    """Every host has the same docker0: at one of the addresses of b lives c, and at another nobody."""
    a, b, c = net.agent("a"), net.agent("b"), net.agent("c")
    nobody = Address("127.0.0.1", 9)
    a.net.connect("b", [nobody, c.place, Address("127.0.0.77", b.net.port), b.place])
    a.net.send("b", b"for b only")
    net.until(lambda: b.got)
    assert not c.got
    assert a.net.is_up("b") and not a.said


def test_without_a_secret_nobody_outside_is_listened_to_or_talked_to(net):
    with pytest.raises(OSError, match="without a job secret the mesh listens on this machine only"):
        net.agent("a", bind_hosts=["0.0.0.0"])
    a = net.agent("a")
    assert {address.host for address in a.net.addresses} <= {"127.0.0.1", "::1"}
    a.net.connect("b", [Address("192.0.2.77", 29400)])
    net.until(lambda: a.said)
    assert "is on another host, and without a job secret" in a.said[0]
    assert a.count("attempts") == 0


def test_an_insecure_mesh_is_a_wish_that_is_granted(net):
    a = net.agent("a", insecure=True)
    b = net.agent("b", insecure=True, bind_hosts=["*"])
    a.net.connect("b", b.net.addresses)
    a.net.send("b", b"hello")
    net.until(lambda: b.got)


def test_what_is_unknown_is_dropped_and_counted(net):
    a = net.agent("a")
    assert not a.net.send("nobody", b"")
    assert not a.net.send(Address("127.0.0.1"), b"an address without a port")
    assert not a.net.send("a", b"to myself")
    assert a.count("unknown_peer") == 3
