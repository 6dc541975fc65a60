"""The store of a job of 8,192 ranks on 1,024 nodes, whose agents no one machine holds: the real key spaces in virtual time.

    scripts/bench/store_simulated.py [--nodes 1024] [--ranks-per-node 8] [--mesh-nodes 8 16 32] [--cost TURN FRAME KIB]

An agent does what its loop does: takes what has come, frame after frame, then sends what that made. What decoding, the key space
and encoding cost is this machine's CPU time, measured each time. A turn of the loop, a frame's way through it and each KiB of a frame
cost what `frame_cost.py` measures over the real transport first (or `--cost`, in microseconds). Acknowledgements and repetitions are
in it. Frames take 75 us on the wire, in order. What workers and their connections to their own agent cost is not (`store.py`).

What gloo asks was recorded from torch 2.13 at a process group's init: every rank adds to `init/`, stores one value and reads its
peers', each with two waits and a get. With the settings of S8 a value has 154 bytes and a rank reads only those that it talks to: here
the neighbours of a ring and of a tree. Without, it has 154 + 8 N bytes and all N ranks read all N: 3 N^2 operations, 201 million at
8,192. At full size the readers of one value are run, and multiplied by the values of the busiest owner; on `--mesh-nodes` the same and
the whole, which tells what the multiplication is worth.

Columns: operations at the owners of the keys, all, mean and most of one; frames, all and most of one agent, both ways; "core": CPU
time of the agent that works most; "done": when the last answer was there.
"""

import argparse
import functools
import gc
import heapq
import random
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
import frame_cost

from hyperpodrun.agent.mesh import keyspace
from hyperpodrun.agent.mesh.keyspace import KeySpace, Pending
from hyperpodrun.agent.wire import store as op

WIRE_US = 75
ADDRESS_BYTES = 154
PAIR_BYTES = 8
"""What a rank's value has for each other rank without S8."""

keyspace.owners = functools.cache(keyspace.owners)  # the same for all agents, and 65,536 hashes


class Agent:
    """One node's key space, when it is free again, and what it did. Times: microseconds of virtual time."""

    def __init__(self, name: str, order: tuple[str, ...], life: int) -> None:
        self.name = name
        self.free_us = self.core_us = 0.0
        self.frames = 0
        self.roused = self.dirty = False
        self.due_us: float | None = None
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.space = KeySpace(1, name, order, life, 1 << 40, self._wake)

    def _wake(self) -> None:
        self.dirty = True

    def spends(self, cost_us: float) -> None:
        """It is busy for so long."""
        self.core_us += cost_us
        self.free_us += cost_us

    def timed(self, what: Callable[[], Any]) -> Any:
        """Do it, for what it costs here."""
        began_s = time.thread_time()
        answer = what()
        self.spends(1e6 * (time.thread_time() - began_s))
        return answer


class Job:
    """All agents."""

    def __init__(self, nodes: int, cost: frame_cost.Cost, seed: int = 1) -> None:
        self.order = tuple(f"n{index:04d}" for index in range(nodes))
        self.agents = {name: Agent(name, self.order, life) for life, name in enumerate(self.order)}
        self.now_us = self.last_us = 0.0
        self.frames = 0
        self.served: Counter[str] = Counter()
        self.rng = random.Random(seed)
        self._cost = cost
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._turns = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(op.Frame).decode

    def owner(self, key: bytes) -> str:
        """The node that holds it."""
        return self.agents[self.order[0]].space.owner(key)

    def ask(self, at_us: float, node: str, rank: int, asked: Iterable[op.KeyOperation]) -> None:
        """From then on a rank asks one thing after another."""
        self._at(at_us, self._comes, self.agents[node], self._asks, (rank, iter(asked)))

    def run(self) -> None:
        """Until nothing is left to do."""
        gc.disable()  # it would look through all agents' heaps, and one agent would pay
        while self._heap:
            self.now_us, _, what, args = heapq.heappop(self._heap)
            what(*args)
        gc.enable()

    def clear(self) -> None:
        """Forget what it took so far."""
        self.served.clear()
        self.frames = 0
        for agent in self.agents.values():
            agent.core_us, agent.frames, agent.free_us = 0.0, 0, self.now_us
        self.last_us = self.now_us

    # --- a loop's turn

    def _at(self, at_us: float, what: Callable[..., None], *args: Any) -> None:
        self._turns += 1
        heapq.heappush(self._heap, (at_us, self._turns, what, args))

    def _comes(self, agent: Agent, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        agent.inbox.append((what, args))
        self._rouse(agent)

    def _rouse(self, agent: Agent) -> None:
        if not agent.roused:
            agent.roused = True
            self._at(max(agent.free_us, self.now_us), self._turn, agent)

    def _turn(self, agent: Agent) -> None:
        agent.roused = False
        agent.free_us = self.now_us
        agent.spends(self._cost.turn_us)
        for _ in range(len(agent.inbox)):
            what, args = agent.inbox.popleft()
            what(agent, *args)
        if agent.dirty or (agent.due_us is not None and agent.due_us <= self.now_us):
            self._flush(agent)

    def _asks(self, agent: Agent, rank: int, asked: Iterator[op.KeyOperation]) -> None:
        operation = next(asked, None)
        if operation is None:
            return
        self.served[agent.space.owner(operation.key)] += 1

        def came(_answer: Any) -> None:
            self.last_us = max(self.last_us, agent.free_us)
            self._at(agent.free_us, self._comes, agent, self._asks, (rank, asked))

        answer = agent.timed(lambda: agent.space.call(agent.space.client(rank), operation, came))
        if type(answer) is not Pending:
            came(answer)

    def _takes(self, agent: Agent, source: str, payload: bytes) -> None:
        agent.frames += 1
        agent.spends(self._cost.of(payload))
        now_ns = int(1000 * agent.free_us)
        agent.timed(lambda: agent.space.receive(source, self._decode(payload), now_ns))
        agent.dirty = True

    def _flush(self, agent: Agent) -> None:
        """As `agent/store.py` does."""
        agent.dirty = False
        space, now_ns = agent.space, int(1000 * agent.free_us)

        def made() -> tuple[list[tuple[str, bytes]], int | None]:
            space.tick(now_ns)
            return [(to, self._encode(frame)) for to, frame in space.frames(now_ns)], space.next_deadline_ns()

        payloads, due_ns = agent.timed(made)
        for to, payload in payloads:
            self.frames += 1
            agent.frames += 1
            agent.spends(self._cost.of(payload))  # sending costs about what receiving does
            self._at(agent.free_us + WIRE_US, self._comes, self.agents[to], self._takes, (agent.name, payload))
        agent.due_us = None if due_ns is None else due_ns / 1000 + 0.001
        if agent.due_us is not None:
            self._at(max(agent.due_us, agent.free_us), self._due, agent, agent.due_us)

    def _due(self, agent: Agent, due_us: float) -> None:
        if agent.due_us == due_us:
            self._rouse(agent)


def report(job: Job, what: str, began_us: float) -> None:
    """A line of the table."""
    served = sorted(job.served.values()) or [0]
    core_s = max(agent.core_us for agent in job.agents.values()) / 1e6
    most = max(agent.frames for agent in job.agents.values())
    counts = f"{sum(served):9,} {sum(served) / len(served):8,.0f} {served[-1]:8,} {job.frames:9,} {most:8,}"
    print(f"{what:58} {counts} {core_s:8.3f} {(job.last_us - began_us) / 1e6:8.3f}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--mesh-nodes", type=int, nargs="*", default=[8, 16, 32], help="where gloo's full mesh is run in full")
    parser.add_argument(
        "--cost", type=float, nargs=3, metavar=("TURN", "FRAME", "KIB"), help="microseconds; measured if not given"
    )
    asked = parser.parse_args()
    began_s = time.monotonic()
    cost = frame_cost.Cost(*asked.cost) if asked.cost else frame_cost.measure()
    nodes, each = asked.nodes, asked.ranks_per_node
    print(f"a turn of the loop {cost.turn_us:.1f} us, a frame {cost.frame_us:.1f} us, a KiB {cost.kib_us:.2f} us of CPU time")
    columns = ("operations", "mean", "most", "frames", "most", "core, s", "done, s")
    print("{:56} {:>11} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8}".format("", *columns))
    job = Job(nodes, cost)
    print(
        f"{nodes * each:,} ranks on {nodes:,} nodes, {min(64, nodes)} shards on {len({*job.agents[job.order[0]].space._owners})}"
    )
    with_settings(job, each)
    for readers in (1, each):
        hot(job, readers, b"hot%d" % readers)
    monitor(job, each)
    one_value(job, each)
    for few in asked.mesh_nodes:
        small = Job(few, cost)
        one_value(small, each)
        full_mesh(small, each)
    most_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.monotonic() - began_s:.0f} s, {most_gib:.1f} GiB")


def address(rank: int) -> bytes:
    """Where gloo stores it."""
    return b"/default_pg/0//cpu//0/%d" % rank


def joins(rank: int, value_bytes: int, peers: Iterable[int]) -> Iterator[op.KeyOperation]:
    """What a rank asks when its process group is made."""
    yield op.Add(b"init/", 1)
    yield op.Set(address(rank), b"a" * value_bytes)
    for peer in peers:
        yield from (op.Watch(address(peer)), op.Watch(address(peer)), op.Get(address(peer)))


def ranks(job: Job, each: int) -> Iterator[tuple[int, str, int]]:
    """(rank, node, local rank)."""
    return ((place * each + local, node, local) for place, node in enumerate(job.order) for local in range(each))


def with_settings(job: Job, each: int) -> None:
    """Everybody stores one address and reads those of a ring's and a tree's neighbours."""
    size = len(job.order) * each
    for rank, node, local in ranks(job, each):
        peers = {(rank + 1) % size, (rank - 1) % size, *(rank ^ 1 << bit for bit in range(size.bit_length() - 1))}
        job.ask(job.rng.random() * 10_000, node, local, joins(rank, ADDRESS_BYTES, sorted(peers - {rank})))
    job.run()
    report(job, "gloo init with the S8 settings: ring and tree", 0.0)


def hot(job: Job, readers: int, key: bytes) -> None:
    """`readers` of each node wait for a key and read it, as `get` of torch's client does; timed from the set on."""
    job.clear()
    for node in job.order:
        for local in range(readers):
            job.ask(job.now_us, node, local, (op.Watch(key), op.Get(key)))
    job.run()
    job.clear()
    began_us = job.now_us
    job.ask(began_us, job.order[0], 0, (op.Set(key, b"v"),))
    job.run()
    job.served[job.owner(key)] += 2 * readers * len(job.order)
    report(job, f"hot key: {readers * len(job.order):,} readers wait, it is set, all read it", began_us)


def monitor(job: Job, each: int) -> None:
    """What NCCL's monitor asks: every rank, once a second, at its own moment."""
    job.clear()
    began_us = job.now_us
    for _, node, local in ranks(job, each):
        job.ask(began_us + job.rng.random() * 1e6, node, local, (op.Check(b"dump"),))
    job.run()
    report(job, f"{len(job.order) * each:,} checks of one missing key within a second", began_us)


def one_value(job: Job, each: int) -> None:
    """Gloo without S8, the readers of one value; a rank may be slower than others by 10 ms."""
    size = len(job.order) * each
    key = address(size)
    job.clear()
    job.ask(job.now_us, job.order[0], 0, (op.Set(key, b"p" * (ADDRESS_BYTES + PAIR_BYTES * size)),))
    job.run()
    job.clear()
    began_us = job.now_us
    for _, node, local in ranks(job, each):
        job.ask(began_us + job.rng.random() * 10_000, node, local, (op.Watch(key), op.Watch(key), op.Get(key)))
    job.run()
    report(job, f"gloo init without, {size:,} ranks: one value's readers", began_us)
    core_s = job.agents[job.owner(key)].core_us / 1e6
    values = Counter(job.owner(address(rank)) for rank in range(size)).most_common(1)[0][1]
    print(
        f"  times {values:,} values of the busiest owner: {values * 3 * size:,} operations, {values * core_s:,.2f} s of its core"
    )


def full_mesh(job: Job, each: int) -> None:
    """Gloo without S8: everybody reads everybody's value, in order."""
    size = len(job.order) * each
    job.clear()
    began_us = job.now_us
    for rank, node, local in ranks(job, each):
        asked = joins(rank, ADDRESS_BYTES + PAIR_BYTES * size, range(size))
        job.ask(began_us + job.rng.random() * 10_000, node, local, asked)
    job.run()
    report(job, f"gloo init without, {size:,} ranks: all", began_us)


if __name__ == "__main__":
    main()
