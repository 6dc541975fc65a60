"""The store of a job of 8,192 ranks on 1,024 nodes, whose agents no one machine holds: the real key spaces in virtual time.

    scripts/bench/store_simulated.py [--nodes 1024] [--ranks-per-node 8] [--received-us 0]

An agent handles one frame after another. What decoding it, the key space and encoding the answers cost is this machine's CPU time,
measured for every frame; the way through socket and event loop is `received_us` a frame, measured by `mesh_cost.py` over the real
reactor (0: measure now). Frames take 50 to 100 us on the wire. What workers and their connections to their own agent cost is not in
it (`store.py`). "Core" is the CPU time of the agent that works most.
"""

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
import mesh_cost

from hyperpodrun.agent.mesh.keyspace import KeySpace, Pending
from hyperpodrun.agent.wire import store as op

WIRE_US = 50
ADDRESS_BYTES = 100
"""About what gloo stores for one pair or, lazily, one rank."""
PAIR_BYTES = 8
"""A rank's value without S8: one entry for each other rank."""


class Agent:
    """One node's key space, when it is free again, and what it did."""

    def __init__(self, name: str, order: list[str], life: int) -> None:
        self.name = name
        self.free_us = 0.0
        self.core_us = 0.0
        self.flushing = False
        self.dirty = False
        self.space = KeySpace(1, name, order, life, 1 << 40, self._wake)

    def _wake(self) -> None:
        self.dirty = True


class Job:
    """All agents. Times: microseconds of virtual time."""

    def __init__(self, nodes: int, received_us: float, seed: int = 1) -> None:
        self.order = [f"n{index:04d}" for index in range(nodes)]
        self.agents = {name: Agent(name, self.order, life) for life, name in enumerate(self.order)}
        self.now_us = 0.0
        self.frames = 0
        self.served: Counter[str] = Counter()
        self.last_us = 0.0
        self._received_us = received_us
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._turns = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(op.Frame).decode

    def at(self, at_us: float, what: Callable[..., None], *args: Any) -> None:
        """Later."""
        self._turns += 1
        heapq.heappush(self._heap, (at_us, self._turns, what, args))

    def ask(self, node: str, rank: int, asked: Iterator[op.KeyOperation]) -> None:
        """A rank asks one thing after another."""
        agent = self.agents[node]
        operation = next(asked, None)
        if operation is None:
            return
        self.served[agent.space.owner(operation.key)] += 1

        def came(_answer: Any) -> None:
            self.last_us = max(self.last_us, self.now_us)
            self.at(self.now_us, self.ask, node, rank, asked)

        answer = self._timed(agent, lambda: agent.space.call(agent.space.client(rank), operation, came))
        if type(answer) is not Pending:
            came(answer)
        self._send(agent)

    def run(self) -> None:
        """Until nothing is left to do but acknowledgements."""
        while self._heap:
            self.now_us, _, what, args = heapq.heappop(self._heap)
            what(*args)

    def _timed(self, agent: Agent, what: Callable[[], Any]) -> Any:
        began_s = time.thread_time()
        answer = what()
        took_us = 1e6 * (time.thread_time() - began_s)
        agent.core_us += took_us
        agent.free_us = max(agent.free_us, self.now_us) + took_us
        return answer

    def _send(self, agent: Agent) -> None:
        if agent.dirty and not agent.flushing:
            agent.flushing = True
            self.at(max(agent.free_us, self.now_us), self._flush, agent)

    def _flush(self, agent: Agent) -> None:
        agent.flushing = agent.dirty = False
        now_ns = int(1000 * self.now_us)
        made = self._timed(agent, lambda: [(to, self._encode(frame)) for to, frame in agent.space.frames(now_ns)])
        for to, payload in made:
            self.frames += 1
            agent.core_us += self._received_us  # sending costs about what receiving does
            agent.free_us += self._received_us
            self.at(agent.free_us + WIRE_US + self._rng.random() * WIRE_US, self._arrive, to, agent.name, payload)

    def _arrive(self, to: str, source: str, payload: bytes) -> None:
        agent = self.agents[to]
        if agent.free_us > self.now_us:
            self.at(agent.free_us, self._arrive, to, source, payload)
            return
        agent.core_us += self._received_us
        agent.free_us = self.now_us + self._received_us
        self._timed(agent, lambda: agent.space.receive(source, self._decode(payload), int(1000 * self.now_us)))
        self._send(agent)

    def clear(self) -> None:
        """Forget what it took so far."""
        self.served.clear()
        self.frames = 0
        for agent in self.agents.values():
            agent.core_us = agent.free_us = 0.0
        self.now_us = self.last_us = 0.0


def report(job: Job, what: str) -> None:
    """A line of the table."""
    owners = sorted(job.served.values()) or [0]
    busiest_s = max(agent.core_us for agent in job.agents.values()) / 1e6
    counts = f"{sum(owners):9,} {owners[len(owners) // 2]:8,} {owners[-1]:8,} {job.frames:9,}"
    print(f"{what:58} {counts} {busiest_s:8.3f} {job.last_us / 1e6:8.3f}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--received-us", type=float, default=0.0)
    asked = parser.parse_args()
    received_us = asked.received_us or mesh_cost.measure(3000)[mesh_cost.RECEIVED]
    nodes, each = asked.nodes, asked.ranks_per_node
    size = nodes * each
    job = Job(nodes, received_us)
    print(
        f"{size:,} ranks on {nodes:,} nodes, {min(64, nodes)} shards; a frame's way through the real loop: {received_us:.1f} us CPU"
    )
    columns = ("operations", "median", "busiest", "frames", "core, s", "done, s")
    print(f"{'':58} {columns[0]:>9} {columns[1]:>8} {columns[2]:>8} {columns[3]:>9} {columns[4]:>8} {columns[5]:>8}")
    with_settings(job, each)
    report(job, "gloo init with the S8 settings: a set, 2 + log2(N) reads")
    for readers in (1, each):
        job.clear()
        hot(job, readers, b"hot%d" % readers)
        report(job, f"hot key: {readers * nodes:,} readers wait, then it is set")
    job.clear()
    monitor(job, each)
    report(job, f"{size:,} checks of one missing key within a second")
    full_mesh(job, each)


def with_settings(job: Job, each: int) -> None:
    """Everybody stores one address and reads those of a ring's and a tree's neighbours."""
    size = len(job.order) * each
    for place, node in enumerate(job.order):
        for local in range(each):
            rank = place * each + local
            peers = {(rank + 1) % size, (rank - 1) % size, *(rank ^ 1 << bit for bit in range(size.bit_length() - 1))}
            reads = (op.Get(b"/addr/%d" % peer, block=True) for peer in sorted(peers))
            asked = iter([op.Set(b"/addr/%d" % rank, b"a" * ADDRESS_BYTES), *reads])
            job.at(job._rng.random() * 10_000, job.ask, node, local, asked)
    job.run()


def hot(job: Job, readers: int, key: bytes) -> None:
    """`readers` of each node wait for a key; timed from the set on."""
    for node in job.order:
        for local in range(readers):
            job.at(0.0, job.ask, node, local, iter([op.Get(key, block=True)]))
    job.run()
    served = job.served.copy()
    job.clear()
    job.served = served
    job.at(0.0, job.ask, job.order[0], 0, iter([op.Set(key, b"v")]))
    job.run()


def monitor(job: Job, each: int) -> None:
    """What NCCL's monitor asks: every rank, once a second, at its own moment."""
    for node in job.order:
        for local in range(each):
            job.at(job._rng.random() * 1e6, job.ask, node, local, iter([op.Check(b"dump")]))
    job.run()


def full_mesh(job: Job, each: int) -> None:
    """Without S8: everybody reads everybody's value, which has an entry for each rank. One owner's reads of one value by all nodes
    are run; the rest is multiplied."""
    size = len(job.order) * each
    job.clear()
    key = b"/mesh/0"
    job.ask(job.order[0], 0, iter([op.Set(key, b"p" * (PAIR_BYTES * size))]))
    job.run()
    job.clear()
    for node in job.order:
        job.at(job._rng.random() * 1e6, job.ask, node, 0, iter([op.Get(key)]))
    job.run()
    owner = job.agents[job.agents[job.order[0]].space.owner(key)]
    read_us = owner.core_us / len(job.order)
    owners = Counter(job.agents[job.order[0]].space.owner(b"/mesh/%d" % rank) for rank in range(size))
    busiest = max(owners.values())
    reads = size * (size - 1)
    print(
        f"gloo init without: {reads:,} reads of {PAIR_BYTES * size:,} bytes; {read_us:.0f} us each (measured with {len(job.order):,})"
    )
    for merged, what in ((1, "each rank for itself"), (each, "those of a node merged")):
        share = busiest * size // merged
        print(f"    {what:54} {share:,} at the busiest owner: {share * read_us / 1e6:,.0f} s of its core")


if __name__ == "__main__":
    main()
