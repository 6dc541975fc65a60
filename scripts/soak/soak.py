#!/usr/bin/env python3
"""Random faults, one generation after another, in one job that has to go on: in place, all of it right, nothing growing.

    .venv/bin/python scripts/soak/soak.py [--faults 500] [--seed 1] [--ranks 4] [--nodes 1] [--json FILE]

With --nodes above 1 there is a launcher for each and a spare, all on this host (loopback), and agents and whole nodes are killed, too;
these come back as the spare.

Each generation all-reduces step numbers, which must agree on all ranks, and goes on where the job was. What strikes, and what must
hold, is in plan.py. Ends with 1 and the complaints when something does not hold, and leaves its folder then; the same seed plants
the same faults.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import plan
from job import Job, read

WORKER = r"""
import faulthandler, json, os, signal, time
import torch
import torch.distributed as dist
from hyperpodrun.inprocess.progress import note_step
from hyperpodrun.inprocess.wrap import HPWrapper

faulthandler.register(signal.SIGUSR1)
folder, steps, step_s = os.environ["SOAK_DIR"], int(os.environ["SOAK_STEPS"]), float(os.environ["SOAK_STEP_S"])
job = os.environ["HYPERPODRUN_JOB_ID"]
committed = 0  # of the job; a process that is new asks the others


def add(name, record):
    with open(f"{folder}/{name}", "a") as file:
        file.write(json.dumps(record) + "\n")


def used(pid, prefix=""):
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
    return {
        prefix + "fds": len(os.listdir(f"/proc/{pid}/fd")),
        prefix + "threads": int(fields["Threads"]),
        prefix + "rss_kib": int(fields["RssAnon"].split()[0]),
    }


def wrong(text):
    add("wrong", text)
    os._exit(99)


@HPWrapper
def train(caller=None):
    global committed
    rank, world, generation = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), caller.generation
    record = {"generation": generation, "rank": rank, "pid": os.getpid(), "committed": committed, "agent_pid": os.getppid()}
    record["node"] = int(os.environ["SOAK_NODE"])
    add("entries", record | used("self") | used(os.getppid(), "agent_") | {"shm": sum(job in name for name in os.listdir("/dev/shm"))})
    dist.init_process_group("gloo")
    # Where the job is: ranks may be one step apart. Torn steps were counted by nobody or by some; never by one more.
    here = torch.tensor([committed, generation, -generation], dtype=torch.int64)
    dist.all_reduce(here, dist.ReduceOp.MAX)
    most, newest, oldest = here.tolist()
    if newest != generation or -oldest != generation:
        wrong(f"rank {rank} is in generation {generation}, others in {-oldest} to {newest}")
    if record["committed"] and not most - 1 <= committed <= most:
        wrong(f"rank {rank} is at step {committed}, another at {most}")
    committed = most
    for step in range(steps):
        number = torch.tensor([committed + 1, generation * world + rank], dtype=torch.int64)
        dist.all_reduce(number)
        want = [(committed + 1) * world, generation * world * world + world * (world - 1) // 2]
        if number.tolist() != want:
            wrong(f"rank {rank}, generation {generation}, step {committed + 1}: sum {number.tolist()}, not {want}")
        committed += 1
        if step == 0:
            add("reduced", [generation, rank])
        note_step(step)
        time.sleep(step_s)
    dist.barrier()
    return generation


last = train()
add("returned", [last, int(os.environ["RANK"]), committed])
"""


@dataclass(frozen=True, slots=True)
class Soak:
    """One job. `faults`: generations with at least one fault."""

    faults: int
    seed: int = 1
    ranks: int = 4
    nodes: int = 1

    @property
    def command(self) -> str:
        """To run the same again."""
        chosen = f"--faults {self.faults} --seed {self.seed} --ranks {self.ranks} --nodes {self.nodes}"
        return f".venv/bin/python scripts/soak/soak.py {chosen}"

    def run(self, folder: Path) -> dict[str, Any]:
        """Run it; what came of it, `complaints` empty when all held."""
        orders = plan.plan(self.faults, self.ranks, self.seed)
        (folder / "faults").write_text("\n".join(map(str, orders)))
        (folder / "worker.py").write_text(WORKER)
        began_s = time.monotonic()
        strikes = plan.strikes(self.faults, self.ranks, self.nodes, self.seed)
        with Job(folder, self.ranks, self.nodes, strikes) as job:
            code = job.wait()
        hit = plan.struck(job.output) + job.struck
        found = [] if code == 0 else [f"the job ended with {code}"] if code is not None else [job.stuck]
        found += [str(text) for text in read(folder / "wrong")]
        entries = [plan.Entry(**one) for one in read(folder / "entries")]
        reduced: dict[int, set[int]] = {}
        for generation, rank in read(folder / "reduced"):
            reduced.setdefault(generation, set()).add(rank)
        last = max(reduced, default=-1)
        found += plan.complaints(entries, reduced, hit, self.ranks, last, self.nodes)
        if code == 0 and sorted(rank for _, rank, _ in read(folder / "returned")) != list(range(self.ranks)):
            found.append("the function did not return on all ranks")
        if len({committed for *_, committed in read(folder / "returned")}) > 1:
            found.append(f"ranks returned at different steps: {read(folder / 'returned')}")
        if left := job.left():
            found.append(f"left in /dev/shm: {left}")
        by_kind = Counter(order.kind for order in plan.struck(job.output)) + Counter(job.strokes)
        return {
            "command": self.command,
            "faults struck": sum(by_kind.values()),
            "by kind": dict(sorted(by_kind.items())),
            "generations": last + 1,
            "seconds": round(time.monotonic() - began_s, 1),
            "processes": {rank: len({e.pid for e in entries if e.rank == rank}) for rank in range(self.ranks)},
            "witness": witness(entries, self.seed % self.ranks),
            "complaints": found,
        }


def witness(entries: list[plan.Entry], rank: int) -> dict[str, list[int]]:
    """First and last figures of the rank that lived through it all."""
    own = sorted((entry for entry in entries if entry.rank == rank), key=lambda entry: entry.generation)[1:]
    return {what: [asdict(own[0])[what], asdict(own[-1])[what]] for what in plan.GROWTH} if own else {}


def terminated(*_: object) -> None:
    """What was started is ended; a second signal does not break that off."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=500, metavar="N", help="generations with a fault (500)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which faults (1)")
    parser.add_argument("--ranks", type=int, metavar="N", help="workers of all nodes, at least 3 (4, or 2 a node)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes, all of them on this host (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here too")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, terminated)
    folder = Path(tempfile.mkdtemp(prefix="hyperpodrun-soak-"))
    ranks = chosen.ranks or (4 if chosen.nodes == 1 else 2 * chosen.nodes)
    if ranks < 3 or ranks % chosen.nodes:
        parser.error(f"{ranks} ranks on {chosen.nodes} nodes: at least 3, and as many on each, are needed")
    outcome = Soak(chosen.faults, chosen.seed, ranks, chosen.nodes).run(folder)
    text = json.dumps(outcome, indent=2)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    if outcome["complaints"]:
        print(f"its folder is {folder}", file=sys.stderr)
        return 1
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
