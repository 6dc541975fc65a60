"""What a launcher costs while its job runs: memory, CPU time, threads; torchrun and hyperpodrun in turn.

    .venv/bin/python scripts/bench/footprint.py [--quick] [--seconds 20] [--json FILE]

- launcher: the process that was started and the agent below it, while four workers sleep that import nothing. Resident
  memory counts pages shared with others in full, proportional memory (PSS) counts a page that n processes map as 1/n;
- all helpers: the same with whatever else the launcher keeps that is not a worker (its forkserver);
- whole job: launcher, helpers and four workers that have imported torch, as PSS, so that shared pages count once;
- CPU: run time of the launcher and all helpers in the kernel's books over the seconds given, in percent of one core.
"""

import os
import time
from pathlib import Path

from side_by_side import LEAVE, Figures, Launcher, Run, main, marked, options, started

RANKS = 4
MIB = 1024 * 1024

SLEEP = (
    LEAVE
    + """
import signal
leave("asleep", os.getpid())
signal.pause()
"""
)


def children(pid: int) -> list[int]:
    """Direct children of a process, over all its threads."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def memory_bytes(pid: int, kind: str) -> int:
    """`kind` (Rss or Pss) of one process, from the kernel's summary of its mappings."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {kind} in /proc/{pid}/smaps_rollup")


def threads(pid: int) -> int:
    """Threads of one process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that the threads of a process have had, from the scheduler's nanoseconds."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def asleep(run: Run) -> tuple[list[int], list[int], list[int]]:
    """Once all workers sleep: (launcher and agent, all helpers beside the workers, everything)."""
    workers = {int(pid) for pid in run.until(lambda: run.values("asleep", RANKS), f"{RANKS} sleeping workers")}
    everything = marked(run.mark)
    helpers = [pid for pid in everything if pid not in workers]
    # hyperpodrun is two processes: the one that was started and its child, whose children in turn are the workers.
    agents = [pid for pid in children(run.pid) if pid not in workers and workers & set(children(pid))]
    return [run.pid, *agents], helpers, everything


def launcher_alone(launcher: Launcher, seconds: float) -> Figures:
    """Memory, threads and idle CPU time beside four workers that do nothing."""
    with started(launcher, SLEEP, ["--nproc-per-node", str(RANKS)], limit_s=60 + seconds) as run:
        own, helpers, _ = asleep(run)
        time.sleep(2)  # start-up work of the launcher is not idling
        began_s, before = time.monotonic(), {pid: cpu_s(pid) for pid in helpers}
        time.sleep(seconds)
        spent = sum(cpu_s(pid) - before[pid] for pid in helpers)
        took_s = time.monotonic() - began_s
        return {
            "launcher, resident MiB": sum(memory_bytes(pid, "Rss") for pid in own) / MIB,
            "launcher, proportional MiB": sum(memory_bytes(pid, "Pss") for pid in own) / MIB,
            "all helpers, resident MiB": sum(memory_bytes(pid, "Rss") for pid in helpers) / MIB,
            "all helpers, processes": len(helpers),
            "all helpers, threads": sum(threads(pid) for pid in helpers),
            f"idle CPU over {seconds:g} s, % of a core": 100 * spent / took_s,
        }


def whole_job(launcher: Launcher) -> Figures:
    """Proportional memory of everything when the workers have imported torch."""
    with started(launcher, "import torch\n" + SLEEP, ["--nproc-per-node", str(RANKS)]) as run:
        _, _, everything = asleep(run)
        return {"whole job with torch, proportional MiB": sum(memory_bytes(pid, "Pss") for pid in everything) / MIB}


if __name__ == "__main__":
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="how long CPU time is counted (20)")
    chosen = parser.parse_args()
    main("Footprint", chosen, [lambda launcher: launcher_alone(launcher, chosen.seconds), whole_job])
