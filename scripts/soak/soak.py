#!/usr/bin/env python3
"""Random faults, one generation after another, in one job that has to go on: in place, all of it right, nothing growing.

    .venv/bin/python scripts/soak/soak.py [--faults 500] [--seed 1] [--ranks 4] [--json FILE]

Each generation all-reduces step numbers, which must agree on all ranks, and goes on where the job was. What strikes, and what must
hold, is in plan.py. Ends with 1 and the complaints when something does not hold, and leaves its folder then; the same seed plants
the same faults.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import plan

MARK = "HYPERPODRUN_SOAK_MARK"
STILL_S = 60
"""Nothing entered for so long is a deadlock: each deadline in the job is shorter."""

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
    log: bool = False

    @property
    def command(self) -> str:
        """To run the same again."""
        return f".venv/bin/python scripts/soak/soak.py --faults {self.faults} --seed {self.seed} --ranks {self.ranks}"

    def run(self, folder: Path) -> dict[str, Any]:
        """Run it; what came of it, `complaints` empty when all held."""
        orders = plan.plan(self.faults, self.ranks, self.seed)
        (folder / "faults").write_text("\n".join(map(str, orders)))
        (folder / "worker.py").write_text(WORKER)
        began_s = time.monotonic()
        with Job(self, folder) as job:
            code = job.wait()
        output = (folder / "output").read_text(errors="replace")
        hit = plan.struck(output)
        found = [] if code == 0 else [f"the job ended with {code}"] if code is not None else [job.stuck]
        found += [str(text) for text in read(folder / "wrong")]
        entries = [plan.Entry(**one) for one in read(folder / "entries")]
        reduced: dict[int, set[int]] = {}
        for generation, rank in read(folder / "reduced"):
            reduced.setdefault(generation, set()).add(rank)
        last = max(reduced, default=-1)
        found += plan.complaints(entries, reduced, hit, self.ranks, last)
        if code == 0 and sorted(rank for _, rank, _ in read(folder / "returned")) != list(range(self.ranks)):
            found.append("the function did not return on all ranks")
        if len({committed for *_, committed in read(folder / "returned")}) > 1:
            found.append(f"ranks returned at different steps: {read(folder / 'returned')}")
        if left := [name for name in os.listdir("/dev/shm") if job.job_id in name]:
            found.append(f"left in /dev/shm: {sorted(left)}")
        return {
            "command": self.command,
            "faults struck": len(hit),
            "by kind": dict(sorted(Counter(order.kind for order in hit).items())),
            "generations": last + 1,
            "seconds": round(time.monotonic() - began_s, 1),
            "processes": {rank: len({e.pid for e in entries if e.rank == rank}) for rank in range(self.ranks)},
            "witness": witness(entries, self.seed % self.ranks),
            "complaints": found,
        }


class Job:
    """The launcher and all that it started; nothing of it is left behind."""

    def __init__(self, soak: Soak, folder: Path) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self.job_id = f"soak-{self._mark}"
        self.stuck = ""
        limits = ["--max-restarts", "100000", "--max-rank-faults", "100000"]
        options = ["--inprocess-restart", "--nproc-per-node", str(soak.ranks), *limits]
        options += ["--hang-timeout", str(plan.HANG_S), "--abort-timeout", str(plan.ABORT_S), "--job-id", self.job_id]
        options += ["--restart-window", str(plan.WINDOW_S), "--server-port", "-1"]
        environment = {
            **os.environ,
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "SOAK_DIR": str(folder),
            "SOAK_STEPS": str(plan.STEPS),
            "SOAK_STEP_S": str(plan.STEP_S),
            "HYPERPODRUN_INJECT": f"@{folder}/faults",
            "HYPERPODRUN_INJECT_DIR": str(folder / "claims"),
        }
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).parent / "hyperpodrun"), *options, str(folder / "worker.py")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        while pids := self._pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()

    def wait(self) -> int | None:
        """The job's exit code; None when it stood still for STILL_S, and then `stuck` says where."""
        entries, size, moved_s, told = self._folder / "entries", -1, time.monotonic(), 0
        while True:
            try:
                return self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass
            now = entries.stat().st_size if entries.exists() else 0
            if now != size:
                size, moved_s = now, time.monotonic()
                if (generation := max((one["generation"] for one in read(entries)), default=0)) >= told + 25:
                    told = generation
                    print(f"  generation {generation}", file=sys.stderr, flush=True)
            if time.monotonic() - moved_s > STILL_S:
                generation = max((one["generation"] for one in read(entries)), default=-1)
                self.stuck = f"stuck in generation {generation}: no rank entered the function for {STILL_S} s"
                for pid in {one["pid"] for one in read(entries)} & set(self._pids()):
                    os.kill(pid, signal.SIGUSR1)  # their stacks, into the output
                time.sleep(2)
                return None

    def _pids(self) -> list[int]:
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue
        return found


def read(path: Path) -> list[Any]:
    """The records of one file; what a killed process was writing is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


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
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="workers, at least 3 (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here too")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, terminated)
    folder = Path(tempfile.mkdtemp(prefix="hyperpodrun-soak-"))
    outcome = Soak(chosen.faults, chosen.seed, chosen.ranks).run(folder)
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
