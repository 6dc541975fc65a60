"""Hosts, links and clocks in virtual time around the mesh's pure cores.

Theory: a heap of (time, sequence, event); true time is integer nanoseconds, each host's own clock runs at its own
rate from its own origin. Everything random comes from one generator a purpose, seeded by the schedule. Messages cross
a link with its latency, or are lost. A host handles one message at a time, each for `cost_ns`; while it is frozen
they queue. Vote files survive a crash of the agent and not the host's.

A job that is busier than any sound one could be is a livelock, and a violation.

Hosts are in `hosts`, the network in `links`, what goes wrong in `inflict`; here is what happens when, and what effects do.
Invariants: those of `invariants`, after every event; the trace digest of a schedule is always the same.
"""

import random
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush

from hyperpodrun.agent.mesh.config import MS, S
from hyperpodrun.agent.mesh.effects import (
    Adopt,
    Connect,
    Connected,
    ConnectionLost,
    Effect,
    Effects,
    End,
    Event,
    Lease,
    Permit,
    Persist,
    Send,
    StartWorkers,
    StopWorkers,
    WorkersGone,
)
from hyperpodrun.agent.mesh.inbox import NEVER
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.policy.escalation import decide
from hyperpodrun.agent.sim.faults import Schedule
from hyperpodrun.agent.sim.happenings import (
    CALL,
    CALM,
    DRAIN,
    EVENT,
    EXIT,
    FAULT,
    GONE,
    MEND,
    MESSAGE,
    POWER,
    RETURN,
    START,
    THAW,
    WAKE,
)
from hyperpodrun.agent.sim.hosts import Host
from hyperpodrun.agent.sim.inflict import calm, come_back, crash_now, inflict, mend, power_back, thaw
from hyperpodrun.agent.sim.invariants import Invariants, Violation
from hyperpodrun.agent.sim.links import Links
from hyperpodrun.agent.wire.mesh import Accept, AcceptedMsg, Ballot, Decided, Member, Message, Promise, Source, View


class World:
    """Runs one schedule. `trace`: called with (now, host, text) for everything but heartbeats, for people."""

    def __init__(
        self,
        schedule: Schedule,
        trace: Callable[[int, str, str], None] | None = None,
        cost_ns: int = 20_000,
        validate: bool = True,
    ) -> None:
        self.schedule = schedule
        self.config = schedule.config
        self.now = 0
        self.count = 0
        self.certified: set[str] = set()
        self.messages = 0
        self._trace = trace
        self._cost_ns = cost_ns
        self._validate = validate
        self._misc = random.Random(f"misc {schedule.seed}")
        self._heap: list[tuple[int, int, int, tuple[object, ...]]] = []
        self._sequence = 0
        self._digest = blake2b(digest_size=8)
        self.hosts = {name: Host(name, self._misc) for name, _ in schedule.starts_ms}
        for fault in schedule.faults:
            for name in fault.nodes:
                if name not in self.hosts:
                    self.hosts[name] = Host(name, self._misc)
        self.links = Links(schedule.seed, self._misc.choice((50_000, 200_000, 1 * MS, 5 * MS)))
        self.busiest = 2000 * len(self.hosts) + 20_000
        """More events within a second are a livelock."""
        self.falter: int | None = None
        """So many ACCEPTs and DECIDEDs are sent before their sender crashes, for `falter_ns`."""
        self.falter_ns = 0
        self.invariants = Invariants(self)
        self._rolls: dict[tuple[str, str, Ballot], set[Source]] = {}
        self._checked: set[tuple[str, str, Ballot]] = set()
        for name, at in schedule.starts_ms:
            self.push(at * MS, START, (name,))
        for index, fault in enumerate(schedule.faults):
            self.push(fault.at_ms * MS, FAULT, (index,))

    # --- time

    def push(self, at: int, kind: int, event: tuple[object, ...]) -> None:
        """Put something on the agenda."""
        self._sequence += 1
        heappush(self._heap, (at, self._sequence, kind, event))

    def run(self, until_ms: int | None = None) -> str:
        """Run to the end of the schedule, or to a time; the digest of everything so far."""
        until = (self.schedule.end_ms if until_ms is None else until_ms) * MS
        mark, before, busiest = self.now + S, self.count, self.busiest
        heap, handlers, update = self._heap, _HANDLERS, self._digest.update
        while heap and heap[0][0] <= until:
            now, _, kind, event = heappop(heap)
            self.now = now
            self.count = count = self.count + 1
            if now > mark:
                mark, before = now + S, count
            elif count - before > busiest:
                raise Violation(f"livelock: {busiest} events within a second")
            update(b"%d %d;" % (now, kind))
            handlers[kind](self, *event)
        self.now = until
        return self._digest.hexdigest()

    def say(self, host: str, text: str) -> None:
        """Into the trace."""
        self._digest.update(f"{host} {text}".encode())
        if self._trace is not None:
            self._trace(self.now, host, text)

    # --- hosts

    def start(self, name: str) -> None:
        """An agent starts in this slot, if it has power and none."""
        host = self.hosts[name]
        if host.node is not None or not host.power or host.ended is not None:
            return
        host.life += 1
        if host.disk is None:
            host.incarnation = self._misc.getrandbits(63)
        host.frozen = False
        host.inbox.clear()
        host.events.clear()
        group = f"g{int(name[1:]) // 4}"
        me = Member(name, host.incarnation, group=group)
        host.starts += 1
        seed = self._misc.getrandbits(32)
        host.node = Node(self.config, me, seed, host.clock(self.now), host.disk, host.starts == 1, decide)
        self.say(name, "starts" if host.disk is None else "starts from its vote file")
        host.wake_ns = NEVER
        self.wake(host)

    def wake(self, host: Host) -> None:
        """See to it that `tick` is called when it is due."""
        node = host.node
        if node is None:
            return
        host.due_ns = node.next_deadline()
        at = max(host.true(host.due_ns), self.now)
        if at < host.wake_ns or host.wake_ns <= self.now:
            host.wake_ns = at
            self.push(at, WAKE, (host, host.life, at))

    def _on_wake(self, host: Host, life: int, at: int) -> None:
        if host.life != life or host.wake_ns != at or host.node is None:
            return
        host.wake_ns = NEVER
        if host.frozen:
            return
        node = host.node
        local = host.clock(self.now)
        if node.next_deadline() <= local:
            self.carry_out(host, node.tick(local))
        self.wake(host)

    def agent_dies(self, host: Host) -> None:
        """The process ends; the keeper takes the workers with it."""
        host.agent_is_gone()
        if host.power:
            for other in self.hosts.values():
                if other is not host and not self.links.is_cut(host.name, other.name):
                    self.push(self.now + self.links.latency(), EVENT, (other, other.life, ConnectionLost(host.name)))

    def tell(self, host: Host, event: Event) -> None:
        """Something happens on a host."""
        if host.node is None:
            return
        if host.frozen:
            host.events.append(event)
            return
        self.carry_out(host, host.node.notify(host.clock(self.now), event))
        self.wake(host)

    def _on_event(self, host: Host, life: int, event: Event) -> None:
        if host.life == life:
            self.tell(host, event)

    # --- network

    def send(self, host: Host, to: str, message: Message) -> None:
        """On its way, or lost."""
        self.messages += 1
        target = self.hosts.get(to)
        node = host.node
        links = self.links
        if target is None or target.node is None or node is None or (links.lossy and links.loses(host.name, to)):
            return
        member = node.member
        if member is not host.member:
            host.member, host.source = member, member.source
        self._sequence += 1
        heappush(self._heap, (self.now + links.latency(), self._sequence, MESSAGE, (target, host.source, message)))

    def _on_message(self, host: Host, source: Source, message: Message) -> None:
        if host.node is None:
            return
        if host.free_ns > self.now or host.frozen:
            host.inbox.append((source, message))
            if not host.draining and not host.frozen:
                host.draining = True
                self.push(host.free_ns, DRAIN, (host, host.life))
            return
        self.handle(host, source, message)

    def handle(self, host: Host, source: Source, message: Message) -> None:
        """The agent takes a message in."""
        node = host.node
        if node is None:
            return
        now = self.now
        host.free_ns = now + self._cost_ns
        if type(message) is Promise:
            self._rolls.setdefault((host.name, message.parent, message.ballot), set()).add(source)
        effects = node.receive(host.origin_ns + now + now * host.ppm // 1_000_000, source, message)
        if effects:
            self.carry_out(host, effects)
        if node.due != host.due_ns and host.node is node and host.true(node.due) < host.wake_ns:
            self.wake(host)

    def _on_drain(self, host: Host, life: int) -> None:
        host.draining = False
        if host.life != life or host.frozen or not host.inbox:
            return
        source, message = host.inbox.popleft()
        self.handle(host, source, message)
        if host.inbox and host.node is not None:
            host.draining = True
            self.push(host.free_ns, DRAIN, (host, host.life))

    # --- effects

    def carry_out(self, host: Host, effects: Effects) -> None:
        """What an agent wants done, in order; it may die between any two."""
        node = host.node
        if node is None:
            return
        life = host.life
        for effect in effects:
            if host.crash_after is not None:
                host.crash_after -= 1
                if host.crash_after < 0:
                    crash_now(self, host)
                    return
            if type(effect) is Send:
                message = effect.message
                if type(message) in _CHECKED:
                    self._check_sent(host, node, message)
                    if host.life != life:
                        return
                self.send(host, effect.to, message)
            else:
                self._effect(host, node, effect)
                if host.life != life:
                    return
        if self._validate and effects:
            node.validate()

    def _check_sent(self, host: Host, node: Node, message: Message) -> None:
        """Does this vote, or choice, rest on what it should? And does its sender falter instead of sending it?"""
        if isinstance(message, Promise | AcceptedMsg):
            self.invariants.sent(host, message)
            return
        if isinstance(message, Accept):
            self._check_choice(host, node, message)
        if self.falter is not None:
            self.falter -= 1
            if self.falter < 0:
                self.falter = None
                host.crash_for_ns = self.falter_ns
                crash_now(self, host)

    def _effect(self, host: Host, node: Node, effect: Effect) -> None:
        match effect:
            case Persist(vote):
                host.disk = vote
                self.invariants.persisted(host, vote)
            case Adopt(view, digest, _):
                self.say(host.name, f"view {view.number} generation {view.generation} {view.mode}: {view.reason}")
                self.invariants.adopted(host, view, digest)
            case StopWorkers(generation, kill, _, in_place):
                if host.parked or (host.works is not None and host.works[1] <= generation):
                    how = "kills" if kill else "parks" if in_place else "stops"
                    self.say(host.name, f"{how} workers of generation {generation}")
                    host.stopping, host.stays = True, in_place
                    self.workers_end(host, "a newer view is decided")
                    wait = self._misc.randrange(10, 200 if kill else 400) * MS
                    if not kill:
                        wait = max(wait, host.stuck_ns - self.now)
                    self.push(self.now + wait, GONE, (host, host.life, generation, in_place))
                else:
                    self.push(self.now, EVENT, (host, host.life, WorkersGone(generation)))
            case StartWorkers(view, _):
                if host.works is not None:
                    raise Violation(f"I3 {host.name} starts workers while others are there")
                parked = host.parked
                host.has_no_workers()
                host.works = (view.chain, view.generation)
                self.say(host.name, f"starts workers of generation {view.generation}{' in place' if parked else ''}")
                self.invariants.started(host.works, host.name if parked else "")
                self.workers_began(host, view)
            case Permit(chain, generation):
                if host.works == (chain, generation):
                    host.permit = True
                    self.say(host.name, f"may write checkpoints of generation {generation}")
                    self.invariants.works_changed(host.works)
            case Connect(to):
                self._connect(host, to)
            case End(code, reason, _):
                host.ended = code
                self.say(host.name, f"ends with {code}: {reason}")
                self.push(self.now + 1 * S, EXIT, (host, host.life))
            case Lease(until_ns):
                host.lease_ns = until_ns
                self.invariants.leased(host, until_ns)

    def _check_choice(self, host: Host, node: Node, message: Accept) -> None:
        key = (host.name, message.parent, message.ballot)
        if node.view is None or key in self._checked or any(p.accepted for p in node.agreement.promises.values()):
            return
        self._checked.add(key)
        answered = self._rolls.get(key, set())
        counts = {m.node: node.alerts.count(m.node) for m in node.view.members}
        self.invariants.proposed(host, message.view, answered, counts, min(10, len(counts) - 1))

    def _connect(self, host: Host, to: str) -> None:
        target = self.hosts.get(to)
        if target is None:
            self.push(self.now + self.links.latency(), EVENT, (host, host.life, Connected(to, "refused")))
        elif target.power and not self.links.is_cut(host.name, to) and not self.links.is_cut(to, host.name):
            outcome = Connected(to, "open" if target.node is not None else "refused")
            self.push(self.now + 2 * self.links.latency(), EVENT, (host, host.life, outcome))

    def _on_gone(self, host: Host, life: int, generation: int, in_place: bool) -> None:
        if host.life != life or host.stays != in_place:
            return
        if host.stopping:
            host.has_no_workers()
            host.parked = in_place
        self.tell(host, WorkersGone(generation, in_place))

    def _on_exit(self, host: Host, life: int) -> None:
        if host.life == life and host.node is not None:
            if host.works is not None:
                host.works, host.permit = None, False
            self.agent_dies(host)

    def _on_fault(self, index: int) -> None:
        inflict(self, self.schedule.faults[index])

    def _on_call(self, what: Callable[..., None], *args: object) -> None:
        what(*args)

    # --- what a world that is more than this one may add

    def judge(self) -> None:
        """After the run: raises Violation for what can only be seen then."""

    def workers_began(self, host: Host, view: View) -> None:
        """Workers of this view's generation have just been started here."""

    def workers_end(self, host: Host, why: str) -> None:
        """This host's workers are told to end, or one of them failed."""


_CHECKED = frozenset({Promise, AcceptedMsg, Accept, Decided})
_HANDLERS: dict[int, Callable[..., None]] = {
    MESSAGE: World._on_message, WAKE: World._on_wake, DRAIN: World._on_drain, START: World.start, FAULT: World._on_fault,
    EVENT: World._on_event, GONE: World._on_gone, EXIT: World._on_exit, POWER: power_back, THAW: thaw, MEND: mend, CALM: calm,
    RETURN: come_back, CALL: World._on_call,
}  # fmt: skip
