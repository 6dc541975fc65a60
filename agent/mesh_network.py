"""The mesh's network as the core needs it: messages to slots, whoever lives there under whatever name.

What travels is an `Envelope`: the core's message with the sender's incarnation, which may change while the connection stays, or a
failed rank's report for the node of rank 0; or, told apart by its first byte, a frame of the store (store.py). A slot is called after
its contact point; an agent that answers there under another name (it did not know that the contact point means its host) is that
slot's alias.

States: *looking* (connections to a few contact points: whoever answers knows of others), *settled* (connections to those that
`mesh_links` names). Invariant: what comes in is decoded whole or not at all.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from hyperpodrun.agent import mesh_slots, mesh_terms
from hyperpodrun.agent.config import JobConfig, MeshConfig
from hyperpodrun.agent.mesh_start import MeshStart, Place
from hyperpodrun.agent.mesh_terms import Terms
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.addresses import Address, parse_address
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.inbox import Link
from hyperpodrun.agent.transport.outbound import Key
from hyperpodrun.agent.transport.probe import Outcome, probe_tcp
from hyperpodrun.agent.transport.transport import Transport
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire.mesh import Member, Message
from hyperpodrun.agent.wire.store import MARK
from hyperpodrun.agent.workers import rendezvous

VERSION = 1
REPORT_BYTES = 65536
ALWAYS_SOUGHT = 6
"""The first contact points, which all agents of a job have in common (A10): looked for all the time ..."""
SOUGHT_AT_A_TIME = 3
"""... and so many of the others, in turn."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What one agent sends another."""

    incarnation: int
    message: Message | None
    store: str = ""
    """With Go: where rank 0 of the new world opens its store, host:port."""
    report: str = ""
    """Without a message: what is known of a failed rank."""


class Encoder:
    """What goes to everybody comes in a row and is encoded once: a view of 1,024 members is 0.1 MB."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._last = Envelope(0, None)
        self._payload = b""

    def encode(self, envelope: Envelope) -> bytes:
        """The bytes of an envelope."""
        last = self._last
        same = envelope.message is not None and envelope.message is last.message
        if not (same and (envelope.incarnation, envelope.store) == (last.incarnation, last.store)):
            self._last, self._payload = envelope, self._encode(envelope)
        return self._payload


class MeshNetwork:
    """`on_envelope(node, envelope)`, `on_lost(node)`, `on_store(node, payload)`; `on_found(node)`: who lives at a contact point.

    Raises BindError, OSError, ValueError, NotImplementedError with a sentence.
    """

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        mesh: MeshConfig,
        start: MeshStart,
        place: Place,
        terms: Terms,
        incarnation: int,
        say: Callable[[str], None],
        environ: Mapping[str, str],
        on_envelope: Callable[[str, Envelope], None],
        on_lost: Callable[[str], None],
        on_store: Callable[[str, bytes], None],
        on_found: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._start = start
        self._slot = place.slot
        self._on_envelope = on_envelope
        self._on_found = on_found
        self._on_store = on_store
        self._encoder = Encoder()
        self._decoder = msgspec.msgpack.Decoder(Envelope)
        self._aliases: dict[str, str] = {}
        self._near: set[str] = set()
        self._sought: set[Address] = set()
        self._turn = random.randrange(1 << 16)
        self._own_contacts: set[Address] = set()
        own = (config.local_addr,) if config.local_addr else ()
        self._transport = Transport(
            reactor,
            identity=Identity(place.slot, incarnation),
            label=job_label(config.job_id),
            version=VERSION,
            on_message=self._received,
            on_lost=lambda who: on_lost(who.node),
            on_found=self._found,
            admit=lambda who, greeting: mesh_terms.refusal(place.slot, terms, who.node, greeting),
            greeting=mesh_terms.encode(terms),
            say=say,
            bind_hosts=own,
            advertise=own,
            first_port=place.port,
            secret=secret(mesh, environ),
            insecure=mesh.insecure,
        )
        self.addresses = tuple(str(address) for address in self._transport.addresses)
        """Where this agent can be reached, best first."""
        first = self._transport.addresses[0].host if self._transport.addresses else rendezvous.loopback()
        self.host = config.local_addr or first
        """Where ranks of other nodes reach those of this one."""

    def counters(self) -> dict[str, int]:
        """Totals, see transport.COUNTERS."""
        return self._transport.counters()

    def send(self, to: str, envelope: Envelope) -> None:
        """To whoever lives in slot `to`; may be lost."""
        key: Key = self._aliases.get(to, to)
        if to not in self._aliases and not self._transport.addresses_of(to):
            # Nobody has answered there yet. The first words wait at the contact point for a moment, or they would be lost and
            # the agents meet half a second later.
            key = self._contact(to) or key
            if key in self._own_contacts:
                return
        self._transport.send(key, self._encoder.encode(envelope))

    def send_store(self, to: str, payload: bytes) -> bool:
        """A frame of the store, MARK in front; may be lost."""
        return self._transport.send(self._aliases.get(to, to), payload)

    def dial(self) -> None:
        """Look for agents at some of the contact points known by now, at others with each call."""
        own = self._own_contacts
        contacts = [address for address in self._start.contacts if slot_of(address) != self._slot and address not in own]
        first, rest = contacts[:ALWAYS_SOUGHT], contacts[ALWAYS_SOUGHT:]
        in_turn = [rest[(self._turn + i) % len(rest)] for i in range(min(SOUGHT_AT_A_TIME, len(rest)))]
        self._turn += SOUGHT_AT_A_TIME
        for address in self._sought.difference(first, in_turn):
            self._transport.forget(address)
        self._sought = {*first, *in_turn}
        for address in (*first, *in_turn):
            self._transport.find(address)

    def settle(self, members: Iterable[Member], near: Collection[str]) -> None:
        """A view with these members stands: keep connections to those who are `near`, and to no others."""
        for address in self._sought:
            self._transport.forget(address)
        self._sought.clear()
        for member in members:
            if member.node != self._slot:
                addresses = [parse_address(text) for text in member.addresses]
                self._transport.learn(member.node, addresses)
                if member.node in near:
                    self._transport.connect(member.node)
        for node in self._near.difference(near):
            self._transport.release(node)
        self._near = set(near)

    def probe(self, slot: str, on_answer: Callable[[bool], None]) -> None:
        """M2's plain connect: was it refused? Silence gives no answer. By the contact point, if no agent ever answered there."""

        def known(outcome: Outcome) -> None:
            if outcome in ("refused", "accepted"):
                on_answer(outcome == "refused")

        contact = self._contact(slot)
        if slot in self._aliases or contact is None or contact.port is None:
            self._transport.probe(self._aliases.get(slot, slot), known)
            return
        port = contact.port

        def resolved(hosts: list[str], _reason: str) -> None:
            if hosts:
                probe_tcp(self._reactor, hosts[0], port, known)
            else:
                known("refused")  # a name that does not exist: no host, no agent

        self._start.resolver.ask(contact.host, resolved)

    def not_here(self, nodes: Iterable[str]) -> set[str]:
        """Slots with a contact point in which none of these nodes lives."""
        here = set(nodes)
        slots = {slot_of(address) for address in self._start.contacts}
        return {slot for slot in slots if self._aliases.get(slot, slot) not in here}

    def close(self) -> None:
        """Leave the network at once."""
        self._transport.close()

    def _contact(self, slot: str) -> Address | None:
        return next((address for address in self._start.contacts if slot_of(address) == slot), None)

    def _found(self, address: Address, who: Identity | None) -> None:
        if who is None:
            self._own_contacts.add(address)
            return
        self._aliases[slot_of(address)] = who.node
        self._on_found(who.node)

    def _received(self, who: Identity, payload: bytes, _link: Link) -> None:
        if payload[:1] == MARK:
            self._on_store(who.node, payload)
            return
        try:
            envelope = self._decoder.decode(payload)
        except msgspec.DecodeError:
            return  # the transport counts frames; one of this job that is no message of ours is not worth a line
        self._on_envelope(who.node, envelope)


def slot_of(contact: Address) -> str:
    """The slot that a contact point with a port names."""
    return mesh_slots.slot_name(contact.host, contact.port or 0)


def secret(mesh: MeshConfig, environ: Mapping[str, str]) -> bytes | None:
    """The job's secret: of the file, else of the variable, else none. Raises OSError."""
    if mesh.secret_file:
        with open(mesh.secret_file, "rb") as file:
            return file.read()
    text = environ.get(names.JOB_SECRET)
    return text.encode(errors="surrogateescape") if text else None
