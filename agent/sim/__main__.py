"""`python -m hyperpodrun.agent.sim --seeds A:B --nodes 3:16`: run seeds in slices; count and digest of each.

Exit code 1 when an invariant is broken: prints seed, invariant and schedule. `--trace` prints the whole run of one
seed.
"""

import argparse
import sys
import time
from hashlib import blake2b

import msgspec

from hyperpodrun.agent.sim.faults import Schedule, random_schedule
from hyperpodrun.agent.sim.judge import complaint
from hyperpodrun.agent.sim.world import World


def run_one(schedule: Schedule, trace: bool = False) -> tuple[str, str | None]:
    """(digest, what went wrong or None) of one schedule, safety and liveness."""

    def show(now: int, host: str, text: str) -> None:
        print(f"{now / 1e9:10.4f} {host or '--':4} {text}")

    world = World(schedule, show if trace else None)
    try:
        digest = world.run()
    except (AssertionError, ValueError) as error:
        return "", f"{type(error).__name__} at {world.now / 1e9:.4f} s: {error}"
    wrong = complaint(world)
    return digest, f"I7 {wrong}" if wrong else None


def span(text: str) -> tuple[int, int]:
    """'A:B' or 'N'."""
    first, _, last = text.partition(":")
    return (int(first), int(last)) if last else (int(first), int(first) + 1)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m hyperpodrun.agent.sim", description=__doc__)
    parser.add_argument("--seeds", type=span, default=(0, 1000), metavar="A:B", help="seeds A to B-1, or one seed")
    parser.add_argument("--nodes", type=span, default=(3, 16), metavar="LOW:HIGH", help="slots of a job, both included")
    parser.add_argument("--slice", type=int, default=1000, help="seeds a line of output")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first seed that fails")
    asked = parser.parse_args()
    failed = 0
    for first in range(asked.seeds[0], asked.seeds[1], asked.slice):
        failed += run_slice(asked, first, min(first + asked.slice, asked.seeds[1]))
        if failed and not asked.go_on:
            break
    return 1 if failed else 0


def run_slice(asked: argparse.Namespace, first: int, last: int) -> int:
    """Run these seeds, print their count and digest; how many failed."""
    total = blake2b(digest_size=16)
    began = time.monotonic()
    failed = 0
    count = 0
    for seed in range(first, last):
        schedule = random_schedule(seed, *asked.nodes)
        digest, wrong = run_one(schedule, asked.trace)
        total.update(digest.encode())
        count += 1
        if wrong is not None:
            failed += 1
            print(f"seed {seed}: {wrong}", flush=True)
            if not asked.go_on:
                print(msgspec.json.encode(schedule).decode())
                break
    took = time.monotonic() - began
    each = 1000 * took / max(1, count)
    print(
        f"seeds {first}:{first + count}: {count}, {failed} failed, digest {total.hexdigest()}, {took:.1f} s, {each:.0f} ms each",
        flush=True,
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
