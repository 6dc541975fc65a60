"""A simulated world whose workers use the store (MESH S1-S6): the key spaces of all nodes over its network and its faults.

Theory: each node that starts workers begins the key space of their generation, as the agent does (`agent/store.py`): frames of a
generation that has not begun here yet are kept, those of others are dropped. Frames are lost and overtake each other like all
messages. The generation ends here when its workers are told to end, when one of them failed, and with the agent.

Invariants, after every event: those of the cores (`validate`); what was asked in a generation has its answer once that has ended
(S5). At the end: the history of every key has an order (S3), and nothing that could be answered is left waiting (S4).
"""

import random
from collections.abc import Callable

from hyperpodrun.agent.mesh.config import MS, S
from hyperpodrun.agent.mesh.inbox import NEVER
from hyperpodrun.agent.sim.clients import Habits, History, Rank
from hyperpodrun.agent.sim.faults import Schedule
from hyperpodrun.agent.sim.happenings import CALL
from hyperpodrun.agent.sim.hosts import Generation, Host
from hyperpodrun.agent.sim.invariants import Violation
from hyperpodrun.agent.sim.witness import WatchedSpace
from hyperpodrun.agent.sim.world import World
from hyperpodrun.agent.wire.mesh import View
from hyperpodrun.agent.wire.store import Frame

LIMIT_BYTES = 1 << 24
KEPT_FRAMES = 256
CALL_EVENTS = 12
"""More than a call takes: asked, sent, taken in, answered, and twice that while one frame after another is lost."""


class Desk:
    """A node's part of one generation's store, for as long as its agent lives."""

    def __init__(self, host: Host, world: Generation, space: WatchedSpace) -> None:
        self.life = host.life
        self.world = world
        self.space = space
        self.ranks: list[Rank] = []
        self.flushing = False
        self.due_ns = NEVER
        """When `_due` is called next, in true time."""


class StoreWorld(World):
    """Runs one schedule; `judge` after it."""

    def __init__(self, schedule: Schedule, trace: Callable[[int, str, str], None] | None = None) -> None:
        super().__init__(schedule, trace)
        self.history = History()
        self._ask = random.Random(f"store {schedule.seed}")
        self._pause_ns = self._ask.choice((4, 25, 80)) * MS
        self._ranks = self._ask.choice((1, 2, 4))
        self._keys = self._ask.choice((1, 3, 6))
        calls_per_s = len(self.hosts) * self._ranks * 2 * S // self._pause_ns  # a client thinks for half its pause, on average
        self.busiest += calls_per_s * CALL_EVENTS
        self._desks: dict[str, Desk] = {}
        self._kept: dict[str, list[tuple[str, Frame]]] = {}
        self._quiet_ns = (schedule.end_ms - 2000) * MS
        """From then on nobody asks any more: what can be answered is answered by the end."""

    # --- generations

    def workers_began(self, host: Host, view: View) -> None:
        """The agent begins the key space of the generation."""
        world = (view.chain, view.generation)
        name = host.name

        def wake() -> None:
            if not desk.flushing:
                desk.flushing = True
                self.push(self.now, CALL, (self._flush, host, desk))

        space = WatchedSpace(view.generation, name, view.order, host.life, LIMIT_BYTES, wake)
        space.watch(LIMIT_BYTES, self.history.did)
        desk = self._desks[name] = Desk(host, world, space)

        def later(delay_ns: int, what: Callable[[], None]) -> None:
            self.push(self.now + delay_ns, CALL, (self._act, host, desk, what))

        def alive() -> bool | None:
            if host.life != desk.life or host.works != world or self.now > self._quiet_ns:
                return False
            return None if host.frozen else True

        habits = Habits(self._pause_ns, self._keys)
        desk.ranks = [Rank(n, space, world, self.history, self._ask, habits, later, alive) for n in range(self._ranks)]
        for source, frame in self._kept.pop(name, []):
            self._take(host, source, frame)

    def workers_end(self, host: Host, why: str) -> None:
        """S5: whoever waits is told at once."""
        desk = self._desk(host)
        if desk is None or desk.space.ended:
            return
        desk.space.end(why)
        for rank in desk.ranks:
            if rank.waits_for is not None:
                raise Violation(f"S5 {host.name} still waits for {rank.waits_for[1]} in a generation that has ended")

    def _desk(self, host: Host) -> Desk | None:
        desk = self._desks.get(host.name)
        return desk if desk is not None and desk.life == host.life else None

    def _act(self, host: Host, desk: Desk, what: Callable[[], None]) -> None:
        if host.life == desk.life:
            what()
            self._check(desk)

    # --- frames

    def _flush(self, host: Host, desk: Desk) -> None:
        """Something may have to be sent."""
        desk.flushing = False
        if host.life != desk.life or desk is not self._desks[host.name] or desk.space.ended:
            return
        if host.frozen:
            desk.flushing = True
            self.push(self.now + 20 * MS, CALL, (self._flush, host, desk))
            return
        local = host.clock(self.now)
        desk.space.tick(local)
        for to, frame in desk.space.frames(local):
            self.messages += 1
            target = self.hosts[to]
            if target.node is not None and not self.links.loses(host.name, to):
                self.push(self.now + self.links.latency(), CALL, (self._arrives, target, target.life, host.name, frame))
        due = desk.space.next_deadline_ns()
        if due is not None:
            at = max(host.true(due), self.now + 1)
            if at < desk.due_ns:
                desk.due_ns = at
                self.push(at, CALL, (self._due, host, desk, at))

    def _due(self, host: Host, desk: Desk, at: int) -> None:
        if at != desk.due_ns:
            return
        desk.due_ns = NEVER
        if not desk.flushing:
            self._flush(host, desk)

    def _arrives(self, host: Host, life: int, source: str, frame: Frame) -> None:
        if host.life != life or host.node is None:
            return
        if host.frozen:
            self.push(self.now + 20 * MS, CALL, (self._arrives, host, life, source, frame))
            return
        self._take(host, source, frame)

    def _take(self, host: Host, source: str, frame: Frame) -> None:
        desk = self._desk(host)
        if desk is not None and not desk.space.ended and frame.generation == desk.space.generation:
            desk.space.receive(source, frame, host.clock(self.now))
            self._check(desk)
            if not desk.flushing:
                desk.flushing = True
                self.push(self.now, CALL, (self._flush, host, desk))
        elif desk is None or frame.generation > desk.space.generation:
            kept = self._kept.setdefault(host.name, [])
            if len(kept) >= KEPT_FRAMES:
                kept.clear()  # what is lost here is sent again
            kept.append((source, frame))

    # --- judgement

    def _check(self, desk: Desk) -> None:
        try:
            desk.space.validate()
        except ValueError as error:
            raise Violation(f"S4 {error}") from error

    def judge(self) -> None:
        """Every key's history, and whether anybody was forgotten."""
        if self.now >= self._quiet_ns + 2 * S and self.schedule.healed_ms() * MS < self._quiet_ns:
            self._check_nothing_waits()
        self.history.judge()

    def _check_nothing_waits(self) -> None:
        """Where a world runs whole, only what waits for a key or an item may wait."""
        for host in self.hosts.values():
            desk = self._desk(host)
            if desk is None or desk.space.ended or host.works != desk.world or host.stopping or host.frozen:
                continue
            for rank in desk.ranks:
                if rank.waits_for is None:
                    continue
                asked = rank.waits_for[1]
                owner = self.hosts[desk.space.owner(asked.key)]
                there = self._desk(owner)
                if there is None or there.world != desk.world or there.space.ended or owner.frozen:
                    continue
                if not getattr(asked, "block", False) and type(asked).__name__ != "Watch":
                    raise Violation(f"S4 {host.name} was never answered: {asked}")
