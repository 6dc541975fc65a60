"""Before the mesh: contact points, this agent's slot and its port.

An agent's slot is called after its contact point (see `mesh_slots.py`), so names of contact points are looked up first, for at most
`NAMES_LIMIT_S`, to see which of them is this host. A port that nobody gave is chosen: the one of a contact point that is this host,
else the default, else any; and the port of an agent that died is its successor's, or the others would take it for another node.

States: *looking* (names are asked for), *placed* (`on_placed` was called; later news of contact points goes to `on_contacts`).
"""

import errno
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hyperpodrun.agent import mesh_slots
from hyperpodrun.agent.config import MeshConfig
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.addresses import Address, is_numeric, parse_address
from hyperpodrun.agent.transport.contact_points import ContactPoints, Listed, parse_contact
from hyperpodrun.agent.transport.probe import own_addresses
from hyperpodrun.agent.transport.resolver import Resolver
from hyperpodrun.agent.workers import rendezvous

DEFAULT_PORT = 29400
NAMES_LIMIT_S = 5.0


class Place(msgspec.Struct, frozen=True):
    """Where this agent stands: its slot's name, its port, and the names of all slots that have a contact point."""

    slot: str
    port: int
    named: tuple[str, ...]


class MeshStart:
    """`remembered_port`: of an agent of this launcher that died, 0 if none did. `start` raises OSError or ValueError."""

    def __init__(
        self,
        reactor: Reactor,
        mesh: MeshConfig,
        remembered_port: int,
        watch_child: Callable[[int, Callable[[int], None]], None],
        say: Callable[[str], None],
        environ: Mapping[str, str],
        on_placed: Callable[[Place], None],
        on_contacts: Callable[[], None],
    ) -> None:
        self.resolver = Resolver(reactor)
        self.contacts: tuple[Address, ...] = ()
        """Contact points known so far, each with a port."""
        self._reactor = reactor
        self._mesh = mesh
        self._remembered_port = remembered_port
        self._on_placed = on_placed
        self._on_contacts = on_contacts
        self._answers: dict[str, list[str]] = {}
        self._placed = False
        contacts = [parse_contact(mesh.peers, environ, _read_file)] if mesh.peers else []
        contacts += [Listed((parse_address(text),)) for text in mesh.endpoints]
        self._points = ContactPoints(
            reactor, self.resolver.ask, watch_child, contacts, mesh.port or DEFAULT_PORT, self._contacts_known, say
        )

    def start(self) -> None:
        """Begin; with numeric contact points `on_placed` is called before this returns."""
        self._points.start()

    def close(self) -> None:
        """Look no more."""
        self._placed = True
        self._points.close()
        self.resolver.close()

    def place(self) -> Place:
        """Choose (again) where to stand: a port that was free a moment ago may be taken now."""
        return choose_place(self._mesh, self.contacts, self._answers, self._remembered_port)

    def _contacts_known(self, addresses: tuple[Address, ...]) -> None:
        self.contacts = tuple(address for address in addresses if address.port)
        if self._placed:
            self._on_contacts()
            return
        names = {address.host for address in self.contacts if not is_numeric(address.host)} - set(self._answers)
        if not names:
            self._settle()
            return
        self._reactor.call_later(NAMES_LIMIT_S, self._settle)
        for name in names:
            self.resolver.ask(name, lambda hosts, _reason, name=name: self._answered(name, hosts))  # type: ignore[misc]

    def _answered(self, name: str, hosts: list[str]) -> None:
        self._answers[name] = hosts
        if all(address.host in self._answers for address in self.contacts if not is_numeric(address.host)):
            self._settle()

    def _settle(self) -> None:
        if not self._placed:
            self._placed = True
            self._on_placed(self.place())


def choose_place(
    mesh: MeshConfig, contacts: Sequence[Address], answers: Mapping[str, Sequence[str]], remembered_port: int = 0
) -> Place:
    """Slot and port of an agent here. `contacts` have ports; `answers` are the addresses behind their names, as far as known."""
    pairs = [(address.host, address.port or 0) for address in contacts]
    here = mesh_slots.Here(socket.gethostname(), tuple(own_addresses()), answers)
    port = remembered_port or (mesh.port if mesh.port_given else 0)
    if not port and not mesh.port_given:
        # A contact point on this host is meant for its agent, whatever the default port is.
        own = [port for host, port in pairs if here.is_here(host)]
        port = next((port for port in (*own, mesh.port) if can_listen(port)), 0)
    port = port or rendezvous.choose_port()
    named = tuple(dict.fromkeys(mesh_slots.slot_name(host, port) for host, port in pairs))
    return Place(mesh_slots.own_slot(pairs, port, here), port, named)


def can_listen(port: int) -> bool:
    """Does nobody listen on this port of this host? Closed connections that linger (TIME_WAIT) are no hindrance."""
    if not port:
        return False
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno == errno.EADDRINUSE:
                return False
            continue  # this family does not exist here
    return True


def _read_file(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
