"""What goes wrong, and when: plain data, so that a failing schedule can be shrunk, printed and kept.

| kind | nodes | value | meaning |
|---|---|---|---|
| crash | who | effects still carried out | the agent dies, its keeper kills the workers and starts it again after `for_ms`
with its vote file |
| falter | | messages sent | the next agent to send ACCEPT or DECIDED within `for_ms` crashes after so many of them; back
after `for_ms` |
| power | who | | the host goes dark; after `for_ms` (0: never) it is back without a vote file |
| freeze | who | | agent and workers stand still; the kernel still takes connections |
| cut | from, to | | this direction loses everything |
| isolate | who | | both directions between it and everyone else |
| partition | one side | | both directions between the sides |
| loss | | per cent | every message may be lost |
| delay | | ms | every message takes up to so much longer |
| fail | who | symptoms | a worker fails there; how, says `SYMPTOMS` |
| stuck | who | | workers do not end when asked (killing still works) |
| finish | | | all workers that run end well |
| leave | who | | asked to leave; comes back after `for_ms` (0: never) as a new agent |
| join | who | | a slot that was empty so far starts |
| certify | told, dead | lie | somebody vouches at the first that the others are dead: dark for good, or (lie) just not there |
| restart | who | | a person asks this agent for a restart |
"""

import random
from typing import Literal

import msgspec

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.wire.rungs import Rules, Symptoms

Kind = Literal[
    "crash",
    "power",
    "freeze",
    "cut",
    "isolate",
    "partition",
    "loss",
    "delay",
    "fail",
    "finish",
    "leave",
    "join",
    "restart",
    "falter",
    "certify",
    "stuck",
]


class Fault(msgspec.Struct, frozen=True):
    """Times in milliseconds of virtual time; see the table above."""

    at_ms: int
    kind: Kind
    nodes: tuple[str, ...] = ()
    for_ms: int = 0
    value: int = 0


SYMPTOMS = (
    Symptoms(rank=0, in_place=True), Symptoms(rank=0, in_place=True, progressed=False), Symptoms(rank=1, in_place=True),
    Symptoms(rank=0), Symptoms(rank=0, in_place=True, rung="node"), Symptoms(rank=0, in_place=True, rung="all"),
    Symptoms(rank=0, in_place=True, rung="replace"), Symptoms(rank=0, in_place=True, rung="end"), Symptoms(final=True),
)  # fmt: skip
"""How a worker fails, by the value of the fault."""

LEAVING_MS = 7000
"""Longest time from being asked to leave to being gone; only then a slot may come back."""


def extra_ms(fault: Fault) -> int:
    """How much longer than it says a fault is felt."""
    if fault.kind == "falter":
        return fault.for_ms
    return LEAVING_MS if fault.kind == "leave" and fault.for_ms else 0


class Schedule(msgspec.Struct, frozen=True):
    """One run: which job, who is there from the start and when each starts, what goes wrong."""

    seed: int
    config: MeshConfig
    starts_ms: tuple[tuple[str, int], ...]
    faults: tuple[Fault, ...]
    end_ms: int

    def healed_ms(self) -> int:
        """From then on nothing more goes wrong."""
        ends = [f.at_ms + f.for_ms + extra_ms(f) for f in self.faults]
        return max([*(at for _, at in self.starts_ms), *ends])


def names(count: int) -> tuple[str, ...]:
    """n00, n01, ..."""
    return tuple(f"n{i:02d}" for i in range(count))


WEIGHTS: tuple[tuple[Kind, int], ...] = (
    ("crash", 6), ("power", 4), ("freeze", 3), ("cut", 3), ("isolate", 3), ("partition", 4), ("loss", 2), ("delay", 2),
    ("fail", 3), ("leave", 2), ("join", 2), ("restart", 1), ("falter", 6), ("stuck", 2),
)  # fmt: skip


def random_config(rng: random.Random, low: int, high: int) -> MeshConfig:
    """A job of low..high slots: fixed or elastic, with or without spares, roster known or not; leases short or as they are."""
    slots = rng.randint(low, high)
    spares = rng.choice((0, 0, rng.randint(0, slots // 3), rng.randint(0, slots - 1)))
    most = slots - spares
    least = rng.randint(1, most) if rng.random() < 0.6 else most
    nodes = names(slots)
    closed = rng.random() < 0.8
    short = rng.random() < 0.7
    second = 1_000_000_000
    rules = Rules(
        inprocess=rng.random() < 0.6, max_node_failures=rng.choice((None, None, None, None, None, 3)),
        max_rank_faults=rng.choice((1, 2, 3)),
    )  # fmt: skip
    return MeshConfig(
        slots=slots, min_nodes=least, max_nodes=most, roster=nodes if closed else (), first_contact=nodes[0],
        elastic_now=rng.random() < 0.7, lease_ns=(4 if short else 15) * second, fence_ns=(5 if short else 16) * second,
        barrier_ns=rng.choice((3, 120)) * second, rules=rules,
    )  # fmt: skip


def random_schedule(seed: int, low: int, high: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(f"schedule {seed}")
    fan = random.Random(f"fan {seed}").choice((2, 2, 3, 4, 16))
    config = msgspec.structs.replace(random_config(rng, low, high), lease_fan=fan)
    nodes = names(config.slots)
    late = rng.random() < 0.3
    starts = []
    absent: list[str] = []
    for node in nodes:
        if rng.random() < 0.1 and len(absent) < config.slots - config.min_nodes and node != config.first_contact:
            absent.append(node)
        else:
            starts.append((node, rng.randrange(3000) if late else rng.randrange(60)))
    faults: list[Fault] = []
    at = 1500 + rng.randrange(2500)
    kinds = [kind for kind, weight in WEIGHTS for _ in range(weight)]
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6, 8))):
        kind = rng.choice(kinds)
        who = rng.choice(nodes)
        span = rng.choice((300, 1000, 2500, 6000))
        if kind == "join":
            if not absent:
                continue
            faults.append(Fault(at, kind, (absent.pop(),)))
        elif kind == "cut":
            other = rng.choice([n for n in nodes if n != who])
            faults.append(Fault(at, kind, (who, other), span))
        elif kind == "partition":
            faults.append(Fault(at, kind, tuple(sorted(rng.sample(nodes, rng.randint(1, len(nodes) - 1)))), span))
        elif kind == "stuck":
            faults.append(Fault(at, kind, (who,), span))
            faults.append(Fault(at + rng.choice((0, 50)), "restart", (rng.choice(nodes),)))
        elif kind == "fail":
            # Most are followed by others: what has been tried shows only then.
            for wait in rng.choice(((0,), (0, 30), (0, 300), (0, 700, 1500), (0, 400, 800, 1200, 1600))):
                how = rng.choice((0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6)) if rng.random() < 0.96 else rng.choice((7, 8))
                faults.append(Fault(at + wait, kind, (who if rng.random() < 0.7 else rng.choice(nodes),), 0, how))
        elif kind == "falter":
            faults.append(Fault(at, kind, (), rng.choice((1000, 1300)), rng.randint(0, 2 * len(nodes))))
            if rng.random() < 0.7:
                faults.append(Fault(at, "restart" if rng.random() < 0.5 else "fail", (who,)))
        elif kind == "loss":
            faults.append(Fault(at, kind, (), span, rng.choice((5, 30, 60))))
        elif kind == "delay":
            faults.append(Fault(at, kind, (), span, rng.choice((20, 100, 400, 3000))))
        elif kind == "crash":
            count = rng.choice((1, 1, 1, 2, len(nodes)))
            for node in sorted(rng.sample(nodes, min(count, len(nodes)))):
                faults.append(Fault(at, kind, (node,), 1000 + rng.randrange(400), rng.choice((0, 0, 1, 2, 3, 5))))
        elif kind == "power":
            count = rng.choice((1, 1, 1, 2, max(1, len(nodes) // 3), len(nodes)))
            for node in sorted(rng.sample(nodes, min(count, len(nodes)))):
                faults.append(Fault(at, kind, (node,), rng.choice((0, 800, 3000))))
        elif kind == "leave":
            faults.append(Fault(at, kind, (who,), rng.choice((0, 2000))))
        elif kind == "freeze":
            faults.append(Fault(at, kind, (who,), span * 2))
        else:
            faults.append(Fault(at, kind, (who,), span if kind == "isolate" else 0))
        at += rng.choice((0, 50, 300, 1000, 4000))
    tail = 6500 + (config.fence_ns // 1_000_000 if rng.random() < 0.3 else 0)
    plan = Schedule(seed, config, tuple(starts), tuple(faults), 0)
    return msgspec.structs.replace(plan, end_ms=max(at, plan.healed_ms()) + tail)
