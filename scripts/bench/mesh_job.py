"""One job of several nodes on this machine: every node a launcher of its own, on a loopback port of its own.

Workers write a line when they are up, and one when they are about to fail; these time stamps (monotonic, the same clock for all
processes) are what the figures are made of. The agents' decisions are read from their output, which is
looked at every `LOOK_S`.
"""

import json
import os
import random
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple, TypeVar

from side_by_side import BenchmarkError, Launcher, Run, marked

from hyperpodrun.agent import vote_file
from hyperpodrun.agent.workers.rendezvous import FIRST_PORT, is_free

LOOK_S = 0.002
FAIL = signal.SIGUSR1
"""A worker that gets this notes the time and ends with code 3."""

SAY = """\
import json, os, signal, time
def say(what):
    e = os.environ
    world = [int(e["WORLD_SIZE"]), e["TORCHELASTIC_RESTART_COUNT"], e.get("HYPERPODRUN_GENERATION", e["MASTER_PORT"])]
    line = json.dumps({"what": what, "at_s": time.monotonic(), "rank": int(e["RANK"]), "pid": os.getpid(), "world": world})
    fd = os.open(e["BENCH_DIR"] + "/events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode() + b"\\n")
    os.close(fd)
"""
SLEEPER = (
    SAY
    + """
def fail(*_):
    say("fails")
    os._exit(3)
signal.signal(signal.SIGUSR1, fail)
say("up")
while True:
    signal.pause()
"""
)
"""A worker that imports nothing: "up" is its first line."""
TRAINER = (
    SAY
    + """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
say("up")
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""
)
"""A worker that notices when another one is gone: "up" once the first all-reduce is done."""
VIEW = re.compile(rb"\bview (\d+): ")

T = TypeVar("T")


class Up(NamedTuple):
    """One worker's word."""

    what: str
    at_s: float
    rank: int
    pid: int
    world: tuple[int, str, str]
    node: int


class Decision(NamedTuple):
    """A view line in the output of a node, and when it was seen there (monotonic)."""

    at_s: float
    node: int
    number: int


class Job:
    """`arguments` gives a node's command line without the script; nodes are counted from 0, each with `limit_s` to live."""

    def __init__(
        self, folder: Path, launcher: Launcher, count: int, arguments: Callable[[int], list[str]], worker: str, limit_s: float
    ) -> None:
        self.folder, self.launcher, self.count = folder, launcher, count
        self.nodes: dict[int, Run] = {}
        self.decisions: list[Decision] = []
        self._arguments = arguments
        self._limit_s = limit_s
        self._starts = 0
        self._read: dict[Path, int] = {}
        self._words: list[Up] = []
        self._folders: list[tuple[Path, int]] = []
        (folder / "worker.py").write_text(worker)

    def start(self, node: int) -> float:
        """Start this node's launcher; the time."""
        self._starts += 1
        own = self.folder / f"{node}.{self._starts}"
        own.mkdir()
        self._folders.append((own, node))
        status = {"HYPERPODRUN_STATUS_FILE": str(own / "status")}
        launcher = self.launcher._replace(environment={**self.launcher.environment, **status})
        run = Run(launcher, own, [*self._arguments(node), str(self.folder / "worker.py")], self._limit_s)
        self.nodes[node] = run
        return run.started_s

    def start_all(self) -> None:
        """Start all nodes, the first one first."""
        for node in range(self.count):
            self.start(node)

    def look(self) -> None:
        """Read what the agents have said since the last look."""
        for node, run in self.nodes.items():
            if text := self._more(run.output_path):
                now_s = time.monotonic()
                self.decisions += (Decision(now_s, node, int(number)) for number in VIEW.findall(text))

    def _more(self, path: Path) -> bytes:
        """Whole lines that were written to a file since the last call; b"" where there is none."""
        begin = self._read.get(path, 0)
        try:
            if path.stat().st_size <= begin:
                return b""
        except FileNotFoundError:
            return b""
        with path.open("rb") as file:
            file.seek(begin)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read[path] = begin + whole
        return text[:whole]

    def until(self, look: Callable[[], T | None], what: str, limit_s: float) -> T:
        """Wait until `look` returns something; after `limit_s` it is an error that shows the end of every node's output."""
        end_s = time.monotonic() + limit_s
        while True:
            self.look()
            if (found := look()) is not None:
                return found
            if time.monotonic() > end_s:
                tails = "\n".join(
                    f"node {n}: {run.output_path.read_text(errors='replace')[-600:]}" for n, run in self.nodes.items()
                )
                raise BenchmarkError(f"{self.launcher.name}: {what} was not seen within {limit_s:g} s. The outputs end:\n{tails}")
            time.sleep(LOOK_S)

    def words(self) -> list[Up]:
        """What the workers have written so far, in no order."""
        for own, node in self._folders:
            for line in self._more(own / "events").splitlines():
                word = json.loads(line)
                self._words.append(Up(word["what"], word["at_s"], word["rank"], word["pid"], tuple(word["world"]), node))
        return self._words

    def up(self, sizes: tuple[int, ...], since_s: float, limit_s: float) -> tuple[float, list[Up]]:
        """When all ranks of the first world of one of these sizes that started after `since_s` were up, and they by rank."""

        def look() -> tuple[float, list[Up]] | None:
            worlds: dict[tuple[int, str, str], dict[int, Up]] = {}
            for word in self.words():
                if word.what == "up" and word.at_s > since_s and word.world[0] in sizes:
                    worlds.setdefault(word.world, {})[word.rank] = word
            whole = [ranks for world, ranks in worlds.items() if len(ranks) == world[0]]
            if not whole:
                return None
            return min((max(word.at_s for word in ranks.values()), [ranks[r] for r in sorted(ranks)]) for ranks in whole)

        return self.until(look, f"a world of {' or '.join(map(str, sizes))} ranks", limit_s)

    def decided(self, since_s: float) -> float:
        """When the first view line after `since_s` was seen on any node."""
        return min(decision.at_s for decision in self.decisions if decision.at_s > since_s)

    def status(self, node: int) -> tuple[float, dict[str, object]] | None:
        """The node's state file and when it was written (Unix seconds); None before there is one."""
        path = self.nodes[node].folder / "status"
        try:
            with path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns / 1e9, json.load(file)
        except OSError:
            return None

    def agent(self, node: int) -> int:
        """The agent's process."""
        found = self.until(lambda: self.status(node), f"the state file of node {node}", 10)
        pid = found[1]["agent_pid"]
        assert isinstance(pid, int)
        return pid

    def kill(self, node: int) -> float:
        """SIGKILL to every process of a node, workers included, at one stroke; the time before it."""
        run = self.nodes.pop(node)
        pids = marked(run.mark)
        at_s = time.monotonic()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        run.sweep()
        return at_s

    def close(self) -> None:
        """End everything of this job, all nodes at one stroke: else those that are left would begin to look for the others."""
        for pid in marked(*(run.mark for run in self.nodes.values())):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        errors = []
        for run in self.nodes.values():
            try:
                run.sweep()
            except BenchmarkError as error:
                errors.append(str(error))
        if errors:
            raise BenchmarkError("\n".join(errors))


@contextmanager
def job(
    launcher: Launcher, count: int, arguments: Callable[[int], list[str]], worker: str = SLEEPER, limit_s: float = 300
) -> Iterator[Job]:
    """A job of `count` nodes, none of them started yet; nothing is left of it afterwards."""
    folder = Path(mkdtemp(prefix="hyperpodrun-bench-mesh-"))
    running = Job(folder, launcher, count, arguments, worker, limit_s)
    try:
        yield running
    finally:
        running.close()
        if isinstance(arguments, Mesh):
            for path in arguments.votes():  # of nodes that were killed: kept for a node that comes back
                path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


class Mesh:
    """Command lines of hyperpodrun for `count` nodes that know each other's free loopback ports."""

    def __init__(self, count: int, *more: str, nnodes: str = "") -> None:
        self._ports = free_ports(count)
        self._job_id = f"bench-{uuid.uuid4().hex[:8]}"
        peers = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self._common = ["--nnodes", nnodes or str(count), "--peers", peers, "--job-id", self._job_id, "--local-addr", "127.0.0.1"]
        self._common += ["--max-restarts", "1000", "--shutdown-timeout", "3", *more]

    def __call__(self, node: int) -> list[str]:
        """The node's command line without its script."""
        return [*self._common, "--mesh-port", str(self._ports[node])]

    def votes(self) -> list[Path]:
        """Where the nodes' votes lie, as long as they do."""
        paths = [Path(vote_file.path_for(self._job_id, f"127.0.0.1:{port}")) for port in self._ports]
        return [path for path in paths if path.exists()]


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds now, that no outgoing connection will be given, nor the store of an agent that is started before the
    one whose port it is.
    """
    below = range(FIRST_PORT - 2000, FIRST_PORT)
    return list(islice((port for port in random.sample(below, len(below)) if is_free(port)), count))
