"""What strikes in a soak, and what must hold afterwards. Pure: a seed in, orders out; records in, complaints out.

The orders are hyperpodrun.inprocess.inject's. Each generation has one *certain* fault, which strikes if nothing else does before, and
some a second one: at the same moment on another rank, or on the way to the barrier. One rank, the *witness*, is never struck by
what costs a process: it lives through the whole soak and shows whether anything grows. Another one, the *novice*, is struck
only before the first step, and seldom: a rank that fails again before any step was done is not healed in place, and rightly so. The
launcher's memory of such things is made short (`WINDOW_S`): a soak is hours of a job's life in minutes.
"""

import random
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

STEPS = 12
"""All-reduces of a generation that nothing disturbs."""
STEP_S = 0.01
HANG_S, ABORT_S, WINDOW_S = 3, 10, 1
"""--hang-timeout, --abort-timeout and --restart-window, seconds: a rank that other work on this machine holds up is no fault."""
NOVICE_EVERY = 15
"""Generations; in this time one that fails at once is forgotten."""

# Weights. Those that the hang watch or a deadline has to end take seconds each, so they are rare.
IN_PLACE = {"exception": 40, "balloon": 3, "hang": 2, "hang-sleep": 2, "hang-collective": 3}
FROM_OUTSIDE = ("agent-lost", "node-lost")
COSTS_A_PROCESS = {"sigkill": 25, "exit": 10, "sigstop": 1, "hang-c": 1}
ON_THE_WAY = {"exception": 10, "sigkill": 10, "exit": 4, "hang-sleep": 1}
PHASES_ON_THE_WAY = ("aborting", "finalizing", "health check")


@dataclass(frozen=True, slots=True)
class Order:
    """One planted fault."""

    generation: int
    rank: int
    kind: str
    where: str  # "step=3" or "phase=NAME"

    def __str__(self) -> str:
        return f"{self.kind}@generation={self.generation},rank={self.rank},{self.where}"

    @property
    def costs_a_process(self) -> bool:
        """May the struck rank come back as another process? What fails on the way to the barrier is replaced, whatever it was."""
        return self.kind in (*COSTS_A_PROCESS, *FROM_OUTSIDE) or self.where.removeprefix("phase=") in PHASES_ON_THE_WAY


@dataclass(frozen=True, slots=True)
class Strike:
    """From outside, once that generation runs: the "agent" of the node that has this rank is killed, or all of its "node"."""

    generation: int
    kind: str
    rank: int


STRIKE_EVERY = 6
"""Generations, on average."""


def strikes(faults: int, ranks: int, nodes: int, seed: int) -> list[Strike]:
    """For a job of several nodes. The witness's node is never struck."""
    if nodes < 2:
        return []
    draw = random.Random(f"strikes {seed}")
    each = ranks // nodes
    there = [rank for rank in range(ranks) if rank // each != seed % ranks // each]
    struck = sorted(draw.sample(range(1, faults), (faults - 1) // STRIKE_EVERY))
    return [Strike(generation, draw.choice(("agent", "node")), draw.choice(there)) for generation in struck]


def plan(faults: int, ranks: int, seed: int) -> list[Order]:
    """Orders for the generations 0 to `faults` - 1."""
    draw = random.Random(seed)
    witness, novice = seed % ranks, (seed + 1) % ranks
    mortals = [rank for rank in range(ranks) if rank not in (witness, novice)]
    orders = []
    for generation in range(faults):
        if generation % NOVICE_EVERY == NOVICE_EVERY - 1:
            kinds = IN_PLACE | COSTS_A_PROCESS
            del kinds["hang-collective"]  # there is no process group yet
            orders.append(Order(generation, novice, _drawn(draw, kinds), "phase=enter"))
            continue
        first = _certain(draw, generation, witness, mortals)
        orders.append(first)
        others = [rank for rank in mortals if rank != first.rank]
        chance = draw.random()
        if chance < 0.2:  # two at once
            where = first.where if first.where.startswith("step=") else "step=1"
            orders.append(Order(generation, draw.choice(others), _drawn(draw, IN_PLACE | COSTS_A_PROCESS), where))
        elif chance < 0.45:  # one more while the first is being healed
            phase = f"phase={draw.choice(PHASES_ON_THE_WAY)}"
            orders.append(Order(generation, draw.choice(others), _drawn(draw, ON_THE_WAY), phase))
    return orders


def _certain(draw: random.Random, generation: int, witness: int, mortals: list[int]) -> Order:
    kind = _drawn(draw, IN_PLACE | COSTS_A_PROCESS)
    # A balloon leaves pages with the C library: no growth of ours, but it would look like some.
    rank = draw.choice(mortals if kind in COSTS_A_PROCESS or kind == "balloon" else [witness, *mortals])
    where = f"step={draw.randrange(1, STEPS)}"
    if kind != "hang-collective" and draw.random() < 0.15:
        where = "phase=return"  # when others have returned already
    return Order(generation, rank, kind, where)


def _drawn(draw: random.Random, weights: dict[str, int]) -> str:
    return draw.choices(list(weights), list(weights.values()))[0]


# --- afterwards


@dataclass(frozen=True, slots=True)
class Entry:
    """A rank entered the function, on the launcher `node`. `agent_*`: of its agent.

    `rss_kib`: resident memory that is nobody else's file.
    """

    generation: int
    rank: int
    pid: int
    committed: int
    fds: int
    threads: int
    rss_kib: int
    shm: int
    agent_pid: int
    agent_fds: int
    agent_threads: int
    agent_rss_kib: int
    node: int = 0


STRUCK = re.compile(r"injected fault '([a-z-]+)@generation=(\d+),rank=(\d+),([^']*)' strikes")
GROWTH = {"fds": 6, "threads": 3, "rss_kib": 24 << 10, "shm": 0, "agent_fds": 3, "agent_threads": 0, "agent_rss_kib": 16 << 10}
"""How much more of each the last entries may show than the first ones: noise, not a function of the number of faults. The process
group of the generation before may be there still, on its way out: five descriptors, two threads."""
WINDOW = 8


def struck(output: str) -> list[Order]:
    """The faults that struck, from the workers' standard error."""
    return [Order(int(g), int(rank), kind, where) for kind, g, rank, where in STRUCK.findall(output)]


def complaints(
    entries: list[Entry], reduced: dict[int, set[int]], hit: list[Order], ranks: int, last: int, nodes: int = 1
) -> list[str]:
    """What does not hold. `reduced`: generation -> ranks that completed an all-reduce in it; `last`: the generation that returned.

    Several nodes may decide upon a further generation before the one before it has begun.
    """
    found = []
    by_rank = {rank: sorted((e for e in entries if e.rank == rank), key=lambda e: e.generation) for rank in range(ranks)}
    for rank, own in by_rank.items():
        seen = [entry.generation for entry in own]
        if len(set(seen)) != len(seen):
            found.append(f"rank {rank} entered a generation twice: {sorted(g for g in set(seen) if seen.count(g) > 1)}")
        for before, after in pairwise(own):
            if before.pid != after.pid and not _excused(hit, rank, before.generation, after.generation):
                found.append(f"rank {rank} lost its process between generations {before.generation} and {after.generation}")
    for generation, who in sorted(reduced.items()):
        missing = {rank for rank in range(ranks) if all(entry.generation != generation for entry in by_rank[rank])}
        if missing:
            found.append(
                f"ranks {sorted(missing)} are not in generation {generation}, in which {sorted(who)} completed an all-reduce"
            )
    if reduced.get(last) != set(range(ranks)):
        found.append(f"not all ranks are in the last generation {last}: {sorted(reduced.get(last, ()))}")
    at_the_door = {order.generation for order in hit if order.where == "phase=enter"}  # over before anybody else was in
    skipped = set(range(last)) - {entry.generation for entry in entries} - at_the_door
    if skipped and nodes == 1:
        found.append(f"nobody entered the generations {sorted(skipped)}")
    return found + list(_grown(by_rank))


def _excused(hit: list[Order], rank: int, first: int, end: int) -> bool:
    return any(order.rank == rank and first <= order.generation < end and order.costs_a_process for order in hit)


def _grown(by_rank: dict[int, list[Entry]]) -> Iterable[str]:
    for rank, own in by_rank.items():
        for pid, agent in {(entry.pid, entry.agent_pid) for entry in own}:
            lived = [entry for entry in own if (entry.pid, entry.agent_pid) == (pid, agent)][
                1:
            ]  # the first: before any process group
            if len(lived) < 4 * WINDOW:
                continue
            for what, most in GROWTH.items():
                before, after = (statistics.median(getattr(e, what) for e in part) for part in (lived[:WINDOW], lived[-WINDOW:]))
                if after - before > most:
                    yield f"{what} of rank {rank}, process {pid}: {before:g} -> {after:g} over {len(lived)} generations"
