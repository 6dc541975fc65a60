"""The mesh's cores at sizes that no one machine holds: loss of a node, loss of a third, and idling, in virtual time.

The nodes begin as members of a running world (how it was formed is not measured here), idle for a wave of the leases; one host
goes dark without a word, later a third of the rest at once.
Times are virtual, from the loss or from the first accusation (detection) until the view without the lost is decided; a node
handles one message at a time, each for `received_us`. "Core" is this machine's CPU time in the cores (and in the simulator's
handling of what they answer) at the node that works most, from the loss until the decision: what the virtual clock does
not see. Added to the time it is an upper bound, for much of it is done while the node waits.
"""

import functools
import random
import time
from collections import Counter

from side_by_side import BenchmarkError

from hyperpodrun.agent.mesh import standing
from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.effects import Effect, Persist
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh.view import digest_of
from hyperpodrun.agent.sim.faults import Fault, Schedule
from hyperpodrun.agent.sim.hosts import Host
from hyperpodrun.agent.sim.world import World
from hyperpodrun.agent.wire.mesh import ZERO, Accepted, Go, Member, Message, Source, View, Vote

SETTLED_MS = 3000
"""From then on the mesh is expected to idle: everyone's lease is granted in turn."""
ONE_LOST_MS = SETTLED_MS + 3000
THIRD_LOST_MS = ONE_LOST_MS + 3500
END_MS = THIRD_LOST_MS + 4000


class Counted(World):
    """Counts messages and CPU time by node."""

    def __init__(self, schedule: Schedule, received_us: float) -> None:
        super().__init__(schedule, cost_ns=int(1000 * received_us), validate=False)
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.core_s: Counter[str] = Counter()

    def send(self, host: Host, to: str, message: Message) -> None:
        self.sent[host.name] += 1
        super().send(host, to, message)

    def handle(self, host: Host, source: Source, message: Message) -> None:
        began_s = time.thread_time()
        super().handle(host, source, message)
        self.core_s[host.name] += time.thread_time() - began_s
        self.received[host.name] += 1

    def put(self, host: Host, effects: tuple[Effect, ...]) -> None:
        """Carry out what a node wants at the beginning, and wake it up when it is due."""
        self.carry_out(host, effects)
        self.wake(host)

    def views(self) -> dict[str, View]:
        """Every view that was decided, by digest."""
        return self.invariants.views

    def accused_ns(self, after_ns: int) -> int:
        """The first accusation after a time."""
        return min(
            at
            for host in self.hosts.values()
            if host.node is not None
            for local, _, text in host.node.story()
            if text.startswith("accuses") and (at := host.true(local)) > after_ns
        )

    def dropped_ns(self, lost: frozenset[str]) -> int | None:
        """When the first view without any of these was decided."""
        without = [
            self.invariants.decided_at[digest]
            for digest, view in self.views().items()
            if lost.isdisjoint(member.node for member in view.members)
        ]
        return min(without, default=None)


def measure(count: int, received_us: float, seed: int = 1) -> dict[str, float]:
    """Figures for this many nodes; the seed chooses who is lost, and every latency.

    Raises BenchmarkError where the world does not run or the lost are not dropped in time.
    """
    # All nodes draw up the same list of candidates; a real one does it once a view, here one does it for all.
    real = standing.candidates
    standing.candidates = functools.lru_cache(maxsize=4)(real)
    try:
        return _measure(count, received_us, seed)
    finally:
        standing.candidates = real


def settled(world: Counted, members: tuple[Member, ...]) -> None:
    """Put these into the world as if they had just begun to run its first view."""
    nodes = tuple(member.node for member in members)
    view = View("bench", 0, 0, 0, "", members, nodes[0], nodes, "run")
    digest = digest_of(view)
    rng = random.Random("settled")
    for member in members:
        host = world.hosts[member.node] = Host(member.node, rng)
        host.life, host.incarnation = 1, member.incarnation
        world.invariants.persisted(host, Vote(member.incarnation, None, accepted=Accepted(ZERO, view)))
    for member in members:
        host = world.hosts[member.node]
        now = host.clock(0)
        node = host.node = Node(world.config, member, rng.getrandbits(32), now)
        node.first.clear()
        standing.settle(node, now, view, digest, None, False)
        world.invariants.adopted(host, view, digest)
        node.lease.anchor_ns = now
        node.barrier.adopt(now, view, True, False, now)
        node.barrier.advance(now, node.here)
        node.barrier.on_go(Go(node.here, view.generation))
        node.barrier.state = "gone"  # the leader gives itself no GO
        world.put(host, (Persist(node.agreement.vote()), *node.works.start(view, "bench")))


def _measure(count: int, received_us: float, seed: int) -> dict[str, float]:
    members = tuple(Member(f"n{index:04d}", index + 1, "active", group=f"g{index // 4}") for index in range(count))
    everyone = tuple(member.node for member in members)
    config = MeshConfig(slots=count, min_nodes=count // 2 + 1, max_nodes=count, roster=everyone, first_contact=everyone[0])
    one, *third = random.Random(seed).sample(everyone, 1 + count // 3)
    faults = (Fault(ONE_LOST_MS, "power", (one,)), Fault(THIRD_LOST_MS, "power", tuple(sorted(third))))
    began_s = time.monotonic()
    world = Counted(Schedule(seed, config, (), faults, END_MS), received_us)
    settled(world, members)
    world.run(SETTLED_MS)
    running = sum(host.works is not None for host in world.hosts.values())
    if running < count or len(world.views()) > 1:
        raise BenchmarkError(f"simulator: after {SETTLED_MS} idle ms {running} of {count} nodes have workers")
    sent, received = world.sent.copy(), world.received.copy()
    world.run(ONE_LOST_MS - 1)
    idle_s = (ONE_LOST_MS - 1 - SETTLED_MS) / 1000
    idle_sent = sorted((world.sent[node] - sent[node]) / idle_s for node in everyone)
    idle_both = max((world.sent[n] - sent[n] + world.received[n] - received[n]) / idle_s for n in everyone)
    name = f"simulated, {count} nodes"
    figures = {
        f"{name}: idle messages of a node, median per s": idle_sent[count // 2],
        f"{name}: idle messages of the busiest node, per s": idle_sent[-1],
        f"{name}: the same with those received": idle_both,
    }
    for what, at_ms, until_ms, lost in (
        ("one lost", ONE_LOST_MS, THIRD_LOST_MS - 1, frozenset([one])),
        ("a third lost", THIRD_LOST_MS, END_MS, frozenset([one, *third])),
    ):
        world.core_s.clear()
        decided_ns = None
        for end_ms in range(at_ms, until_ms, 20):
            world.run(end_ms)
            if (decided_ns := world.dropped_ns(lost)) is not None:
                break
        if decided_ns is None:
            raise BenchmarkError(f"simulator, {count} nodes, {what}: not decided within {until_ms - at_ms} ms")
        busiest_s = max(world.core_s.values())
        world.run(until_ms)
        detected_s = (decided_ns - world.accused_ns(at_ms * MS)) / S
        figures |= {
            f"{name}: {what} -> decided, s": (decided_ns - at_ms * MS) / S,
            f"{name}: {what} -> decided, s after detection": detected_s,
            f"{name}: {what}: core of the busiest node, CPU s": busiest_s,
            f"{name}: {what} -> decided, s after detection, core added": detected_s + busiest_s,
        }
    figures[f"{name}: the run took, s"] = time.monotonic() - began_s
    return figures
