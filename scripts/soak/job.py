"""The launchers of a soak's job, and what strikes them from outside.

One launcher, or one for each node and a spare, all on this host. Whoever watches sees entries, not agents: in which generation the
job is, on which launcher each rank is, and who its agent is, all that stands there.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import plan

from hyperpodrun.agent import vote_file
from hyperpodrun.agent.workers.rendezvous import choose_port

MARK = "HYPERPODRUN_SOAK_MARK"
STILL_S = 60
"""Nothing entered for so long is a deadlock: each deadline in the job is shorter."""
LOOK_S = 0.02
MOST_AGENT_DEATHS, WITHIN_S = 3, 61
"""An agent that dies more often (keeper.py) is not started again."""


class Job:
    """All that was started; nothing of it is left behind. `nodes` above 1: with one more launcher, which stands by."""

    def __init__(self, folder: Path, ranks: int, nodes: int, strikes: list[plan.Strike]) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._ranks, self._nodes = ranks, nodes
        self._strikes = list(strikes)
        self.struck: list[plan.Order] = []
        """What may have cost processes, by rank; `strokes`: once each."""
        self.strokes: list[str] = []
        self.job_id = f"soak-{self._mark}"
        self.stuck = ""
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self._agent_deaths: dict[int, list[float]] = {}
        self._ports: list[int] = []
        while nodes > 1 and len(self._ports) <= nodes:
            self._ports.append(choose_port(frozenset(self._ports)))
        for node in range(nodes + 1 if nodes > 1 else 1):
            self._start(node)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._mark)
        for process in self._running.values():
            process.wait()

    @property
    def output(self) -> str:
        """What all launchers have said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("output*")))

    def left(self) -> list[str]:
        """In /dev/shm, once it is over."""
        votes = [vote_file.path_for(self.job_id, f"127.0.0.1:{port}") for port in self._ports]
        return sorted(
            [name for name in os.listdir("/dev/shm") if self.job_id in name] + [path for path in votes if os.path.exists(path)]
        )

    def wait(self) -> int | None:
        """The job's exit code; None when it stood still for STILL_S, and then `stuck` says where."""
        entries, size, moved_s, told = self._folder / "entries", -1, time.monotonic(), 0
        while True:
            codes = {process.poll() for process in self._running.values()}
            if None not in codes:
                return max(codes, key=lambda code: abs(code or 0))
            now = entries.stat().st_size if entries.exists() else 0
            if now != size:
                size, moved_s = now, time.monotonic()
                if (generation := self._generation()) >= told + 25:
                    told = generation
                    print(f"  generation {generation}", file=sys.stderr, flush=True)
                self._look_whether_to_strike()
            if time.monotonic() - moved_s > STILL_S:
                self.stuck = f"stuck in generation {self._generation()}: no rank entered the function for {STILL_S} s"
                for pid in {one["pid"] for one in read(entries)} & set(self._pids(self._mark)):
                    os.kill(pid, signal.SIGUSR1)  # their stacks, into the output
                time.sleep(2)
                return None
            time.sleep(LOOK_S if self._strikes else 1.0)

    # --- from outside

    def _look_whether_to_strike(self) -> None:
        """The next strike, once its generation is there."""
        if not self._strikes or self._generation() < self._strikes[0].generation:
            return
        newest = {one["rank"]: one for one in read(self._folder / "entries")}
        strike = self._strikes.pop(0)
        if (victim := newest.get(strike.rank)) is None:
            return
        node = victim["node"]
        here = [rank for rank, one in newest.items() if one["node"] == node]
        agent = strike.kind == "agent" and self._may_lose_its_agent(node)
        if not (agent or self._all_there()):
            return  # too few nodes to lose another one
        kind, first = "agent-lost" if agent else "node-lost", self._generation() - 1
        self.strokes.append(kind)
        if agent:
            os.kill(victim["agent_pid"], signal.SIGKILL)
        else:
            self._end(self._mark_of(node))
            self._running[node].wait()
            self._agent_deaths.pop(node, None)
            self._start(node)
        # It takes its time, and the job goes on meanwhile.
        generations = range(first, self._generation() + 1)
        self.struck += [plan.Order(generation, rank, kind, "outside") for rank in here for generation in generations]

    def _mark_of(self, node: int) -> str:
        return f"{self._mark}-{node}."

    def _may_lose_its_agent(self, node: int) -> bool:
        now_s = time.monotonic()
        deaths = self._agent_deaths[node] = [at_s for at_s in self._agent_deaths.get(node, []) if at_s > now_s - WITHIN_S]
        if len(deaths) >= MOST_AGENT_DEATHS:
            return False
        deaths.append(now_s)
        return True

    def _all_there(self) -> bool:
        """Does each node know of all others, the spare included?"""
        states = [self._folder / f"state{node}" for node in self._running]
        members = [(json.loads(path.read_text())["mesh"] or {}).get("members", []) for path in states if path.exists()]
        return len(members) == len(self._running) and all(len(some) == len(self._running) for some in members)

    # --- processes

    def _start(self, node: int) -> None:
        self._starts += 1
        limits = ["--max-restarts", "100000", "--max-rank-faults", "100000"]
        options = ["--inprocess-restart", "--nproc-per-node", str(self._ranks // self._nodes), *limits]
        options += ["--hang-timeout", str(plan.HANG_S), "--abort-timeout", str(plan.ABORT_S), "--job-id", self.job_id]
        options += ["--restart-window", str(plan.WINDOW_S), "--server-port", "-1"]
        if self._nodes > 1:
            peers = ",".join(f"127.0.0.1:{port}" for port in self._ports)
            options += ["--nnodes", str(self._nodes), "--spares", "1", "--peers", peers, "--mesh-port", str(self._ports[node])]
        environment = {
            **os.environ,
            MARK: self._mark_of(node),
            "OMP_NUM_THREADS": "1",
            "SOAK_DIR": str(self._folder),
            "SOAK_NODE": str(node),
            "SOAK_STEPS": str(plan.STEPS),
            "SOAK_STEP_S": str(plan.STEP_S),
            "HYPERPODRUN_INJECT": f"@{self._folder}/faults",
            "HYPERPODRUN_INJECT_DIR": str(self._folder / "claims"),
            "HYPERPODRUN_STATUS_FILE": str(self._folder / f"state{node}"),
        }
        (self._folder / f"state{node}").unlink(missing_ok=True)
        with (self._folder / (f"output{self._starts:03}" if self._nodes > 1 else "output")).open("wb") as output:
            self._running[node] = subprocess.Popen(
                [str(Path(sys.executable).parent / "hyperpodrun"), *options, str(self._folder / "worker.py")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _end(self, mark: str) -> None:
        """SIGKILL to all that bear it, until they are gone."""
        while pids := self._pids(mark):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            for process in self._running.values():
                process.poll()
            time.sleep(0.01)

    def _pids(self, mark: str) -> list[int]:
        wanted, found = f"{MARK}={mark}".encode(), []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def _generation(self) -> int:
        return max((int(one["generation"]) for one in read(self._folder / "entries")), default=-1)


def read(path: Path) -> list[Any]:
    """The records of one file; what a killed process was writing is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
