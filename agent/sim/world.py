"""Hosts, links and clocks in virtual time around the mesh's pure cores.

Theory: a heap of (time, sequence, event); true time is integer nanoseconds, each host's own clock runs at its own
rate from its own origin. Everything random comes from one generator a purpose, seeded by the schedule. Messages cross
a link with its latency, or are lost. A host handles one message at a time, each for `cost_ns`; while it is frozen
they queue. Vote files survive a crash of the agent and not the host's.

A job that is busier than any sound one could be is a livelock, and a violation.

States of a host: dark (no power), empty (power, no agent), up, frozen.
Invariants: those of `invariants`, after every event; the trace digest of a schedule is always the same.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from hashlib import blake2b

from hyperpodrun.agent.mesh.config import MS, S
from hyperpodrun.agent.mesh.effects import (
    Adopt,
    CertifyDead,
    Connect,
    Connected,
    ConnectionLost,
    Effect,
    Effects,
    End,
    Event,
    Lease,
    LeaveAsked,
    Permit,
    Persist,
    RestartAsked,
    Send,
    StartWorkers,
    StopWorkers,
    WorkersFailed,
    WorkersFinished,
    WorkersGone,
)
from hyperpodrun.agent.mesh.inbox import NEVER
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.sim.faults import LEAVING_MS, Fault, Schedule
from hyperpodrun.agent.sim.invariants import Invariants, Violation, World_
from hyperpodrun.agent.wire.mesh import Accept, AcceptedMsg, Ballot, Decided, Member, Message, Promise, Source, Vote


class Host:
    """One slot."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.power = True
        self.node: Node | None = None
        self.life = 0
        self.starts = 0
        self.incarnation = 0
        self.frozen = False
        self.stuck_ns = 0
        self.lease_ns = 0
        self.disk: Vote | None = None
        self.works: World_ | None = None
        self.stopping = False
        self.permit = False
        self.inbox: deque[tuple[Source, Message]] = deque()
        self.events: deque[Event] = deque()
        self.free_ns = 0
        self.draining = False
        self.wake_ns = NEVER
        self.crash_after: int | None = None
        self.crash_for_ns = 0
        self.ended: int | None = None
        self.origin_ns = rng.randrange(10**12)
        self.ppm = rng.randint(-300, 300)

    def clock(self, now: int) -> int:
        """Local time."""
        return self.origin_ns + now + now * self.ppm // 1_000_000

    def true(self, local: int) -> int:
        """The true time at which the local clock shows at least `local`."""
        elapsed = local - self.origin_ns
        return elapsed * 1_000_000 // (1_000_000 + self.ppm) + 1


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
        self._net = random.Random(f"net {schedule.seed}")
        self._misc = random.Random(f"misc {schedule.seed}")
        self._heap: list[tuple[int, int, int, tuple[object, ...]]] = []
        self._sequence = 0
        self._digest = blake2b(digest_size=8)
        self.hosts = {name: Host(name, self._misc) for name, _ in schedule.starts_ms}
        for fault in schedule.faults:
            for name in fault.nodes:
                if name not in self.hosts:
                    self.hosts[name] = Host(name, self._misc)
        self._base_ns = self._misc.choice((50_000, 200_000, 1 * MS, 5 * MS))
        self._cuts: dict[tuple[str, str], int] = {}
        self._loss = 0
        self._delay_ns = 0
        self._falter: int | None = None
        self._falter_ns = 0
        self.invariants = Invariants(self)
        self._rolls: dict[tuple[str, str, Ballot], set[Source]] = {}
        self._checked: set[tuple[str, str, Ballot]] = set()
        for name, at in schedule.starts_ms:
            self._push(at * MS, 3, (name,))
        for index, _ in enumerate(schedule.faults):
            self._push(schedule.faults[index].at_ms * MS, 4, (index,))

    # --- time

    def _push(self, at: int, kind: int, event: tuple[object, ...]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, kind, event))

    def run(self, until_ms: int | None = None) -> str:
        """Run to the end of the schedule, or to a time; the digest of everything so far."""
        until = (self.schedule.end_ms if until_ms is None else until_ms) * MS
        mark, before, busiest = self.now + S, self.count, 2000 * len(self.hosts) + 20_000
        heap, handlers, update = self._heap, _HANDLERS, self._digest.update
        while heap and heap[0][0] <= until:
            self.now, _, kind, event = heapq.heappop(heap)
            self.count += 1
            if self.now > mark:
                mark, before = self.now + S, self.count
            elif self.count - before > busiest:
                raise Violation(f"livelock: {busiest} events within a second")
            update(b"%d %d;" % (self.now, kind))
            handlers[kind](self, *event)
        self.now = until
        return self._digest.hexdigest()

    def say(self, host: str, text: str) -> None:
        """Into the trace."""
        self._digest.update(f"{host} {text}".encode())
        if self._trace is not None:
            self._trace(self.now, host, text)

    # --- hosts

    def _start(self, name: str) -> None:
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
        host.node = Node(self.config, me, seed, host.clock(self.now), host.disk, first_start=host.starts == 1)
        self.say(name, "starts" if host.disk is None else "starts from its vote file")
        host.wake_ns = NEVER
        self._wake(host)

    def _wake(self, host: Host) -> None:
        node = host.node
        if node is None:
            return
        at = max(host.true(node.next_deadline()), self.now)
        if at < host.wake_ns or host.wake_ns <= self.now:
            host.wake_ns = at
            self._push(at, 1, (host, host.life, at))

    def _on_wake(self, host: Host, life: int, at: int) -> None:
        if host.life != life or host.wake_ns != at or host.node is None:
            return
        host.wake_ns = NEVER
        if host.frozen:
            return
        node = host.node
        local = host.clock(self.now)
        if node.next_deadline() <= local:
            self._carry_out(host, node.tick(local))
        self._wake(host)

    def _agent_dies(self, host: Host) -> None:
        """The process ends; the keeper takes the workers with it."""
        host.node = None
        host.life += 1
        host.works, host.permit, host.stopping = None, False, False
        host.inbox.clear()
        host.frozen = False
        if host.power:
            for other in self.hosts.values():
                if other is not host and not self._cut(host.name, other.name):
                    self._push(self.now + self._latency(), 5, (other, other.life, ConnectionLost(host.name)))

    def tell(self, host: Host, event: Event) -> None:
        """Something happens on a host."""
        if host.node is None:
            return
        if host.frozen:
            host.events.append(event)
            return
        self._carry_out(host, host.node.notify(host.clock(self.now), event))
        self._wake(host)

    def _on_event(self, host: Host, life: int, event: Event) -> None:
        if host.life == life:
            self.tell(host, event)

    # --- network

    def _latency(self) -> int:
        base = self._base_ns
        latency = base + self._net.randrange(base)
        return latency + self._net.randrange(self._delay_ns) if self._delay_ns else latency

    def _cut(self, a: str, b: str) -> bool:
        return bool(self._cuts) and self._cuts.get((a, b), 0) > 0

    def _send(self, host: Host, to: str, message: Message) -> None:
        self.messages += 1
        target = self.hosts.get(to)
        if target is None or target.node is None or (self._cuts and self._cut(host.name, to)):
            return
        if self._loss and self._net.randrange(100) < self._loss:
            return
        node = host.node
        if node is not None:
            self._push(self.now + self._latency(), 0, (target, node.me().source, message))

    def _on_message(self, host: Host, source: Source, message: Message) -> None:
        if host.node is None:
            return
        if host.frozen or host.free_ns > self.now:
            host.inbox.append((source, message))
            if not host.draining and not host.frozen:
                host.draining = True
                self._push(host.free_ns, 2, (host, host.life))
            return
        self._handle(host, source, message)

    def _handle(self, host: Host, source: Source, message: Message) -> None:
        node = host.node
        if node is None:
            return
        host.free_ns = self.now + self._cost_ns
        if type(message) is Promise:
            self._rolls.setdefault((host.name, message.parent, message.ballot), set()).add(source)
        effects = node.receive(host.clock(self.now), source, message)
        if effects:
            self._carry_out(host, effects)
        if host.node is not None and host.true(node.next_deadline()) < host.wake_ns:
            self._wake(host)

    def _on_drain(self, host: Host, life: int) -> None:
        host.draining = False
        if host.life != life or host.frozen or not host.inbox:
            return
        source, message = host.inbox.popleft()
        self._handle(host, source, message)
        if host.inbox and host.node is not None:
            host.draining = True
            self._push(host.free_ns, 2, (host, host.life))

    # --- effects

    def _carry_out(self, host: Host, effects: Effects) -> None:
        node = host.node
        if node is None:
            return
        life = host.life
        for effect in effects:
            if host.crash_after is not None:
                host.crash_after -= 1
                if host.crash_after < 0:
                    self._crash_now(host)
                    return
            self._effect(host, node, effect)
            if host.life != life:
                return
        if self._validate and effects:
            node.validate()

    def _effect(self, host: Host, node: Node, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                if type(message) is Promise or type(message) is AcceptedMsg:
                    self.invariants.sent(host, message)
                elif type(message) is Accept:
                    self._check_choice(host, node, message)
                if self._falter is not None and (type(message) is Accept or type(message) is Decided):
                    self._falter -= 1
                    if self._falter < 0:
                        self._falter = None
                        host.crash_for_ns = self._falter_ns
                        self._crash_now(host)
                        return
                self._send(host, to, message)
            case Persist(vote):
                host.disk = vote
                self.invariants.persisted(host, vote)
            case Adopt(view, digest, _):
                self.say(host.name, f"view {view.number} generation {view.generation} {view.mode}: {view.reason}")
                self.invariants.adopted(host, view, digest)
            case StopWorkers(generation, kill, _):
                if host.works is not None and host.works[1] <= generation:
                    self.say(host.name, f"{'kills' if kill else 'stops'} workers of generation {generation}")
                    host.stopping = True
                    wait = self._misc.randrange(10, 200 if kill else 400) * MS
                    if not kill:
                        wait = max(wait, host.stuck_ns - self.now)
                    self._push(self.now + wait, 6, (host, host.life, generation))
                else:
                    self._push(self.now, 5, (host, host.life, WorkersGone(generation)))
            case StartWorkers(view, _):
                if host.works is not None:
                    raise Violation(f"I3 {host.name} starts workers while others are there")
                host.works, host.permit, host.stopping = (view.chain, view.generation), False, False
                self.say(host.name, f"starts workers of generation {view.generation}")
                self.invariants.started(host.works)
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
                self._push(self.now + 1 * S, 7, (host, host.life))
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
            self._push(self.now + self._latency(), 5, (host, host.life, Connected(to, "refused")))
        elif target.power and not self._cut(host.name, to) and not self._cut(to, host.name):
            outcome = Connected(to, "open" if target.node is not None else "refused")
            self._push(self.now + 2 * self._latency(), 5, (host, host.life, outcome))

    def _on_gone(self, host: Host, life: int, generation: int) -> None:
        if host.life != life:
            return
        if host.works is not None and host.stopping:
            host.works, host.permit, host.stopping = None, False, False
        self.tell(host, WorkersGone(generation))

    def _on_exit(self, host: Host, life: int) -> None:
        if host.life == life and host.node is not None:
            if host.works is not None:
                host.works, host.permit = None, False
            self._agent_dies(host)

    # --- faults

    def _on_fault(self, index: int) -> None:
        fault = self.schedule.faults[index]
        span = f" for {fault.for_ms} ms" if fault.for_ms else ""
        value = f" {fault.value}" if fault.value else ""
        self.say("", f"fault: {fault.kind} {' '.join(fault.nodes)}{value}{span}")
        _FAULTS[fault.kind](self, fault)

    def _later(self, fault: Fault, what: int, event: tuple[object, ...]) -> None:
        if fault.for_ms:
            self._push(self.now + fault.for_ms * MS, what, event)

    def _crash(self, fault: Fault) -> None:
        for name in fault.nodes:
            host = self.hosts[name]
            if host.node is None:
                continue
            host.crash_after, host.crash_for_ns = fault.value, fault.for_ms * MS
            if not fault.value:
                self._crash_now(host)

    def _crash_now(self, host: Host) -> None:
        host.crash_after = None
        self.say(host.name, "crashes")
        self._agent_dies(host)
        self._push(self.now + host.crash_for_ns, 3, (host.name,))

    def _power(self, fault: Fault) -> None:
        for name in fault.nodes:
            host = self.hosts[name]
            host.power = False
            host.disk = None
            host.crash_after = None
            host.node = None
            host.life += 1
            host.works, host.permit, host.stopping = None, False, False
            host.inbox.clear()
            host.frozen = False
            self._later(fault, 8, (host,))

    def _on_power(self, host: Host) -> None:
        if not host.power:
            host.power = True
            self._start(host.name)

    def _freeze(self, fault: Fault) -> None:
        for name in fault.nodes:
            host = self.hosts[name]
            if host.node is not None and not host.frozen:
                host.frozen = True
                self._later(fault, 9, (host, host.life))

    def _on_thaw(self, host: Host, life: int) -> None:
        if host.life != life or host.node is None:
            return
        host.frozen = False
        if host.works is not None and host.clock(self.now) >= host.lease_ns:
            host.works, host.permit, host.stopping = None, False, False  # the watchdog was first
        node = host.node
        self._carry_out(host, node.tick(host.clock(self.now)))
        while host.events and host.node is not None:
            self.tell(host, host.events.popleft())
        if host.inbox and not host.draining:
            host.draining = True
            self._push(self.now, 2, (host, host.life))
        host.wake_ns = NEVER
        self._wake(host)

    def _sever(self, pairs: list[tuple[str, str]], fault: Fault) -> None:
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self._later(fault, 10, (pairs,))

    def _on_mend(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                del self._cuts[pair]

    def _cut_link(self, fault: Fault) -> None:
        self._sever([(fault.nodes[0], fault.nodes[1])], fault)

    def _partition(self, fault: Fault) -> None:
        side = set(fault.nodes)
        self._sever([(a, b) for a in self.hosts for b in self.hosts if (a in side) != (b in side)], fault)

    def _weather(self, fault: Fault) -> None:
        if fault.kind == "loss":
            self._loss = fault.value
        else:
            self._delay_ns = fault.value * MS
        self._later(fault, 11, (fault.kind,))

    def _on_calm(self, kind: str) -> None:
        if kind == "loss":
            self._loss = 0
        elif kind == "falter":
            self._falter = None
        else:
            self._delay_ns = 0

    def _fail(self, fault: Fault) -> None:
        for name in fault.nodes:
            host = self.hosts[name]
            if host.works is not None and not host.stopping:
                self.tell(host, WorkersFailed(host.works[1], 1, "exit code 1"))

    def _finish(self, fault: Fault) -> None:
        for host in self.hosts.values():
            if host.works is not None and not host.stopping:
                self.tell(host, WorkersFinished(host.works[1]))

    def _leave(self, fault: Fault) -> None:
        for name in fault.nodes:
            self.tell(self.hosts[name], LeaveAsked())
            if fault.for_ms:
                self._push(self.now + (fault.for_ms + LEAVING_MS) * MS, 12, (self.hosts[name],))

    def _on_return(self, host: Host) -> None:
        if host.ended is not None and host.node is None:
            host.ended = None
            self._start(host.name)

    def _join(self, fault: Fault) -> None:
        for name in fault.nodes:
            self._start(name)

    def _stumble(self, fault: Fault) -> None:
        self._falter, self._falter_ns = fault.value, fault.for_ms * MS
        self._later(fault, 11, (fault.kind,))

    def _jam(self, fault: Fault) -> None:
        for name in fault.nodes:
            self.hosts[name].stuck_ns = self.now + fault.for_ms * MS

    def _certify(self, fault: Fault) -> None:
        told, *dead = fault.nodes
        for name in dead:
            if self.hosts[name].power and not fault.value:
                raise ValueError(f"{name} is certified dead and is not")
            self.certified.add(name)
            self.tell(self.hosts[told], CertifyDead(name))

    def _restart(self, fault: Fault) -> None:
        for name in fault.nodes:
            self.tell(self.hosts[name], RestartAsked("asked for"))


_HANDLERS: dict[int, Callable[..., None]] = {
    0: World._on_message, 1: World._on_wake, 2: World._on_drain, 3: World._start, 4: World._on_fault, 5: World._on_event,
    6: World._on_gone, 7: World._on_exit, 8: World._on_power, 9: World._on_thaw, 10: World._on_mend, 11: World._on_calm,
    12: World._on_return,
}  # fmt: skip

_FAULTS: dict[str, Callable[[World, Fault], None]] = {
    "crash": World._crash, "power": World._power, "freeze": World._freeze, "cut": World._cut_link, "isolate": World._partition,
    "partition": World._partition, "loss": World._weather, "delay": World._weather, "fail": World._fail, "finish": World._finish,
    "leave": World._leave, "join": World._join, "restart": World._restart,
    "falter": World._stumble, "certify": World._certify, "stuck": World._jam,
}  # fmt: skip
