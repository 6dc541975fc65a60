"""The mesh's cores at sizes that no one machine holds: loss of a node, loss of a third, and idling, in virtual time.

    .venv/bin/python scripts/bench/mesh_simulated.py [--nodes 16,128,1024,4096] [--received-us 0]

Prints one table, a column for each size. `--received-us`: what a message costs its receiver, measured by `mesh_cost.py` over the
real reactor and transport, in bursts from many peers (0: measure now).

The nodes begin as members of a running world (how it was formed is not measured here), idle for a wave of the leases; one host
goes dark without a word, later a third of the rest at once.
Times are virtual, from the loss or from the first accusation (detection) until the view without the lost is decided; a node
handles one message at a time, each for `received_us`. "Core" is this machine's CPU time in the cores at the node that works most,
from the loss until the decision: what the virtual clock does not see. Added to the time it is an upper bound, for much of it is
done while the node waits. What sending costs is in neither.
"""

import argparse
import itertools
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mesh_cost
from side_by_side import BenchmarkError

from hyperpodrun.agent.mesh import standing
from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.effects import Effect, Effects, Event, Persist
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh.view import digest_of
from hyperpodrun.agent.sim.faults import Fault, Schedule
from hyperpodrun.agent.sim.hosts import Generation, Host
from hyperpodrun.agent.sim.invariants import Invariants
from hyperpodrun.agent.sim.world import World
from hyperpodrun.agent.wire.mesh import ZERO, Accepted, Go, Member, Message, Source, View, Vote

SETTLED_MS = 3000
"""From then on the mesh is expected to idle: everyone's lease is granted in turn."""
ONE_LOST_MS = SETTLED_MS + 3000
THIRD_LOST_MS = ONE_LOST_MS + 3500
END_MS = THIRD_LOST_MS + 4000


class Watched(Invariants):
    """All but one: that never two worlds run is looked for by a walk over all hosts each time that one's workers start."""

    def works_changed(self, granted: Generation | None = None) -> None:
        """Not here."""


class Timed(Node):
    """Adds what its doors take to `world.core_s`."""

    world: "Counted"

    def tick(self, now: int) -> Effects:
        return self.world.timed(self.member.node, lambda: super(Timed, self).tick(now))

    def receive(self, now: int, source: Source, message: Message) -> Effects:
        return self.world.timed(self.member.node, lambda: super(Timed, self).receive(now, source, message))

    def notify(self, now: int, event: Event) -> Effects:
        return self.world.timed(self.member.node, lambda: super(Timed, self).notify(now, event))


class Counted(World):
    """Counts messages by node, and CPU time while `is_timed`: to ask for it can take longer than a message does."""

    def __init__(self, schedule: Schedule, received_us: float) -> None:
        super().__init__(schedule, cost_ns=int(1000 * received_us), validate=False)
        self.invariants = Watched(self)
        self.is_timed = False
        asked_s = [time.thread_time() for _ in range(1000)]
        self.asking_s = statistics.median(after - before for before, after in itertools.pairwise(asked_s))
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.core_s: Counter[str] = Counter()

    def send(self, host: Host, to: str, message: Message) -> None:
        self.sent[host.name] += 1
        super().send(host, to, message)

    def handle(self, host: Host, source: Source, message: Message) -> None:
        self.received[host.name] += 1
        super().handle(host, source, message)

    def timed(self, name: str, door: Callable[[], Effects]) -> Effects:
        """What this door gives; the CPU time it takes."""
        if not self.is_timed:
            return door()
        began_s = time.thread_time()
        effects = door()
        self.core_s[name] += time.thread_time() - began_s - self.asking_s
        return effects

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
    members = tuple(Member(f"n{index:04d}", index + 1, "active", group=f"g{index // 4}") for index in range(count))
    everyone = tuple(member.node for member in members)
    config = MeshConfig(slots=count, min_nodes=count // 2 + 1, max_nodes=count, roster=everyone, first_contact=everyone[0])
    one, *third = random.Random(seed).sample(everyone, 1 + count // 3)
    faults = (Fault(ONE_LOST_MS, "power", (one,)), Fault(THIRD_LOST_MS, "power", tuple(sorted(third))))
    began_s = time.monotonic()
    world = Counted(Schedule(seed, config, (), faults, END_MS), received_us)
    settled(world, members)
    name = f"simulated, {count} nodes"
    figures = {f"{name}: {what}": value for what, value in idle(world).items()}
    for what, at_ms, until_ms, lost in (
        ("one lost", ONE_LOST_MS, THIRD_LOST_MS - 1, frozenset([one])),
        ("a third lost", THIRD_LOST_MS, END_MS, frozenset([one, *third])),
    ):
        figures |= {f"{name}: {what}{part}": value for part, value in loss(world, at_ms, until_ms, lost).items()}
    figures[f"{name}: the run took, s"] = time.monotonic() - began_s
    return figures


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
        node = host.node = Timed(world.config, member, rng.getrandbits(32), now)
        node.world = world
        node.first.clear()
        standing.settle(node, now, view, digest, None, False)
        world.invariants.adopted(host, view, digest)
        node.lease.anchor_ns = now
        node.barrier.adopt(now, view, True, False, now)
        node.barrier.advance(now, node.here)
        node.barrier.on_go(Go(node.here, view.generation))
        node.barrier.state = "gone"  # the leader gives itself no GO
        world.put(host, (Persist(node.agreement.vote()), *node.works.start(view, "bench")))


def idle(world: Counted) -> dict[str, float]:
    """Messages a second while nothing happens; raises BenchmarkError where the world does not run."""
    count = len(world.hosts)
    world.run(SETTLED_MS)
    running = sum(host.works is not None for host in world.hosts.values())
    if running < count or len(world.views()) > 1:
        raise BenchmarkError(f"simulator: after {SETTLED_MS} idle ms {running} of {count} nodes have workers")
    sent, received = world.sent.copy(), world.received.copy()
    world.run(ONE_LOST_MS - 1)
    idle_s = (ONE_LOST_MS - 1 - SETTLED_MS) / 1000
    idle_sent = sorted((world.sent[node] - sent[node]) / idle_s for node in world.hosts)
    return {
        "idle messages of a node, median per s": idle_sent[count // 2],
        "idle messages of the busiest node, per s": idle_sent[-1],
        "the same with those received": max(
            (world.sent[node] - sent[node] + world.received[node] - received[node]) / idle_s for node in world.hosts
        ),
    }


def loss(world: Counted, at_ms: int, until_ms: int, lost: frozenset[str]) -> dict[str, float]:
    """From the loss of these, which the schedule has at `at_ms`, until they are dropped; raises BenchmarkError if they are not.

    Ends there when it is the last thing of the schedule, else at `until_ms`: those who stay start a world without them.
    """
    world.run(at_ms - 1)
    world.core_s.clear()
    world.is_timed = True
    decided_ns = None
    for end_ms in range(at_ms, until_ms, 20):
        world.run(end_ms)
        if (decided_ns := world.dropped_ns(lost)) is not None:
            break
    if decided_ns is None:
        raise BenchmarkError(f"simulator, {len(world.hosts)} nodes, {len(lost)} lost: not decided within {until_ms - at_ms} ms")
    world.is_timed = False
    busiest_s = max(world.core_s.values())
    detected_s = (decided_ns - world.accused_ns(at_ms * MS)) / S
    return {
        " -> decided, s": (decided_ns - at_ms * MS) / S,
        " -> decided, s after detection": detected_s,
        ": core of the busiest node, CPU s": busiest_s,
        " -> decided, s after detection, core added": detected_s + busiest_s,
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="16,128,1024,4096", metavar="N,...", help="sizes of the job (16,128,1024,4096)")
    parser.add_argument("--received-us", type=float, default=0, help="CPU time of a message at its receiver (0: measure it now)")
    parser.add_argument("--seed", type=int, default=0, help="who is lost, and every latency (0)")
    chosen = parser.parse_args()
    received_us = chosen.received_us or mesh_cost.measure(10_000)[mesh_cost.BURST]
    counts = [int(word) for word in chosen.nodes.split(",")]
    print(f"A message costs its receiver {received_us:.1f} us.\n", flush=True)
    columns: list[list[float]] = []
    for count in counts:
        print(f"  {count} nodes", file=sys.stderr, flush=True)
        figures = measure(count, received_us, chosen.seed)
        names = [name.partition(": ")[2] for name in figures]
        columns.append([*figures.values(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    print(f"| nodes | {' | '.join(f'{count:,}' for count in counts)} |\n|{'---|' * (1 + len(counts))}")
    for name, row in zip([*names, "the run and those before it took, MiB"], zip(*columns, strict=True), strict=True):
        print(f"| {name} | {' | '.join(f'{value:.0f}' if value >= 100 else f'{value:.3g}' for value in row)} |")


if __name__ == "__main__":
    main()
