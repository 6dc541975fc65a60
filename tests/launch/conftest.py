"""A launcher started as a user would, with small worker scripts; judged by exit code, output, files and /proc."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# What a worker script may use: tell(kind, **facts) leaves a note for the test, meet(kind) waits until all ranks have told it.
PROLOGUE = """
import json, os, signal, subprocess, sys, time
RANK, WORLD, ATTEMPT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def tell(kind, **facts):
    name = f"{kind}.{RANK}.{ATTEMPT}.{os.getpid()}.json"
    with open(os.path.join(FOLDER, "." + name), "w") as file:
        json.dump(dict(facts, rank=RANK, attempt=ATTEMPT, pid=os.getpid()), file)
    os.rename(os.path.join(FOLDER, "." + name), os.path.join(FOLDER, name))
def told(kind):
    return {name.split(".")[1] for name in os.listdir(FOLDER) if name.startswith(kind + ".") and name.split(".")[2] == str(ATTEMPT)}
def meet(kind="up"):
    tell(kind)
    while len(told(kind)) < WORLD:
        time.sleep(0.01)
def wait_for(name):
    while not os.path.exists(os.path.join(FOLDER, name)):
        time.sleep(0.01)
"""
LIMIT_S = 60.0


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
