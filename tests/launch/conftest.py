"""A launcher started as a user would, with small worker scripts; judged by exit code, output, files and /proc."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperpodrun.agent import vote_file

# What a worker script may use: tell(kind, **facts) leaves a note for the test, meet(kind) waits until all ranks have told it.
PROLOGUE = """
import json, os, signal, subprocess, sys, time
RANK, WORLD, ATTEMPT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
GENERATION = int(os.environ["HYPERPODRUN_GENERATION"])
def tell(kind, **facts):
    name = f"{kind}.{RANK}.{GENERATION}.{os.getpid()}.json"
    facts = dict(facts, rank=RANK, world=WORLD, attempt=ATTEMPT, generation=GENERATION, side=os.environ.get("SIDE"), pid=os.getpid())
    with open(os.path.join(FOLDER, "." + name), "w") as file:
        json.dump(facts, file)
    os.rename(os.path.join(FOLDER, "." + name), os.path.join(FOLDER, name))
def told(kind):
    names = [name.split(".") for name in os.listdir(FOLDER) if name.startswith(kind + ".")]
    return {name[1] for name in names if name[2] == str(GENERATION)}
def meet(kind="up"):
    tell(kind)
    while len(told(kind)) < WORLD:
        time.sleep(0.01)
def wait_for(name):
    while not os.path.exists(os.path.join(FOLDER, name)):
        time.sleep(0.01)
"""
LIMIT_S = float(os.environ.get("LAUNCH_LIMIT_S", "60"))


def alive(pid: int) -> bool:
    """Is this pid a live process (no zombie)?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Launch:
    """One started launcher."""

    def __init__(self, folder: Path, argv: list[str], env: dict[str, str], **popen: Any) -> None:
        self.folder = folder
        self.mark = env["LAUNCH_MARK"]
        self.out_path, self.err_path = folder / f"out-{uuid.uuid4().hex}", folder / f"err-{uuid.uuid4().hex}"
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            popen = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "start_new_session": True, "cwd": folder} | popen
            self.process = subprocess.Popen(argv, env=env, **popen)
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    def story(self) -> str:
        return f"\n--- code {self.process.poll()}\n--- out\n{self.out[-3000:]}\n--- err\n{self.err[-3000:]}"

    def until(self, check: Callable[[], Any], what: str) -> Any:
        """Wait for something that must come while or after the launcher runs."""
        end_s = time.monotonic() + LIMIT_S
        while not (value := check()):
            assert time.monotonic() < end_s, f"no sign of {what}{self.story()}"
            time.sleep(0.01)
        return value

    def notes(self, kind: str, **same: Any) -> list[dict[str, Any]]:
        rows = [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{kind}.*.json"))]
        return [row for row in rows if all(row.get(key) == value for key, value in same.items())]

    def until_told(self, kind: str, count: int, **same: Any) -> list[dict[str, Any]]:
        self.until(lambda: len(self.notes(kind, **same)) >= count, f"{count} notes {kind!r}")
        return self.notes(kind, **same)

    def code(self) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher does not end{self.story()}") from None

    def family(self) -> list[int]:
        """Live processes with this launch's mark in their environment."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    if self.mark.encode() in Path(f"/proc/{entry}/environ").read_bytes() and alive(int(entry)):
                        found.append(int(entry))
                except OSError:
                    continue
        return found

    def agent(self) -> int:
        """Pid of the agent: the keeper's only child."""
        return int(self.until(lambda: Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split(), "an agent")[0])

    def nothing_left(self) -> None:
        self.until(lambda: not self.family(), "the end of all processes")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launch]]:
    """launch(*options, script=text, args=(), env={}) -> Launch; ended with all its processes after the test.

    Its run folder goes to a folder of its own, `tmp_path / "tmp"`, which must be empty afterwards.
    """
    started: list[Launch] = []
    (tmp_path / "tmp").mkdir()

    def start(
        *options: str, script: str = "", args: tuple[str, ...] = (), env: dict[str, str] | None = None, **popen: Any
    ) -> Launch:
        full = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "HYPERPODRUN_", "TORCHELASTIC_"))}
        full |= {"LAUNCH_MARK": f"launch-{uuid.uuid4().hex}", "TMPDIR": str(tmp_path / "tmp")} | (env or {})
        words = [sys.executable, "-m", "hyperpodrun", *options]
        if script:
            path = tmp_path / f"worker-{len(started)}.py"
            path.write_text(f"FOLDER = {str(tmp_path)!r}\n{PROLOGUE}{textwrap.dedent(script)}")
            words.append(str(path))
        started.append(Launch(tmp_path, [*words, *args], full, **popen))
        return started[-1]

    yield start
    for run in started:
        for _ in range(200):
            left = run.family() + ([run.pid] if run.process.poll() is None else [])
            if not left:
                break
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.01)
        run.process.wait()


class Nodes:
    """The agents of one job, all on this host: node `index` listens on a port of its own and its workers see SIDE=<index>."""

    def __init__(self, launch: Callable[..., Launch], ports: Iterator[int], shm_before: set[str]) -> None:
        self._launch = launch
        self._shm_before = shm_before
        self.ports = ports
        self.port: dict[int, int] = {}
        self.job = f"job-{uuid.uuid4().hex[:8]}"
        self.listed: tuple[int, ...] = ()
        self.runs: dict[int, Launch] = {}

    def contacts(self, *indexes: int) -> None:
        """These nodes are the contact points, in this order."""
        self.listed = indexes
        for index in indexes:
            self.port.setdefault(index, next(self.ports))

    def options(self, index: int) -> list[str]:
        """What makes an agent node `index` of this job."""
        mine = self.port.setdefault(index, next(self.ports))
        peers = ",".join(f"127.0.0.1:{self.port[i]}" for i in self.listed)
        return [f"--peers={peers}", f"--mesh-port={mine}", f"--job-id={self.job}", "--shutdown-timeout=3"]

    def start(self, index: int, *options: str, env: dict[str, str] | None = None, **more: Any) -> Launch:
        """Start (again) node `index`."""
        run = self._launch(*self.options(index), *options, env={"SIDE": str(index)} | (env or {}), **more)
        self.runs[index] = run
        return run

    def start_all(self, *options: str, **more: Any) -> list[Launch]:
        """Start every listed node with the same options."""
        return [self.start(index, *options, **more) for index in self.listed]

    def name(self, index: int) -> str:
        """Node `index` as agents call it."""
        return f"127.0.0.1:{self.port[index]}"

    def story(self) -> str:
        return "".join(f"\n=== node {index}{run.story()}" for index, run in self.runs.items())

    def codes(self) -> list[int]:
        """Wait for the end of all that still run; exit codes by index."""
        return [self.runs[index].code() for index in sorted(self.runs)]

    def up(self, count: int, **same: Any) -> list[dict[str, Any]]:
        """Wait until so many ranks of such a world have met."""
        run = next(iter(self.runs.values()))

        def seen() -> list[dict[str, Any]]:
            rows = run.notes("up", **same)
            return rows if len(rows) >= count else []

        end_s = time.monotonic() + LIMIT_S
        while not (rows := seen()):
            assert time.monotonic() < end_s, f"not {count} ranks up with {same}: {run.notes('up')}{self.story()}"
            time.sleep(0.01)
        return rows

    def up_after(self, count: int, generation: int) -> list[dict[str, Any]]:
        """Wait until so many ranks of one world after this generation have met."""
        run = next(iter(self.runs.values()))

        def seen() -> list[dict[str, Any]]:
            rows = [row for row in run.notes("up") if row["generation"] > generation]
            rows = [row for row in rows if row["generation"] == max(row["generation"] for row in rows)]
            return rows if len(rows) >= count else []

        end_s = time.monotonic() + LIMIT_S
        while not (rows := seen()):
            assert time.monotonic() < end_s, (
                f"not {count} ranks up after generation {generation}: {run.notes('up')}{self.story()}"
            )
            time.sleep(0.01)
        return rows

    def world(self, rows: list[dict[str, Any]]) -> list[str]:
        """By rank: on which node it is."""
        return [row["side"] for row in sorted(rows, key=lambda row: int(row["rank"]))]

    def nothing_left(self) -> None:
        """No process, no run folder, no vote file."""
        for run in self.runs.values():
            run.nothing_left()
        for run in self.runs.values():
            assert os.listdir(run.folder / "tmp") == []
        left = {name for name in set(os.listdir("/dev/shm")) - self._shm_before if name.startswith("hyperpodrun-")}
        mine = {os.path.basename(vote_file.path_for(self.job, self.name(index))) for index in self.port}
        assert not left & mine, f"vote files left: {left & mine}"


def _free_ports() -> Iterator[int]:
    """Ports below the ephemeral range that nobody listens on; each once. Test processes that run at the same time have others."""
    first = 20000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4 * 2750
    port = first + os.getpid() * 37 % 2750
    while True:
        port = port + 1 if port < first + 2749 else first
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError:
            continue
        yield port


@pytest.fixture(scope="session")
def free_ports() -> Iterator[int]:
    return _free_ports()


@pytest.fixture
def nodes(launch: Callable[..., Launch], free_ports: Iterator[int]) -> Nodes:
    """Agents of one job on this host; name the contact points first: nodes.contacts(0, 1)."""
    return Nodes(launch, free_ports, set(os.listdir("/dev/shm")))
