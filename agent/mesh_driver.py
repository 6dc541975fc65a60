"""The mesh core joined to the network, the clock and the vote file.

Messages and the clock go into `mesh/node.py`; the effects it gives are carried out here or handed to the agent (`Listener`). What
travels is the core's message with the sender's incarnation, which may change while the connection stays, a failed rank's report for
the node of rank 0, or, told apart by its first byte, a frame of the store (store.py).

States: *looking* (see mesh_start.py), *meeting* (no view yet), *in* (has a view), *leaving* (see mesh_farewell.py), *closed*.
Invariants: effects are carried out in the order in which the core gave them, also when carrying out one makes the core give more; a
vote is on disk before anything after it is sent.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from hyperpodrun.agent import mesh_slots, mesh_words, vote_file
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.mesh import effects as fx
from hyperpodrun.agent.mesh.config import MeshConfig as CoreConfig
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh_farewell import Farewell
from hyperpodrun.agent.mesh_start import MeshStart, Place
from hyperpodrun.agent.mesh_worlds import Worlds
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.status import MeshStatus
from hyperpodrun.agent.store import MARK
from hyperpodrun.agent.transport.addresses import Address, parse_address
from hyperpodrun.agent.transport.binding import BindError
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.inbox import Link
from hyperpodrun.agent.transport.probe import Outcome, probe_tcp
from hyperpodrun.agent.transport.transport import Transport
from hyperpodrun.agent.wire import exit_codes, names
from hyperpodrun.agent.wire.mesh import NOWHERE, Ack, Go, Hello, Member, Message, View, Welcome
from hyperpodrun.agent.workers import rendezvous

VERSION = 1
BIND_LIMIT_S = 3.0
"""So long a port that should be ours is tried again: the agent before this one may just have had it."""
LOOKING_S = 1.0
"""Without a view for so long, people are told for whom this node waits."""
NO_MAJORITY_S = 1.0
CONFLICT_S = 1.0
REPORT_BYTES = 65536
SPEED = {"fast": (150, 3), "default": (250, 3), "lax": (500, 6)}
"""--failure-detector: (heartbeat in ms, heartbeats that may be missed)."""


class Listener(Protocol):
    """What the agent does about the mesh's decisions."""

    def placed(self, place: Place) -> None: ...
    def start_here(self, world: World) -> None: ...
    def stop_here(self, generation: int, kill: bool) -> None: ...
    def job_over(self, code: int, reason: str) -> None: ...
    def view_changed(self) -> None: ...


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    incarnation: int
    message: Message | None
    store: str = ""
    """With Go: where rank 0 of the new world opens its store, host:port."""
    report: str = ""
    """Without a message: what is known of a failed rank, for the node of rank 0."""


class MeshDriver:
    """`start` begins; `notify` is for what happens to this node's workers. `start` raises OSError or ValueError with a sentence.

    `remembered_port`: see MeshStart. `hold_until` keeps the watch over the workers' lease (monotonic ns, 0: none).
    `on_store(node, payload)` gets what another agent's store says.
    """

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        listener: Listener,
        watch_child: Callable[[int, Callable[[int], None]], None],
        say: Callable[[str], None],
        environ: Mapping[str, str],
        hold_until: Callable[[int], None],
        on_store: Callable[[str, bytes], None],
        remembered_port: int = 0,
    ) -> None:
        assert config.mesh is not None
        self._reactor = reactor
        self._config = config
        self._mesh = config.mesh
        self._listener = listener
        self._say = say
        self._environ = environ
        self._hold_until = hold_until
        self._on_store = on_store
        self._start = MeshStart(reactor, config.mesh, remembered_port, watch_child, say, environ, self._placed, self._dial)
        self._farewell = Farewell(reactor, self._neighbours, self._tell_end)
        bind_again = remembered_port or not config.mesh.port_given
        self._bind_until_s = reactor.now_s() + (BIND_LIMIT_S if bind_again else 0.0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Envelope)
        self._aliases: dict[str, str] = {}
        self._linked: set[str] = set()
        self._timer: Timer | None = None
        self._join_timer: Timer | None = None
        self._silent_timer: Timer | None = None
        self._silent: frozenset[str] = frozenset()
        self._node: Node | None = None
        self._transport: Transport | None = None
        self._worlds: Worlds | None = None
        self._votes: vote_file.VoteFile | None = None
        self._view: View | None = None
        self._view_at = 0.0
        self._early: list[fx.Event] = []
        self._effects: deque[fx.Effect] = deque()
        self._busy = False
        self._conflict = False
        self._closing = False
        self.slot = ""

    # --- for the agent

    def start(self) -> None:
        """Read the contact points and begin to look for the others."""
        self._join_timer = self._reactor.call_later(self._mesh.join_timeout_s, self._never_met)
        self._reactor.call_later(LOOKING_S, self._tell_looking)
        self._start.start()

    def notify(self, event: fx.Event) -> None:
        """Tell the mesh what happened here."""
        if isinstance(event, fx.WorkersGone):
            self._hold_until(0)
        if self._node is None:
            self._early.append(event)
        else:
            self._carry_out(self._node.notify(self._now(), event))

    def ship(self, generation: int, text: str) -> None:
        """What is known of a rank of this generation that failed here, for the console of rank 0's node."""
        leader = self._worlds.leader(generation) if self._worlds else ""
        if leader and leader != self.slot:
            raw = text.encode(errors="replace")
            if len(raw) > REPORT_BYTES:
                text = raw[:REPORT_BYTES].decode(errors="ignore") + "\n(cut here)"
            self._send(leader, None, report=text)

    def send(self, node: str, payload: bytes) -> bool:
        """Send another node's agent something of its store; it may be lost."""
        return self._transport is not None and self._transport.send(self._aliases.get(node, node), payload)

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
        """Leave the network once the neighbours know what this agent knows (or soon)."""
        self._closing = True
        view = self.view
        if view is None or view.mode != "closed":
            self._farewell.at_once(lambda: self._close_now(then))
            return
        theirs = bool(view.exit_code) and self.slot == view.order[0] and f" {self.slot} failed" not in view.reason
        self._farewell.begin(awaits_report=theirs, on_gone=lambda: self._close_now(then))

    # --- beginning

    def _tell_looking(self) -> None:
        mesh = self._mesh
        if self.view is None and not self._closing:
            contacts = {mesh_slots.slot_name(a.host, a.port or 0) for a in self._start.contacts} - {self.slot}
            slots = self._config.max_nodes + mesh.spares
            self._say(mesh_words.looking(contacts, self._config.min_nodes, slots, mesh.join_timeout_s))

    def _placed(self, place: Place) -> None:
        try:
            self._open(place)
        except (OSError, ValueError, NotImplementedError) as error:
            if isinstance(error, BindError) and self._reactor.now_s() < self._bind_until_s:
                self._reactor.call_later(0.1, lambda: self._placed(self._start.place()))
                return
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
            self._say(f"{reason}; the job was not started")
            self._reactor.call_later(0, lambda: self._listener.job_over(exit_codes.CONFIG, ""))

    def _open(self, place: Place) -> None:
        config, mesh = self._config, self._mesh
        votes = vote_file.VoteFile(vote_file.path_for(config.job_id, place.slot), self._say)
        vote = votes.read()
        incarnation = vote.incarnation if vote else int.from_bytes(os.urandom(8)) >> 1
        own = (config.local_addr,) if config.local_addr else ()
        transport = Transport(
            self._reactor,
            identity=Identity(place.slot, incarnation),
            label=job_label(config.job_id),
            version=VERSION,
            on_message=self._received,
            on_lost=self._lost,
            on_found=self._found,
            say=self._say,
            bind_hosts=own,
            advertise=own,
            first_port=place.port,
            secret=self._secret(),
            insecure=mesh.insecure,
        )
        self.slot, self._votes, self._transport = place.slot, votes, transport
        host = transport.addresses[0].host if transport.addresses else rendezvous.loopback()
        self._worlds = Worlds(place.slot, config.local_addr or host, config.master_port)
        me = Member(
            node=place.slot,
            incarnation=incarnation,
            nproc=config.nproc_per_node,
            wish=config.node_rank,
            addresses=tuple(str(address) for address in transport.addresses),
        )
        self._node = Node(self._core_config(place), me, int.from_bytes(os.urandom(8)), self._now(), vote)
        if self._node.view is not None:  # the vote file's: this agent, or the one before it, died
            self._view = self._node.view
            self._adopt(self._view)
        self._listener.placed(place)
        self._dial()
        early, self._early = self._early, []
        for event in early:
            self.notify(event)
        self._tick()

    def _core_config(self, place: Place) -> CoreConfig:
        config, mesh = self._config, self._mesh
        slots = config.max_nodes + mesh.spares
        heartbeat_ms, misses = SPEED[mesh.failure_detector]
        return CoreConfig(
            slots=slots,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            roster=place.named if len(place.named) == slots else (),
            first_contact=place.named[0] if place.named else place.slot,
            elastic_now=mesh.elastic_join_now,
            max_restarts=config.max_restarts,
            join_window_ns=int(mesh.join_window_s * 1e9),
            heartbeat_ns=heartbeat_ms * 1_000_000,
            misses=misses,
        )

    def _secret(self) -> bytes | None:
        if self._mesh.secret_file:
            with open(self._mesh.secret_file, "rb") as file:
                return file.read()
        text = self._environ.get(names.JOB_SECRET)
        return text.encode() if text else None

    def _dial(self) -> None:
        if self._transport is not None:
            for address in self._start.contacts:
                if mesh_slots.slot_name(address.host, address.port or 0) != self.slot:
                    self._transport.find(address)

    def _found(self, address: Address, who: Identity | None) -> None:
        if who is not None:
            self._aliases[mesh_slots.slot_name(address.host, address.port or 0)] = who.node

    def _never_met(self) -> None:
        if self.view is not None or self._closing:
            return
        here = {self.slot} if self.slot else set()
        if self._node is not None:
            here |= {member.node for member in self._node.bootstrap.present(self._now())}
        contacts = {mesh_slots.slot_name(a.host, a.port or 0) for a in self._start.contacts}
        missing = {name for name in contacts if self._aliases.get(name, name) not in here}
        self._say(mesh_words.never_met(here, missing, self._config.min_nodes, self._mesh.join_timeout_s))
        self._listener.job_over(exit_codes.UNAVAILABLE, "")

    # --- the core

    def _now(self) -> int:
        return time.monotonic_ns()

    def _received(self, who: Identity, payload: bytes, _link: Link) -> None:
        node = self._node
        if node is None or self._worlds is None:
            return
        if payload[:1] == MARK:
            self._on_store(who.node, payload)
            return
        try:
            envelope = self._decoder.decode(payload)
        except msgspec.DecodeError:
            return  # the transport counts frames; one of this job that is no message of ours is not worth a line
        message = envelope.message
        if message is None:
            self._say(f"{who.node} reports: {envelope.report}")
            self._farewell.report_came()
            return
        if isinstance(message, Hello | Welcome) and node.view is None and not message.brief.chain:
            self._check_wish(message.member)
        if self._conflict:
            return
        if isinstance(message, Go) and envelope.store:
            self._worlds.told(message.generation, envelope.store)
        self._carry_out(node.receive(self._now(), (who.node, envelope.incarnation), message))
        brief = getattr(message, "brief", None)
        if brief is not None and node.view is not None and node.view.mode == "closed" and brief.number >= node.view.number:
            self._farewell.knows(who.node)

    def _check_wish(self, other: Member) -> None:
        """Two nodes that insist on one rank cannot both be served, and nobody but a person knows who is right."""
        node = self._node
        if self._conflict or node is None or not mesh_words.insist_on_one_rank(node.me(), other):
            return
        self._conflict = True
        self._say(mesh_words.same_wish(self.slot, other.node, other.wish or 0))
        hello = Hello(NOWHERE, node.me(), settled=False)
        for turn in range(5):  # the other one may not have heard of this one yet
            self._reactor.call_later(turn * CONFLICT_S / 5, lambda: self._send(other.node, hello))
        self._reactor.call_later(CONFLICT_S, lambda: self._listener.job_over(exit_codes.CONFIG, ""))

    def _lost(self, who: Identity) -> None:
        self.notify(fx.ConnectionLost(who.node))
        if self.view is not None and self.view.mode == "closed":
            self._farewell.knows(who.node)

    def _tick(self) -> None:
        self._timer = None
        if self._node is not None and not self._conflict:
            self._carry_out(self._node.tick(self._now()))

    def _carry_out(self, effects: fx.Effects) -> None:
        """In the order given; those that follow from what is carried out here come after."""
        self._effects += effects
        if self._busy:
            return
        self._busy = True
        try:
            while self._effects and self._node is not None:
                self._carry_out_one(self._effects.popleft())
        finally:
            self._busy = False
        node = self._node
        if node is None:
            return
        self._look_around(node)
        due_s = node.next_deadline() / 1e9
        if self._timer and self._timer.when_s == due_s:
            return  # as after most heartbeats
        if self._timer:
            self._timer.cancel()
        self._timer = self._reactor.call_at(due_s, self._tick)

    def _carry_out_one(self, effect: fx.Effect) -> None:
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
                assert self._worlds is not None
                self._listener.start_here(self._worlds.world(view))
            case fx.Connect(to):
                self._probe(to)
            case fx.Lease(until_ns):
                self._hold_until(until_ns)
            case fx.End(code, reason):
                self._listener.job_over(code, reason)

    def _send(self, to: str, message: Message | None, report: str = "") -> None:
        if self._transport is None or self._node is None or self._worlds is None:
            return
        store = self._worlds.store(message.generation) if isinstance(message, Go) else ""
        payload = self._encoder.encode(_Envelope(self._node.me().incarnation, message, store, report))
        self._transport.send(self._aliases.get(to, to), payload)

    def _probe(self, node: str) -> None:
        """M2's plain connect, to wherever the slot is known to be: by its contact point, if no agent ever answered there."""
        transport = self._transport
        assert transport is not None

        def known(outcome: Outcome) -> None:
            if outcome in ("refused", "accepted"):
                self.notify(fx.Connected(node, "refused" if outcome == "refused" else "open"))

        contact = self._start.address_of(node)
        if node in self._aliases or contact is None or contact.port is None:
            transport.probe(self._aliases.get(node, node), known)
            return
        port = contact.port

        def resolved(hosts: list[str], _reason: str) -> None:
            if hosts:
                probe_tcp(self._reactor, hosts[0], port, known)
            else:
                known("refused")  # a name that does not exist: no host, no agent

        self._start.resolver.ask(contact.host, resolved)

    def _adopt(self, view: View) -> None:
        transport, node, worlds = self._transport, self._node, self._worlds
        assert transport is not None and node is not None and worlds is not None
        if self._join_timer:
            self._join_timer.cancel()
        worlds.adopt(view)
        members = {member.node for member in view.members} - {self.slot}
        for member in view.members:
            if member.node != self.slot:
                transport.connect(member.node, [parse_address(text) for text in member.addresses])
        for gone in self._linked - members:
            transport.forget(gone)
        self._linked = members
        slots = {*node.bootstrap.slots(), self.slot}
        line = mesh_words.adopted(view, self._view, self.slot, self._config.min_nodes, self._config.max_restarts, slots)
        self._view, self._view_at = view, time.time()
        if line:
            self._say(line)
        if view.mode == "closed":
            self._farewell.tell_all()
        self._listener.view_changed()

    def _look_around(self, node: Node) -> None:
        """Things that no effect tells of: this agent was dropped; too few others answer."""
        view = node.view
        if view is None:
            if self._view is not None and not node.ended:
                self._view = None
                self._say(mesh_words.dropped())
                self._join_timer = self._reactor.call_later(self._mesh.join_timeout_s, self._never_met)
            return
        silent = frozenset((*node.detector.down, *node.alerts.suspects()))
        if view.mode == "closed" or not silent or node.is_quorum([m.node for m in view.members if m.node not in silent], ()):
            if self._silent:
                self._say("a majority of the nodes answers again")
            if self._silent_timer:
                self._silent_timer.cancel()
            self._silent, self._silent_timer = frozenset(), None
        elif not self._silent and self._silent_timer is None:
            self._silent_timer = self._reactor.call_later(NO_MAJORITY_S, self._tell_silent)

    def _tell_silent(self) -> None:
        self._silent_timer = None
        node = self._node
        if node is not None and node.view is not None and not self._closing:
            self._silent = frozenset((*node.detector.down, *node.alerts.suspects()))
            self._say(mesh_words.no_majority(node.view, self._silent, node.config.lease_ns / 1e9))

    # --- the end

    def _neighbours(self) -> set[str]:
        node = self._node
        if node is None:
            return set()
        return {*node.rings.observers.get(self.slot, ()), *node.rings.subjects.get(self.slot, ())} - {self.slot}

    def _tell_end(self, neighbour: str) -> None:
        if self._node is not None:
            self._send(neighbour, Ack(self._node.brief()))

    def _close_now(self, then: Callable[[], None]) -> None:
        for timer in (self._timer, self._join_timer, self._silent_timer):
            if timer:
                timer.cancel()
        if self._votes is not None:
            self._votes.write(None)
        self._start.close()
        if self._transport is not None:
            self._transport.close()
        self._node = None
        then()
