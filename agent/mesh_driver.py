"""The mesh core joined to the network, the clock and the vote file.

Messages and the clock go into `mesh/node.py`; the effects it gives are carried out here or handed to the agent (`Listener`).

States: *looking* (see mesh_start.py), *meeting* (no view yet), *in* (has a view), *leaving* (see mesh_farewell.py), *closed*.
Invariants: effects are carried out in the order in which the core gave them, also when carrying out one makes the core give more; a
vote is on disk before anything after it is sent.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from hyperpodrun.agent import mesh_links, mesh_terms, mesh_words, vote_file
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.mesh import effects as fx
from hyperpodrun.agent.mesh.config import MeshConfig as CoreConfig
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh_farewell import Farewell
from hyperpodrun.agent.mesh_network import REPORT_BYTES, Envelope, MeshNetwork, slot_of
from hyperpodrun.agent.mesh_quorum_loss import QuorumLoss
from hyperpodrun.agent.mesh_start import MeshStart, Place
from hyperpodrun.agent.mesh_worlds import Worlds
from hyperpodrun.agent.policy import cluster
from hyperpodrun.agent.policy.escalation import decide
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.status import MeshStatus
from hyperpodrun.agent.transport.binding import BindError
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.mesh import NOWHERE, Ack, Go, Hello, Member, Message, View, Welcome

BIND_LIMIT_S = 3.0
"""So long a port that should be ours is tried again: the agent before this one may just have had it."""
SAME_DEADLINE_S = 50e-6
"""Two clocks read one after the other differ by so much."""
LOOKING_S = 1.0
"""Without a view for so long, people are told for whom this node waits."""
DIAL_S = 2.0
"""So long some of many contact points are tried before it is the turn of others."""
CONFLICT_S = 1.0
Told = cluster.TellFailed | cluster.TellFinished | cluster.TellGone | cluster.TellLeaving
SPEED = {"fast": (150, 3), "default": (250, 3), "lax": (500, 6)}
"""--failure-detector: (heartbeat in ms, heartbeats that may be missed)."""


class Listener(Protocol):
    """What the agent does about the mesh's decisions."""

    def placed(self, port: int, vote_path: str) -> None: ...
    def start_here(self, world: World) -> None: ...
    def stop_here(self, generation: int, kill: bool, in_place: bool) -> None: ...
    def job_over(self, code: int, reason: str) -> None: ...
    def view_changed(self) -> None: ...
    def others_done(self, generation: int) -> None: ...


class MeshDriver:
    """`start` begins; `notify` is for what happens to this node's workers. `start` raises OSError or ValueError with a sentence.

    `remembered_port`: see MeshStart. `hold_until` keeps the watch over the workers' lease (CLOCK_BOOTTIME in ns, 0: none). Orders of
    people are looked for in `run_dir`.
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
        run_dir: str,
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
        self._first_start = not remembered_port  # an agent before this one may have been in a world that goes on
        self._on_store = on_store
        self._start = MeshStart(reactor, config.mesh, remembered_port, watch_child, say, environ, self._placed, self._dial)
        self._quorum_loss = QuorumLoss(
            reactor, config.mesh.quorum_loss_s, run_dir, say, lambda slot: self.notify(fx.CertifyDead(slot))
        )
        self._farewell = Farewell(reactor, self._neighbours, self._tell_end)
        bind_again = remembered_port or not config.mesh.port_given
        self._bind_until_s = reactor.now_s() + (BIND_LIMIT_S if bind_again else 0.0)
        self._timer: Timer | None = None
        self._join_timer: Timer | None = None
        self._dial_timer: Timer | None = None
        self._others_done_in = -1
        self._node: Node | None = None
        self._network: MeshNetwork | None = None
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

    def tell(self, effect: Told) -> None:
        """Tell the mesh what `policy/cluster.py` says of this node's workers."""
        match effect:
            case cluster.TellFailed(_, _, detail, free) if free:
                self.notify(fx.RestartAsked(f"another program took the port of the store ({detail})"))
            case cluster.TellFailed(generation, code, detail, _, symptoms):
                self.notify(fx.WorkersFailed(generation, code, detail, symptoms))
            case cluster.TellFinished(generation):
                self.notify(fx.WorkersFinished(generation))
            case cluster.TellGone(generation, parked):
                self.notify(fx.WorkersGone(generation, parked))
            case cluster.TellLeaving():
                self.notify(fx.LeaveAsked())

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
        return self._network is not None and self._network.send_store(node, payload)

    @property
    def host(self) -> str:
        """Where other nodes reach this one."""
        return self._network.host if self._network else ""

    @property
    def view(self) -> View | None:
        """Where this agent stands."""
        return self._node.view if self._node else None

    def misses_somebody(self) -> bool:
        """Some member is suspected or silent now, or its agent died: a decision about it may be on its way."""
        node = self._node
        if node is None or node.view is None:
            return False
        silent = node.detector.down or node.detector.loud_due() is not None
        return bool(silent) or not node.alerts.is_quiet or bool(node.reports.nodes("revived"))

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
            counters=self._network.counters() if self._network else {},
        )

    def close(self, then: Callable[[], None]) -> None:
        """Leave the network once the neighbours know what this agent knows (or soon)."""
        self._closing = True
        view = self.view
        if view is None or view.mode != "closed":
            self._farewell.at_once(lambda: self._close_now(then))
            return
        theirs = (
            bool(view.exit_code)
            and view.reason.startswith("workers of ")
            and self.slot == view.order[0]
            and f" {self.slot} failed" not in view.reason
        )
        self._farewell.begin(awaits_report=theirs, on_gone=lambda: self._close_now(then))

    # --- beginning

    def _tell_looking(self) -> None:
        mesh = self._mesh
        if self.view is None and not self._closing:
            contacts = {slot_of(contact) for contact in self._start.contacts} - {self.slot}
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
        vote_path = vote_file.path_for(config.job_id, place.slot)
        votes = vote_file.VoteFile(vote_path, self._say)
        vote = votes.read()
        incarnation = vote.incarnation if vote else int.from_bytes(os.urandom(8)) >> 1
        core = self._core_config(place)
        network = MeshNetwork(
            self._reactor,
            config,
            mesh,
            self._start,
            place,
            mesh_terms.of_job(core, mesh.failure_detector),
            incarnation,
            self._say,
            self._environ,
            self._received,
            self._lost,
            self._on_store,
            self._found,
        )
        self.slot, self._votes, self._network = place.slot, votes, network
        self._worlds = Worlds(place.slot, network.host, config.master_port)
        me = Member(
            node=place.slot,
            incarnation=incarnation,
            nproc=config.nproc_per_node,
            wish=config.node_rank,
            addresses=network.addresses,
        )
        self._node = Node(core, me, int.from_bytes(os.urandom(8)), self._now(), vote, self._first_start, decide)
        if self._node.view is not None:  # the vote file's: this agent, or the one before it, died
            self._view = self._node.view
            self._adopt(self._view)
        self._listener.placed(place.port, vote_path)
        self._reactor.call_later(LOOKING_S, lambda: vote_file.remove_old(vote_path, self._say))
        self._keep_vote()
        self._dial()
        early, self._early = self._early, []
        for event in early:
            self.notify(event)
        self._tick()

    def _keep_vote(self) -> None:
        if self._votes is not None and not self._closing:
            self._votes.renew()
            self._reactor.call_later(vote_file.RENEW_S, self._keep_vote)

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
            rules=config.rules(),
            join_window_ns=int(mesh.join_window_s * 1e9),
            heartbeat_ns=heartbeat_ms * 1_000_000,
            misses=misses,
            phase_ns=self._now() - time.time_ns(),
        )

    def _dial(self) -> None:
        """Look for the others at contact points, until there is a view."""
        if self._dial_timer:
            self._dial_timer.cancel()
            self._dial_timer = None
        if self._network is not None and self.view is None and not self._closing:
            self._network.dial()
            self._dial_timer = self._reactor.call_later(DIAL_S, self._dial)

    def _found(self, who: str) -> None:
        """Somebody lives at a contact point. Of an open roster the core knows only the first one by name: introduce it to the rest."""
        node = self._node
        joining = node is not None and node.view is None and node.works.state == "none"
        if node is not None and joining and who not in node.bootstrap.slots():
            self._send(who, Hello(NOWHERE, node.me(), settled=False))

    def _never_met(self) -> None:
        if self.view is not None or self._closing:
            return
        here = {self.slot} if self.slot else set()
        if self._node is not None:
            here |= {member.node for member in self._node.bootstrap.present(self._now())}
        missing = self._network.not_here(here) if self._network else set()
        self._say(mesh_words.never_met(here, missing, self._config.min_nodes, self._mesh.join_timeout_s))
        self._listener.job_over(exit_codes.UNAVAILABLE, "")

    # --- the core

    def _now(self) -> int:
        # Leases are promises in real time: a clock that stands still while the host is suspended would stretch them.
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def _received(self, who: str, envelope: Envelope) -> None:
        node = self._node
        if node is None or self._worlds is None:
            return
        self._quorum_loss.heard(who)
        message = envelope.message
        if message is None:
            self._say(f"{who} reports: {envelope.report}")
            self._farewell.report_came()
            return
        if isinstance(message, Hello | Welcome) and node.view is None and not message.brief.chain:
            self._check_wish(message.member)
        if self._conflict:
            return
        if isinstance(message, Go) and envelope.store:
            self._worlds.told(message.generation, envelope.store)
        self._carry_out(node.receive(self._now(), (who, envelope.incarnation), message))
        brief = getattr(message, "brief", None)
        if brief is not None and node.view is not None and node.view.mode == "closed" and brief.number >= node.view.number:
            self._farewell.knows(who)

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

    def _lost(self, who: str) -> None:
        self.notify(fx.ConnectionLost(who))
        if self.view is not None and self.view.mode == "closed":
            self._farewell.knows(who)

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
        due_s = self._reactor.now_s() + (node.next_deadline() - self._now()) / 1e9
        if self._timer and self._timer.callback and abs(self._timer.when_s - due_s) < SAME_DEADLINE_S:
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
            case fx.StopWorkers(generation, kill, _, in_place):
                self._listener.stop_here(generation, kill, in_place)
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
        if self._network is None or self._node is None or self._worlds is None:
            return
        store = self._worlds.store(message.generation) if isinstance(message, Go) else ""
        self._network.send(to, Envelope(self._node.me().incarnation, message, store, report))

    def _probe(self, node: str) -> None:
        assert self._network is not None
        self._network.probe(node, lambda refused: self.notify(fx.Connected(node, "refused" if refused else "open")))

    def _adopt(self, view: View) -> None:
        network, node, worlds = self._network, self._node, self._worlds
        assert network is not None and node is not None and worlds is not None
        if self._join_timer:
            self._join_timer.cancel()
        worlds.adopt(view)
        network.settle(view.members, mesh_links.near(self.slot, view, node.rings, node.order))
        slots = {*node.bootstrap.slots(), self.slot}
        line = mesh_words.adopted(view, self._view, self.slot, self._config.min_nodes, self._config.rules().max_restarts, slots)
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
                self._dial()
                self._join_timer = self._reactor.call_later(self._mesh.join_timeout_s, self._never_met)
            return
        if view.generation != self._others_done_in and node.reports.nodes("finished") - {self.slot}:
            self._others_done_in = view.generation
            self._listener.others_done(view.generation)
        self._quorum_loss.look(node)

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
        self._quorum_loss.close()
        for timer in (self._timer, self._join_timer, self._dial_timer):
            if timer:
                timer.cancel()
        if self._votes is not None:
            self._votes.write(None)
        self._start.close()
        if self._network is not None:
            self._network.close()
        self._node = None
        then()
