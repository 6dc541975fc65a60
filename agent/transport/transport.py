"""The agent's network: one inbox, one outgoing connection a peer, an address book.

Peers are named by their node: whoever lives in that slot now. Contact points are addresses without a name: they are dialled
until somebody answers, and from then on that connection is the node's. Whoever says hello tells how it can be reached, so an
answer needs no address.

A connection costs some 100 KiB and six descriptors at each end, and there are as many peers as the job has nodes. So only what
was asked for with `connect` or `find` is kept up; whatever else is sent to gets a connection with its first message, which waits
for it, and loses it after `IDLE_S` without another.

`send` never blocks and nothing is promised: a message may be lost, may arrive once, never twice, and between two processes in
the order sent (while one connection lasts). What arrives is from an agent of this job, and from the node that it names as far
as the secret is trusted.

Invariants: one Outbound a key; a node's name is never bound to an agent that said it is another one; nobody is told of a loss
who was not up before.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from hyperpodrun.agent import open_files
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport import keys
from hyperpodrun.agent.transport.addresses import Address, is_loopback
from hyperpodrun.agent.transport.binding import EVERYWHERE, bind, hosts_to_bind
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.transport.frames import Hello, Identity, Refused, Welcome
from hyperpodrun.agent.transport.inbox import Inbox, Link
from hyperpodrun.agent.transport.outbound import Key, Outbound
from hyperpodrun.agent.transport.probe import Outcome, own_addresses, probe_tcp
from hyperpodrun.agent.transport.resolver import Resolver
from hyperpodrun.agent.transport.surroundings import Surroundings
from hyperpodrun.agent.transport.zsocket import Settings

IDLE_S = 15.0
SWEEP_S = 5.0
MOST_SOCKETS = 32768
KNOWN_ADDRESSES = 16
TOLD_ADDRESSES = 8
COUNTERS = (
    "sent",
    "sent_bytes",
    "received",
    "received_bytes",
    "dropped",
    "unknown_peer",
    "malformed",
    "refused",
    "turned_away",
    "handshakes_failed",
    "attempts",
    "lost",
)


class PeerStatus(msgspec.Struct, frozen=True):
    """For status pages: where this peer is dialled and how that stands."""

    peer: str
    state: str
    place: str
    incarnation: int | None


class Transport:
    """See the module. Callbacks run on the loop.

    `on_message(source, payload, link)`; `on_lost(identity)`: its connection closed; `on_found(address, identity)`: who answers
    at a contact point, None when it is this agent itself; `admit(identity, greeting)`: a sentence refuses a peer, who is told;
    `say`: one line for the user. Raises BindError, ValueError for a bad secret, NotImplementedError for a pyzmq without CURVE.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        identity: Identity,
        label: bytes,
        version: int,
        on_message: Callable[[Identity, bytes, Link], None],
        on_lost: Callable[[Identity], None],
        say: Callable[[str], None],
        on_found: Callable[[Address, Identity | None], None] = lambda _address, _identity: None,
        admit: Callable[[Identity, bytes], str | None] = lambda _identity, _greeting: None,
        greeting: bytes = b"",
        bind_hosts: Sequence[str] = (),
        advertise: Sequence[str] = (),
        first_port: int = 0,
        port_span: int = 1,
        secret: bytes | None = None,
        insecure: bool = False,
        settings: Settings | None = None,
    ) -> None:
        if len(greeting) > 1024:
            raise ValueError("a greeting has at most 1024 bytes")
        settings = settings or Settings()
        job_keys = keys.derive(secret, label) if secret is not None else None
        hosts = hosts_to_bind(bind_hosts, open_to_network=secret is not None or insecure)
        self.identity = identity
        open_files.raise_limit()
        self._reactor = reactor
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_found = on_found
        self._admit = admit
        self._greeting = greeting
        self._say = say
        self._pid = os.getpid()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._complaints = Complaints(say, reactor.now_s)
        self._resolver = Resolver(reactor)
        self._context: zmq.Context[Any] = zmq.Context(1)
        self._context.set(zmq.MAX_SOCKETS, min(MOST_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT))))
        self._around = Surroundings(
            reactor, self._context, settings, job_keys, version, label, self._resolver, self._counters, self._complaints
        )
        self._around.loopback_only = secret is None and not insecure
        self._largest = settings.largest_message_bytes
        self._peers: dict[Key, Outbound] = {}
        self._pinned: set[Key] = set()
        self._book: dict[str, tuple[Address, ...]] = {}
        self._sessions: dict[str, list[bytes]] = {}
        self._contacts: dict[Address, str | None] = {}
        self._inbox = Inbox(
            reactor,
            self._context,
            settings,
            job_keys,
            version,
            label,
            self._hello_came,
            on_message,
            self._counters,
            self._complaints,
        )
        try:
            self.port, bound = bind(self._inbox.socket, hosts, first_port, port_span)
        except OSError:
            self._inbox.close()
            self._context.term()
            raise
        self._inbox.port = self.port
        shown = advertise or (own_addresses() or ["127.0.0.1"] if EVERYWHERE in bound else bound)
        self.addresses = tuple(Address(host, self.port) for host in shown)[:TOLD_ADDRESSES]
        self._sweeper = reactor.call_later(SWEEP_S, self._sweep)

    # --- for the agent

    def send(self, to: Key, payload: bytes) -> bool:
        """Send to whoever lives in this node's slot, or to who answers at a contact point. False when it was dropped at once."""
        if len(payload) > self._largest:
            raise ValueError(f"a message of {len(payload)} bytes is larger than the {self._largest} that peers take")
        key = (self._contacts.get(to) or to) if isinstance(to, Address) else to
        peer = self._peers.get(key)
        if peer is None:
            if isinstance(key, Address) and key.port is not None:
                self._contacts.setdefault(key, None)
            elif isinstance(key, Address) or not self._book.get(key) or key == self.identity.node:
                self._counters["unknown_peer"] += 1
                return False
            peer = self._open(key)
        return peer.send(payload)

    def connect(self, node: str, addresses: Sequence[Address] = ()) -> None:
        """Keep a connection to this node up, and tell of its loss. Addresses add to what is known."""
        if node == self.identity.node:
            return
        self.learn(node, addresses)
        self._pinned.add(node)
        if node not in self._peers:
            self._open(node)

    def learn(self, node: str, addresses: Sequence[Address]) -> None:
        """Remember where a node can be reached; what it says itself comes first."""
        known = self._book.get(node, ())
        merged = tuple(dict.fromkeys([*known, *(a for a in addresses if a.port is not None)]))[:KNOWN_ADDRESSES]
        if merged != known:
            self._book[node] = merged
            if peer := self._peers.get(node):
                peer.nudge()

    def find(self, address: Address) -> None:
        """Dial a contact point until an agent answers; `on_found` tells who it is. Its port must be given."""
        if address.port is None:
            raise ValueError(f"contact point {address} has no port")
        node = self._contacts.setdefault(address, None)
        self._pinned.add(address)
        if address not in self._peers and (node is None or not self.is_up(node)):
            self._contacts[address] = None
            self._open(address)

    def release(self, node: str) -> None:
        """The connection to this node need not be kept up any more: it is closed once nothing is sent there."""
        self._pinned.discard(node)

    def forget(self, key: Key) -> None:
        """Close the connection to a node, or stop looking for a contact point. What was learned is kept."""
        self._pinned.discard(key)
        if isinstance(key, Address):
            self._contacts.pop(key, None)
        if peer := self._peers.pop(key, None):
            peer.close()

    def is_up(self, node: str) -> bool:
        """Whether an agent of this node has answered on the connection that is open now."""
        peer = self._peers.get(node)
        return peer is not None and peer.state == "up"

    def probe(self, node: str, callback: Callable[[Outcome], None], timeout_s: float = 1.0) -> None:
        """A plain TCP connect to where this node was last reached (M2). "unreachable" where that is not known."""
        peer = self._peers.get(node)
        known = [peer.good] if peer and peer.good else list(self._book.get(node, ()))
        timer: Timer | None = self._reactor.call_later(timeout_s, lambda: ended("timeout"))

        def ended(outcome: Outcome) -> None:
            nonlocal timer
            if timer:
                timer.cancel()
                timer = None
                callback(outcome)

        def resolved(hosts: list[str], _reason: str) -> None:
            port = known[0].port
            if hosts and port is not None:
                probe_tcp(self._reactor, hosts[0], port, ended, timeout_s)
            else:
                self._reactor.call_later(0, lambda: ended("unreachable"))

        if known:
            self._resolver.ask(known[0].host, resolved)
        else:
            self._reactor.call_later(0, lambda: ended("unreachable"))

    def addresses_of(self, node: str) -> tuple[Address, ...]:
        """Where this node may be reached, best first."""
        return self._book.get(node, ())

    def counters(self) -> dict[str, int]:
        """Totals since the start, see COUNTERS; messages unless the name says bytes."""
        return dict(self._counters)

    def peers(self) -> list[PeerStatus]:
        """All outgoing connections."""
        return [
            PeerStatus(str(key), peer.state, str(peer.place or ""), peer.identity.incarnation if peer.identity else None)
            for key, peer in self._peers.items()
        ]

    def close(self) -> None:
        """Close everything, at once: what is still queued is dropped. In a forked child this does nothing (Z6)."""
        if os.getpid() != self._pid or self._context.closed:
            return
        self._sweeper.cancel()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._inbox.close()
        self._resolver.close()
        self._context.term()

    # --- outgoing

    def _open(self, key: Key) -> Outbound:
        peer = Outbound(
            self._around, key, lambda: self._addresses_for(peer.key), self._own_hello, self._up, self._lost, self._is_self
        )
        self._peers[key] = peer
        return peer

    def _addresses_for(self, key: Key) -> tuple[Address, ...]:
        return (key,) if isinstance(key, Address) else self._book.get(key, ())

    def _own_hello(self, want: str) -> Hello:
        hosts = tuple(address.host for address in self.addresses)
        me = self.identity
        return Hello(me.node, me.incarnation, self._around.session, want, hosts, self.port, self._greeting)

    def _up(self, peer: Outbound, who: Welcome) -> None:
        if not isinstance(peer.key, Address):
            return
        address, node = peer.key, who.node
        del self._peers[address]
        if node == self.identity.node:
            peer.close()
            self._claimed_twice(str(address))
            return
        self._contacts[address] = node
        other = self._peers.get(node)
        if other is not None and other.state == "up":
            for payload in peer.take_kept():
                other.send(payload)
            peer.close()
        else:
            peer.key = node
            self._peers[node] = peer
            if other is not None:
                for payload in other.take_kept():
                    peer.send(payload)
                other.close()
        self.learn(node, [address])
        self._on_found(address, Identity(who.node, who.incarnation))

    def _lost(self, peer: Outbound, who: Identity) -> None:
        self._counters["lost"] += 1
        for address, node in list(self._contacts.items()):
            if node == who.node and address not in self._peers:
                self._contacts[address] = None  # whoever answers there next may be somebody else
                if address in self._pinned:
                    self._open(address)
        self._on_lost(who)

    def _is_self(self, peer: Outbound) -> None:
        address = peer.key
        if isinstance(address, Address):
            self._peers.pop(address, None)
            peer.close()
            self._on_found(address, None)

    def _sweep(self) -> None:
        self._sweeper = self._reactor.call_later(SWEEP_S, self._sweep)
        old_s = self._reactor.now_s() - IDLE_S
        wanted = self._pinned.union(node for address, node in self._contacts.items() if node and address in self._pinned)
        for key, peer in list(self._peers.items()):
            if key not in wanted and peer.used_s < old_s:
                del self._peers[key]
                peer.close()

    # --- incoming

    def _hello_came(self, hello: Hello, host: str) -> Welcome | Refused:
        me = self.identity
        if hello.session == self._around.session:
            return Refused("self")
        if hello.node == me.node:
            self._claimed_twice(host)
            return Refused(
                "unfit",
                f"node {me.node!r} is already taken by the agent at {self.addresses[0]}; give each agent a node of its own",
            )
        if hello.want not in ("", me.node):
            return Refused("wanted", me.node)
        if reason := self._admit(Identity(hello.node, hello.incarnation), hello.greeting):
            # Where it listens, as far as is known: if it has refused us as well, one line is enough.
            place = Address(host, hello.port)
            self._complaints.about(f"unfit {place}", f"node {hello.node!r} at {host} was refused: {reason}")
            return Refused("unfit", reason[:1000])
        self._heard_from(hello, host)
        return Welcome(me.node, me.incarnation, self._around.session)

    def _heard_from(self, hello: Hello, host: str) -> None:
        sessions = self._sessions.setdefault(hello.node, [])
        if hello.session in sessions[:-1]:
            self._complaints.about(
                f"twice {hello.node}",
                f"two agents claim to be node {hello.node!r}, one of them at {host}: end one, or give each a node of its own",
            )
            sessions.remove(hello.session)
        if not sessions or sessions[-1] != hello.session:
            sessions.append(hello.session)
            del sessions[:-4]
        said = [Address(host, hello.port)] if host != "?" else []
        said += [Address(h, hello.port) for h in hello.hosts if not is_loopback(h) or is_loopback(host)]
        old = self._book.get(hello.node, ())
        self._book[hello.node] = tuple(dict.fromkeys([*said, *old]))[:KNOWN_ADDRESSES]
        for address in said:
            if contact := self._peers.get(address):
                contact.nudge()
        peer = self._peers.get(hello.node)
        if peer is None:
            return
        if peer.state == "up" and peer.session != hello.session:
            peer.redial()  # it restarted, and the old connection has not noticed yet
        else:
            peer.nudge()

    def _claimed_twice(self, where: str) -> None:
        self._complaints.about(
            f"own {where}",
            f"another agent, at {where}, claims to be node {self.identity.node!r} too: end one, or give each a node of its own",
        )
