"""`python -m hyperpodrun.agent.sim --seeds A:B --nodes 3:16`: run seeds in slices; count and digest of each.

`--jobs` processes share the seeds of a slice. Exit code 1 when an invariant is broken, or when it stays
undecided whether one is: prints seed, invariant and schedule. `--trace` prints the whole run of one seed.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from hashlib import blake2b

import msgspec

from hyperpodrun.agent.sim.clients import Undecided
from hyperpodrun.agent.sim.faults import Schedule, random_schedule
from hyperpodrun.agent.sim.judge import complaint
from hyperpodrun.agent.sim.stores import StoreWorld
from hyperpodrun.agent.sim.world import World


def run_one(schedule: Schedule, trace: bool = False, store: bool = False) -> tuple[str, str | None]:
    """(digest, what went wrong or None) of one schedule, safety and liveness. `store`: its workers use the store."""

    def show(now: int, host: str, text: str) -> None:
        print(f"{now / 1e9:10.4f} {host or '--':4} {text}")

    world = (StoreWorld if store else World)(schedule, show if trace else None)
    try:
        digest = world.run()
        world.judge()
    except (AssertionError, ValueError) as error:
        return "", f"{type(error).__name__} at {world.now / 1e9:.4f} s: {error}"
    wrong = complaint(world)
    return digest, f"I7 {wrong}" if wrong else None


def span(text: str) -> tuple[int, int]:
    """'A:B' or 'N'."""
    first, _, last = text.partition(":")
    return (int(first), int(last)) if last else (int(first), int(first) + 1)


def positive(text: str) -> int:
    """A number of at least 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m hyperpodrun.agent.sim", description=__doc__)
    parser.add_argument("--seeds", type=span, default=(0, 1000), metavar="A:B", help="seeds A to B-1, or one seed")
    parser.add_argument("--nodes", type=span, default=(3, 16), metavar="LOW:HIGH", help="slots of a job, both included")
    parser.add_argument("--slice", type=positive, default=1000, help="seeds a line of output")
    parser.add_argument("--jobs", type=positive, default=1, help="processes; the output does not depend on it but for times")
    parser.add_argument("--store", action="store_true", help="workers use the store, and what they are told is judged")
    parser.add_argument("--trace", action="store_true", help="print what happens (one process)")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first seed that fails")
    asked = parser.parse_args()
    jobs = 1 if asked.trace else asked.jobs
    failed = 0
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        for first in range(asked.seeds[0], asked.seeds[1], asked.slice):
            seeds = range(first, min(first + asked.slice, asked.seeds[1]))
            chunk = max(1, min(50, len(seeds) // (4 * jobs)))
            one = partial(run_seed, nodes=asked.nodes, trace=asked.trace, store=asked.store)
            results = map(one, seeds) if pool is None else pool.map(one, seeds, chunksize=chunk)
            failed += tell_slice(asked, seeds, results)
            if failed and not asked.go_on:
                break
    return 1 if failed else 0


def run_seed(seed: int, nodes: tuple[int, int], trace: bool, store: bool) -> tuple[str, str | None]:
    """`run_one` of the schedule of a seed."""
    return run_one(random_schedule(seed, *nodes), trace, store)


def tell_slice(asked: argparse.Namespace, seeds: range, results: Iterable[tuple[str, str | None]]) -> int:
    """Print count and digest of these seeds, whose results come in their order; how many are not good."""
    total = blake2b(digest_size=16)
    began = time.monotonic()
    failed = undecided = 0
    count = 0
    for seed, (digest, wrong) in zip(seeds, results, strict=False):
        total.update(digest.encode())
        count += 1
        if wrong is not None:
            if wrong.startswith(Undecided.__name__):
                undecided += 1
            else:
                failed += 1
            print(f"seed {seed}: {wrong}", flush=True)
            if not asked.go_on:
                print(msgspec.json.encode(random_schedule(seed, *asked.nodes)).decode())
                break
    took = time.monotonic() - began
    each = 1000 * took / max(1, count)
    first = seeds.start
    bad = f"{failed} failed, {undecided} undecided" if asked.store else f"{failed} failed"
    print(
        f"seeds {first}:{first + count}: {count}, {bad}, digest {total.hexdigest()}, {took:.1f} s, {each:.0f} ms each",
        flush=True,
    )
    return failed + undecided


if __name__ == "__main__":
    sys.exit(main())
