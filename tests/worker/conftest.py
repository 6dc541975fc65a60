"""Start workers for real: `launch` runs a lone agent, `plain` the same program under the interpreter itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

AGENT = os.path.join(os.path.dirname(__file__), "lone_agent.py")


class Outcome:
    """What came of one lone agent: its report, and the text of each stream by file name."""

    def __init__(self, report: dict[str, Any], folder: str) -> None:
        self.said: list[str] = report["said"]
        self.attempts: list[Any] = report["attempts"]
        self.codes: list[int] = report["codes"]
        self.left: int = report["left"]
        self.servers: int = report["servers"]
        self.pid: int = report["pid"]
        self.folder = folder

    def text(self, name: str) -> str:
        with open(os.path.join(self.folder, name), encoding="utf-8", errors="surrogateescape") as file:
            return file.read()

    def code(self, rank: int = 0) -> int:
        """Exit code of a rank in the last attempt; minus the signal for one that was killed."""
        return os.waitstatus_to_exitcode(self.attempts[-1][str(rank)])


Launch = Callable[..., Outcome]


@pytest.fixture
def work(tmp_path):  # type: ignore[no-untyped-def]
    """An empty folder to start things in; `work.write(name, text)` puts a file there."""
    (tmp_path / "streams").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def launch(work):  # type: ignore[no-untyped-def]
    """launch(target, *args, run_as="script", python=[flags], popen={...}, **order) -> Outcome."""

    def run(
        target: str,
        *args: str,
        run_as: str = "script",
        python: tuple[str, ...] = (),
        popen: dict[str, Any] | None = None,
        **order: Any,
    ) -> Outcome:
        folder = str(work.parent / "streams")
        order = {"program": {"run_as": run_as, "target": target, "args": args}, "out": folder, **order}
        (work.parent / "order").write_text(json.dumps(order))
        more = {"cwd": work, "stdin": subprocess.DEVNULL, **(popen or {})}
        done = subprocess.run(
            [sys.executable, *python, AGENT, str(work.parent / "order")], stdout=subprocess.PIPE, check=True, **more
        )
        return Outcome(json.loads(done.stdout), folder)

    return run


@pytest.fixture
def plain(work):  # type: ignore[no-untyped-def]
    """plain(*words, **popen): `python -u words` as a finished process, streams as text."""

    def run(*words: str, **popen: Any) -> subprocess.CompletedProcess[str]:
        more = {"cwd": work, "stdin": subprocess.DEVNULL, **popen}
        return subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            start_new_session=True,
            **more,
        )

    return run


@pytest.fixture(params=["forkserver", "spawn"])
def method(request):  # type: ignore[no-untyped-def]
    """Each start method in turn, as the `config` of an order."""
    return {"start_method": request.param}
