"""Peers that come late, die, come back, stand still, or have names that do not resolve yet."""

import signal
import socket

import pytest

from hyperpodrun.agent.transport import resolver
from hyperpodrun.agent.transport.addresses import Address
from hyperpodrun.agent.transport.frames import Identity
from hyperpodrun.agent.transport.zsocket import Settings


def test_a_killed_peer_is_told_and_its_port_refuses(net):
    a, b = net.agent("a"), net.process("b", "incarnation=3")
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    b.kill()
    net.until(lambda: a.lost)
    assert a.lost == [Identity("b", 3)]
    outcomes = []
    a.net.probe("b", outcomes.append)
    net.until(lambda: outcomes)
    assert outcomes == ["refused"]


def test_a_peer_that_restarts_on_its_port_is_found_again(net, free_ports):
    port = str(free_ports(1))
    a, b = net.agent("a"), net.process("b", "incarnation=1", f"first-port={port}")
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    b.kill()
    net.until(lambda: a.lost)
    again = net.process("b", "incarnation=2", f"first-port={port}")
    net.until(lambda: a.net.is_up("b"))
    a.net.send("b", b"echo")
    net.until(lambda: a.got)
    assert a.got == [(Identity("b", 2), b"echo")]
    assert again.port == b.port and a.lost == [Identity("b", 1)]


def test_a_peer_that_restarts_on_another_port_is_found_by_its_hello(net):
    a, old = net.agent("a"), net.process("b")
    a.net.connect("b", [old.place])
    net.until(lambda: a.net.is_up("b"))
    old.kill()
    net.until(lambda: a.lost)
    new = net.agent("b", incarnation=2)
    new.net.connect("a", [a.place])
    net.until(lambda: a.net.is_up("b"))
    a.net.send("b", b"welcome back")
    net.until(lambda: new.got)


def test_a_connection_that_has_not_noticed_a_restart_is_opened_anew(net):
    """A host that loses its power closes nothing: its next life says hello while the old connection still seems fine."""
    a, old = net.agent("a", settings=Settings(heartbeat_timeout_ms=600_000)), net.process("b")
    a.net.connect("b", [old.place])
    net.until(lambda: a.net.is_up("b"))
    old.signal(signal.SIGSTOP)
    new = net.agent("b", incarnation=2)
    new.net.connect("a", [a.place])
    net.until(lambda: a.lost == [Identity("b", 1)])
    a.net.send("b", b"to the living")
    net.until(lambda: new.got)


def test_a_peer_may_come_late(net, free_ports):
    port = free_ports(1)
    a = net.agent("a")
    a.net.find(Address("127.0.0.1", port))
    net.until(lambda: a.count("attempts") >= 3)
    assert not a.found and not a.said
    late = net.agent("late", first_port=port)
    net.until(lambda: a.found)
    assert a.found == [(late.place, late.identity)]


def test_a_contact_point_that_calls_is_called_back_at_once(net, free_ports, monkeypatch):
    monkeypatch.setattr("hyperpodrun.agent.transport.outbound.FIRST_WAIT_S", 1000.0)
    monkeypatch.setattr("hyperpodrun.agent.transport.outbound.LONGEST_WAIT_S", 1000.0)
    place = Address("127.0.0.1", free_ports(1))
    a = net.agent("a")
    a.net.find(place)
    net.until(lambda: a.net.peers()[0].state == "waiting" and a.count("attempts") == 1)
    late = net.agent("late", first_port=place.port)
    late.net.connect("a", [a.place])
    net.until(lambda: a.found)


def test_another_node_at_a_contact_point_is_found_too(net, free_ports):
    """A name or address of a pool: the agent there goes, and the next one that answers is another node."""
    place = Address("127.0.0.1", free_ports(1))
    a, b = net.agent("a"), net.process("b", f"first-port={place.port}")
    a.net.find(place)
    net.until(lambda: a.found)
    b.kill()
    net.until(lambda: a.lost)
    c = net.agent("c", first_port=place.port)
    net.until(lambda: len(a.found) == 2)
    assert a.found == [(place, Identity("b", 1)), (place, c.identity)]


def test_a_forgotten_peer_is_not_dialled_any_more(net, free_ports):
    a = net.agent("a")
    a.net.find(nobody := Address("127.0.0.1", free_ports(1)))
    a.net.connect("b", [nobody])
    net.until(lambda: a.count("attempts") >= 2)
    a.net.forget(nobody)
    a.net.forget("b")
    attempts = a.count("attempts")
    net.serve(50)
    assert a.count("attempts") == attempts and a.net.peers() == []


def test_forgetting_a_peer_is_no_loss(net):
    a, b = net.agent("a"), net.agent("b")
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    a.net.forget("b")
    net.serve(10)
    assert not a.lost
    a.net.send("b", b"what was learned is kept")
    net.until(lambda: b.got)


def test_a_first_message_makes_its_connection_and_waits_for_it(net, free_ports):
    """To a contact point nobody looks for, and to a node that is only known by its address."""
    a, b, c = net.agent("a"), net.agent("b"), net.agent("c")
    a.net.send(b.place, b"whoever you are")
    a.net.learn("c", [c.place])
    a.net.send("c", b"you")
    net.until(lambda: b.got and c.got)
    assert (b.got, c.got) == ([(a.identity, b"whoever you are")], [(a.identity, b"you")])
    assert a.found == [(b.place, b.identity)]


def test_only_connections_that_are_wanted_or_used_stay(net, monkeypatch):
    idle = "hyperpodrun.agent.transport.transport.IDLE_S"
    monkeypatch.setattr(idle, 1000.0)
    monkeypatch.setattr("hyperpodrun.agent.transport.transport.SWEEP_S", 0.05)
    a = net.agent("a")
    kept, contact, released, used, once, asked = others = [net.agent(name) for name in ("k", "c", "r", "u", "i", "f")]
    a.net.connect("k", [kept.place])
    a.net.connect("r", [released.place])
    a.net.find(contact.place)
    a.net.find(asked.place)
    for other in (used, once):
        a.net.learn(other.identity.node, [other.place])
        a.net.send(other.identity.node, b"once")
    net.until(lambda: all(a.net.is_up(other.identity.node) for other in others))
    a.net.release("r")
    a.net.forget(asked.place)
    monkeypatch.setattr(idle, 0.2)

    def peers() -> set[str]:
        a.net.send("u", b"again")
        return {peer.peer for peer in a.net.peers()}

    net.until(lambda: peers() == {"k", "c", "u"})
    assert not a.lost, "what was closed here is no loss"
    monkeypatch.setattr(idle, 1000.0)
    for other in (released, once, asked):
        a.net.send(other.identity.node, b"later")
    net.until(lambda: all((a.identity, b"later") in other.got for other in (released, once, asked)))


def test_a_name_that_does_not_resolve_is_said_once_and_asked_again(net, monkeypatch):
    asked = []
    real = socket.getaddrinfo

    def slow_dns(host, *args, **more):
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *args, **more)

    monkeypatch.setattr(resolver.socket, "getaddrinfo", slow_dns)
    a, b = net.agent("a", insecure=True), net.agent("b", insecure=True)
    a.net.find(Address("worker-7.mesh", b.net.port))
    net.until(lambda: a.found)
    assert asked == ["worker-7.mesh"] * 4
    assert a.said == ["the name worker-7.mesh does not resolve (Name or service not known); it is asked again until it does"]


def test_a_name_that_hangs_holds_up_no_other_address(net, monkeypatch):
    import threading

    release = threading.Event()
    real = socket.getaddrinfo
    monkeypatch.setattr(
        resolver.socket, "getaddrinfo", lambda host, *args, **more: release.wait() and real("127.0.0.1", *args, **more)
    )
    a, b = net.agent("a", insecure=True), net.agent("b", insecure=True)
    a.net.connect("b", [Address("hangs.mesh", 1), b.place])
    a.net.send("b", b"past it")
    net.until(lambda: b.got)
    release.set()


def test_a_name_that_hangs_does_not_stop_the_retries_of_another_address(net, monkeypatch, free_ports):
    import threading

    release = threading.Event()
    monkeypatch.setattr(resolver.socket, "getaddrinfo", lambda *args, **more: release.wait() and [])
    monkeypatch.setattr("hyperpodrun.agent.transport.outbound.LONGEST_WAIT_S", 0.05)
    port = free_ports(1)
    a = net.agent("a", insecure=True)
    a.net.connect("late", [Address("hangs.mesh", 1), Address("127.0.0.1", port)])
    net.until(lambda: a.count("attempts") >= 2)
    net.agent("late", first_port=port)
    net.until(lambda: a.net.is_up("late"))
    release.set()


def test_a_peer_that_stands_still_costs_bounded_memory_and_blocks_nobody(net):
    mark = 20
    a = net.agent("a", settings=Settings(high_water_mark=mark, heartbeat_timeout_ms=60_000))
    still, good = net.process("still"), net.process("good")
    a.net.connect("still", [still.place])
    a.net.connect("good", [good.place])
    a.net.send("still", b"the way back is open")
    a.net.send("good", b"the way back is open")
    net.until(lambda: len(a.got) == 2)
    still.signal(signal.SIGSTOP)
    payload = bytes(1 << 20)
    taken = 0
    while a.net.send("still", payload):  # kernel buffers and the queue fill up, then the answer is no
        taken += 1
        net.reactor.turn(0.001)
        assert taken < 1000
    assert a.count("dropped") == 1
    a.net.send("good", b"and I?")
    net.until(lambda: len(a.got) == 3)
    still.signal(signal.SIGCONT)
    net.until(lambda: len(a.got) == taken + 3, "what was taken arrives")


def test_a_peer_that_stands_still_is_noticed_and_found_again(net):
    quick = Settings(heartbeat_ms=100, heartbeat_timeout_ms=300)
    a, b = net.agent("a", settings=quick), net.process("b")
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    b.signal(signal.SIGSTOP)
    net.until(lambda: a.lost)
    outcomes = []
    a.net.probe("b", outcomes.append)
    net.until(lambda: outcomes)
    assert outcomes == ["accepted"], "the kernel answers for it, so it is not gone"
    b.signal(signal.SIGCONT)
    net.until(lambda: a.net.is_up("b"))


@pytest.mark.parametrize("secret", [None, "s" * 32], ids=["plain", "encrypted"])
def test_a_peer_that_stands_still_has_timed_out_and_refused_nothing(net, secret):
    quick = Settings(heartbeat_ms=100, heartbeat_timeout_ms=300, handshake_ms=400)
    a = net.agent("a", settings=quick, secret=secret.encode() if secret else None)
    b = net.process("b", *([f"secret={secret}"] if secret else []))
    a.net.connect("b", [b.place])
    net.until(lambda: a.net.is_up("b"))
    b.signal(signal.SIGSTOP)
    net.until(lambda: a.said)
    attempts = a.count("attempts")
    net.until(lambda: a.count("attempts") >= attempts + 6, "tried again, as often as any peer that is away")
    assert len(a.said) == 1 and "timed out" in a.said[0] and "refused" not in a.said[0], a.said
    assert str(b.place) in a.said[0] and a.count("turned_away") == 0
    b.signal(signal.SIGCONT)
    net.until(lambda: a.net.is_up("b"))


def test_a_peer_that_stands_still_for_2_s_is_not_lost(net):
    """M3, with the settings of real jobs: in both directions, and for whoever stood still himself."""
    a, b = net.agent("a"), net.process("b")
    a.net.connect("b", [b.place])
    a.net.send("b", b"so that b has a connection to a")
    net.until(lambda: a.got)
    reached = a.count("attempts")
    b.signal(signal.SIGSTOP)
    until_s = net.reactor.now_s() + 2.0
    net.until(lambda: net.reactor.now_s() >= until_s)
    b.signal(signal.SIGCONT)
    a.net.send("b", b"again")
    net.until(lambda: len(a.got) == 2)
    assert not a.lost and a.count("attempts") == reached and not a.said


def test_many_agents_in_any_order(net, free_ports):
    """A cold start: everybody dials everybody's contact points before most of them exist."""
    count = 8
    first = free_ports(count)
    places = [Address("127.0.0.1", first + index) for index in range(count)]
    agents = []
    for index in (3, 0, 7, 1, 6, 2, 5, 4):
        agent = net.agent(f"n{index}", first_port=first + index, secret=b"s" * 32)
        agents.append(agent)
        for place in places:
            agent.net.find(place)
        net.serve(5)
    net.until(lambda: all(len(agent.found) == count for agent in agents))
    for agent in agents:
        for other in agents:
            if other is not agent:
                agent.net.send(other.identity.node, b"hi")
    net.until(lambda: all(len(agent.got) == count - 1 for agent in agents))
    assert not any(agent.said or agent.lost for agent in agents)
    assert all(len(agent.net.peers()) == count - 1 for agent in agents)
