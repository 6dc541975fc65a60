"""How long from the start of the launcher until the workers run, torchrun and hyperpodrun in turn.

    .venv/bin/python scripts/bench/launch.py [--quick] [--ranks 1,2,4,8] [--json FILE]

- first line: one worker that imports nothing prints the time (CLOCK_MONOTONIC, the same clock in every process);
- console: the same line has come out of the launcher;
- N ranks: the slowest of N workers is past `init_process_group("gloo")` and a barrier.
"""

import time

from side_by_side import LEAVE, Figures, Launcher, main, options, started

TRIVIAL = (
    LEAVE
    + """
import time
now = time.monotonic()
print("first line", flush=True)
leave("first", now)
"""
)

BARRIER = (
    LEAVE
    + """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
leave("past", time.monotonic())
dist.destroy_process_group()
"""
)


def trivial(launcher: Launcher) -> Figures:
    """Start -> first line of a worker that imports nothing, seen in the worker and on the console."""
    with started(launcher, TRIVIAL, ["--nproc-per-node", "1"]) as run:
        seen = run.until(lambda: time.monotonic() if b"first line" in run.output_path.read_bytes() else None, "the first line")
        (first,) = run.until(lambda: run.values("first", 1), "the worker's time")
        run.success()
    return {"first line of a trivial worker, s": first - run.started_s, "the same line on the console, s": seen - run.started_s}


def barrier(launcher: Launcher, ranks: int) -> Figures:
    """Start -> the slowest of `ranks` workers is past gloo's init and a barrier."""
    with started(launcher, BARRIER, ["--nproc-per-node", str(ranks)]) as run:
        past = run.until(lambda: run.values("past", ranks), f"{ranks} ranks past the barrier")
        run.success()
    return {f"{ranks} rank{'s' * (ranks > 1)} past gloo init + barrier, s": max(past) - run.started_s}


if __name__ == "__main__":
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="1,2,4,8", help="worker counts, by commas (1,2,4,8)")
    chosen = parser.parse_args()
    counts = [int(count) for count in chosen.ranks.split(",") if count]
    main("Launch", chosen, [trivial, *(lambda launcher, ranks=ranks: barrier(launcher, ranks) for ranks in counts)])
