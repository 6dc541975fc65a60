"""The mesh core joined to the network, the clock and the vote file.

Messages and the clock go into `mesh/node.py`; the effects it gives are carried out here or handed to the agent (`Listener`). What
travels is the core's message with the sender's incarnation, which may change while the connection stays.

States: *looking* (names are being resolved), *meeting* (no view yet), *in* (has a view), *lingering* (the job is closed, the others
are still told), *closed*.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from hyperpodrun.agent import mesh_slots, vote_file
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.mesh import effects as fx
from hyperpodrun.agent.mesh.config import MeshConfig as CoreConfig
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.status import MeshStatus
from hyperpodrun.agent.transport.addresses import Address, is_numeric, parse_address
from hyperpodrun.agent.transport.contact_points import ContactPoints, Listed, parse_contact
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.inbox import Link
from hyperpodrun.agent.transport.probe import Outcome, own_addresses, probe_tcp
from hyperpodrun.agent.transport.resolver import Resolver
from hyperpodrun.agent.transport.transport import Transport
from hyperpodrun.agent.wire.mesh import Go, Member, Message, View
from hyperpodrun.agent.workers import rendezvous

VERSION = 1
NAMES_LIMIT_S = 5.0
"""So long names of contact points are waited for, to see which of them is this host."""
LINGER_S = 5.0
SPEED = {"fast": (150, 3), "default": (250, 3), "lax": (500, 6)}
"""--failure-detector: (heartbeat in ms, heartbeats that may be missed)."""
SECRET_VARIABLE = "HYPERPODRUN_JOB_SECRET"


class Listener(Protocol):
    """What the agent does about the mesh's decisions."""

    def start_here(self, world: World) -> None: ...
    def stop_here(self, generation: int, kill: bool) -> None: ...
    def job_over(self, code: int, reason: str) -> None: ...
    def view_changed(self, view: View) -> None: ...


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    incarnation: int
    message: Message
    store: str = ""
    """With Go: where rank 0 of the new world opens its store, host:port."""


class MeshDriver:
    """`start` begins; `notify` is for what happens to this node's workers. `start` raises OSError or ValueError with a sentence."""

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        listener: Listener,
        watch_child: Callable[[int, Callable[[int], None]], None],
        say: Callable[[str], None],
        environ: Mapping[str, str],
        hold_until: Callable[[int], None],
    ) -> None:
        assert config.mesh is not None
        self._reactor = reactor
        self._config = config
        self._mesh = config.mesh
        self._listener = listener
        self._watch_child = watch_child
        self._say = say
        self._environ = environ
        self._hold_until = hold_until
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Envelope)
        self._resolver = Resolver(reactor)
        self._contacts: tuple[Address, ...] = ()
        self._aliases: dict[str, str] = {}
        self._linked: set[str] = set()
        self._stores: dict[int, str] = {}
        self._heard_numbers: dict[str, int] = {}
        self._timer: Timer | None = None
        self._node: Node | None = None
        self._transport: Transport | None = None
        self._votes: vote_file.VoteFile | None = None
        self._points: ContactPoints | None = None
        self._early: list[fx.Event] = []
        self._closing: Callable[[], None] | None = None
        self._join_timer: Timer | None = None
        self._port = 0
        self._view_at = 0.0
        self.slot = ""

    # --- for the agent

    def start(self) -> None:
        """Read the contact points and begin to look for the others."""
        mesh = self._mesh
        contacts = [parse_contact(mesh.peers, self._environ, _read_file)] if mesh.peers else []
        contacts += [Listed((parse_address(text, 0),)) for text in mesh.endpoints]
        self._port = mesh.port
        self._points = ContactPoints(
            self._reactor, self._resolver.ask, self._watch_child, contacts, self._default_port(), self._contacts_known, self._say
        )
        self._points.start()

    def notify(self, event: fx.Event) -> None:
        """Tell the mesh what happened here."""
        if isinstance(event, fx.WorkersGone):
            self._hold_until(0)
        if self._node is None:
            self._early.append(event)
        else:
            self._carry_out(self._node.notify(self._now(), event))

    @property
    def view(self) -> View | None:
        """Where this agent stands."""
        return self._node.view if self._node else None

    def status(self) -> MeshStatus:
        """The same for people and tools, with what has passed through the network so far."""
        view = self.view
        return MeshStatus(
            slot=self.slot,
            view=view.number if view else -1,
            mode=view.mode if view else "",
            members=[member.node for member in view.members] if view else [],
            active=list(view.order) if view else [],
            view_at=self._view_at,
            counters=self._transport.counters() if self._transport else {},
        )

    def close(self, then: Callable[[], None]) -> None:
        """Leave the network once the others know what this agent knows (or soon)."""
        self._closing = then
        if self._node is None or self._transport is None or self.view is None or self.view.mode != "closed":
            # Nothing to pass on; a moment for what is on its way.
            self._reactor.call_later(0.1, self._close_now)
            return
        self._reactor.call_later(LINGER_S, self._close_now)
        self._leave_when_told()

    # --- beginning

    def _default_port(self) -> int:
        return self._mesh.port or 29400

    def _contacts_known(self, addresses: tuple[Address, ...]) -> None:
        self._contacts = tuple(address for address in addresses if address.port)
        if self._transport is not None:
            self._dial()
            return
        names = [a.host for a in self._contacts if not is_numeric(a.host)]
        answers: dict[str, list[str]] = {}
        limit = self._reactor.call_later(NAMES_LIMIT_S, lambda: self._begin(answers))

        def answered(name: str, hosts: list[str]) -> None:
            answers[name] = hosts
            if len(answers) == len(set(names)):
                limit.cancel()
                self._begin(answers)

        if not names:
            limit.cancel()
            self._begin({})
        for name in dict.fromkeys(names):
            self._resolver.ask(name, lambda hosts, _reason, name=name: answered(name, hosts))  # type: ignore[misc]

    def _begin(self, answers: dict[str, list[str]]) -> None:
        if self._transport is not None:
            return
        config, mesh = self._config, self._mesh
        pairs = [(address.host, address.port or 0) for address in self._contacts]
        here = mesh_slots.Here(socket.gethostname(), tuple(own_addresses()), answers)
        if not mesh.port_given:
            # A contact point on this host is meant for its agent, whatever the default port is.
            own = [port for host, port in pairs if here.is_here(host) and rendezvous.is_free(port)]
            self._port = own[0] if own else mesh.port if rendezvous.is_free(mesh.port) else 0
        self._port = self._port or rendezvous.choose_port()
        self.slot = mesh_slots.own_slot(pairs, self._port, here)
        slots = config.max_nodes + mesh.spares
        names = tuple(dict.fromkeys(mesh_slots.slot_name(host, port) for host, port in pairs))
        self._votes = vote_file.VoteFile(vote_file.path_for(config.job_id, self.slot), self._say)
        vote = self._votes.read()
        incarnation = vote.incarnation if vote else int.from_bytes(os.urandom(8)) >> 1
        self._transport = Transport(
            self._reactor,
            identity=Identity(self.slot, incarnation),
            label=job_label(config.job_id),
            version=VERSION,
            on_message=self._received,
            on_lost=lambda who: self.notify(fx.ConnectionLost(who.node)),
            on_found=self._found,
            say=self._say,
            bind_hosts=(config.local_addr,) if config.local_addr else (),
            advertise=(config.local_addr,) if config.local_addr else (),
            first_port=self._port,
            secret=self._secret(),
            insecure=mesh.insecure,
        )
        me = Member(
            node=self.slot,
            incarnation=incarnation,
            nproc=config.nproc_per_node,
            wish=config.node_rank,
            addresses=tuple(str(address) for address in self._transport.addresses),
        )
        heartbeat_ms, misses = SPEED[mesh.failure_detector]
        core = CoreConfig(
            slots=slots,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            roster=names if len(names) == slots else (),
            first_contact=names[0] if names else self.slot,
            elastic_now=mesh.elastic_join_now,
            max_restarts=config.max_restarts,
            join_window_ns=int(mesh.join_window_s * 1e9),
            heartbeat_ns=heartbeat_ms * 1_000_000,
            misses=misses,
        )
        self._node = Node(core, me, int.from_bytes(os.urandom(8)), self._now(), vote)
        self._dial()
        self._join_timer = self._reactor.call_later(mesh.join_timeout_s, self._never_met)
        for event in self._early:
            self.notify(event)
        self._carry_out(self._node.tick(self._now()))

    def _secret(self) -> bytes | None:
        if self._mesh.secret_file:
            with open(self._mesh.secret_file, "rb") as file:
                return file.read()
        text = self._environ.get(SECRET_VARIABLE)
        return text.encode() if text else None

    def _dial(self) -> None:
        assert self._transport is not None
        for address in self._contacts:
            if mesh_slots.slot_name(address.host, address.port or 0) != self.slot:
                self._transport.find(address)

    def _found(self, address: Address, who: Identity | None) -> None:
        if who is not None:
            self._aliases[mesh_slots.slot_name(address.host, address.port or 0)] = who.node

    def _never_met(self) -> None:
        if self._node is None or self._node.view is not None:
            return
        here = sorted({*self._aliases.values(), self.slot})
        missing = [str(a) for a in self._contacts if mesh_slots.slot_name(a.host, a.port or 0) not in (*self._aliases, self.slot)]
        self._say(
            f"no world of at least {self._config.min_nodes} nodes within {self._mesh.join_timeout_s:g} s "
            f"(--rdzv-conf join_timeout): here are {', '.join(here)}; "
            + (
                f"not reached: {', '.join(missing)}"
                if missing
                else "too few contact points are known, name all nodes with --peers"
            )
        )
        self._listener.job_over(69, "")

    # --- the core

    def _now(self) -> int:
        return time.monotonic_ns()

    def _received(self, who: Identity, payload: bytes, _link: Link) -> None:
        if self._node is None:
            return
        try:
            envelope = self._decoder.decode(payload)
        except msgspec.DecodeError:
            return  # the transport counts frames; one of this job that is no message of ours is not worth a line
        message = envelope.message
        if isinstance(message, Go) and envelope.store:
            self._stores[message.generation] = envelope.store
        brief = getattr(message, "brief", None)
        if brief is not None:
            self._heard_numbers[who.node] = max(brief.number, self._heard_numbers.get(who.node, -1))
        self._carry_out(self._node.receive(self._now(), (who.node, envelope.incarnation), message))
        if self._closing is not None:
            self._leave_when_told()

    def _tick(self) -> None:
        if self._node is not None:
            self._carry_out(self._node.tick(self._now()))

    def _carry_out(self, effects: fx.Effects) -> None:
        node = self._node
        assert node is not None
        for effect in effects:
            match effect:
                case fx.Send(to, message):
                    self._send(to, message)
                case fx.Persist(vote):
                    assert self._votes is not None
                    self._votes.write(vote)
                case fx.Adopt(view):
                    self._adopt(view)
                case fx.StopWorkers(generation, kill):
                    self._listener.stop_here(generation, kill)
                case fx.StartWorkers(view):
                    self._listener.start_here(self._world(view))
                case fx.Connect(to):
                    self._probe(to)
                case fx.Lease(until_ns):
                    self._hold_until(until_ns)
                case fx.End(code, reason):
                    self._listener.job_over(code, reason)
        if self._timer:
            self._timer.cancel()
        self._timer = self._reactor.call_at(node.next_deadline() / 1e9, self._tick)

    def _send(self, to: str, message: Message) -> None:
        if self._transport is None or self._node is None:
            return
        store = ""
        if isinstance(message, Go):
            store = self._store(message.generation)
        payload = self._encoder.encode(_Envelope(self._node.me().incarnation, message, store))
        self._transport.send(self._aliases.get(to, to), payload)

    def _probe(self, node: str) -> None:
        """M2's plain connect, to wherever the slot is known to be: by its contact point, if no agent ever answered there."""
        transport = self._transport
        assert transport is not None

        def known(outcome: Outcome) -> None:
            if outcome in ("refused", "accepted"):
                self.notify(fx.Connected(node, "refused" if outcome == "refused" else "open"))

        contact = next((a for a in self._contacts if mesh_slots.slot_name(a.host, a.port or 0) == node), None)
        if node in self._aliases or contact is None or contact.port is None:
            transport.probe(self._aliases.get(node, node), known)
            return
        port = contact.port

        def resolved(hosts: list[str], _reason: str) -> None:
            if hosts:
                probe_tcp(self._reactor, hosts[0], port, known)
            else:
                known("refused")  # a name that does not exist: no host, no agent

        self._resolver.ask(contact.host, resolved)

    def _adopt(self, view: View) -> None:
        transport = self._transport
        assert transport is not None
        if self._join_timer:
            self._join_timer.cancel()
        members = {member.node for member in view.members} - {self.slot}
        for member in view.members:
            if member.node != self.slot:
                transport.connect(member.node, [parse_address(text) for text in member.addresses])
        for node in self._linked - members:
            transport.forget(node)
        self._linked = members
        self._view_at = time.time()
        self._listener.view_changed(view)

    # --- worlds

    def _store(self, generation: int) -> str:
        """Where rank 0's store of this generation is; chosen here, by its node, the moment the world starts."""
        if generation not in self._stores:
            config, transport = self._config, self._transport
            assert transport is not None
            host = config.local_addr or (transport.addresses[0].host if transport.addresses else rendezvous.loopback())
            # A port that an earlier world had may still be held by what is left of it elsewhere.
            used = frozenset(int(store.rpartition(":")[2]) for store in self._stores.values())
            port = (
                config.master_port
                if config.master_port and rendezvous.is_free(config.master_port)
                else rendezvous.choose_port(used)
            )
            self._stores[generation] = f"{host}:{port}"
        return self._stores[generation]

    def _world(self, view: View) -> World:
        nproc = {member.node: member.nproc for member in view.members}
        place = view.order.index(self.slot)
        host, _, port = self._store(view.generation).rpartition(":")
        return World(
            generation=view.generation,
            restart_count=view.restarts,
            first_rank=sum(nproc[node] for node in view.order[:place]),
            world_size=sum(nproc[node] for node in view.order),
            group_rank=place,
            group_world_size=len(view.order),
            master_addr=host,
            master_port=int(port),
        )

    # --- the end

    def _leave_when_told(self) -> None:
        view = self.view
        if view is None or self._closing is None:
            return
        others = [member.node for member in view.members if member.node != self.slot]
        if all(self._heard_numbers.get(node, -1) >= view.number for node in others):
            # They know; a moment so that they hear that this agent knows it too.
            self._reactor.call_later(0.1, self._close_now)

    def _close_now(self) -> None:
        then, self._closing = self._closing, None
        if then is None:
            return
        if self._timer:
            self._timer.cancel()
        if self._votes is not None:
            self._votes.write(None)
        if self._points is not None:
            self._points.close()
        if self._transport is not None:
            self._transport.close()
        self._node = None
        then()


def _read_file(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
