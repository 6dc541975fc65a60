"""Pre- and post-train scripts: how they are run and ended."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.workers.script import Script


class Runner:
    """A script under a reactor that reaps like the agent does."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.watched: dict[int, Callable[[int], None]] = {}
        self.script = Script(self.reactor, self.watched.__setitem__, "")
        self.status: int | None = None

    def start(self, path: Path, *args: str) -> None:
        self.read, write = os.pipe()
        self.script.start(str(path), args, os.environb, (write, write), lambda status: setattr(self, "status", status))
        os.close(write)

    def finish(self) -> tuple[int, str]:
        """(wait status, output)"""
        while self.status is None:
            self.reactor.turn(0.01)
            for pid, callback in list(self.watched.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del self.watched[pid]
                    callback(status)
        with os.fdopen(self.read) as file:
            return self.status, file.read()


@pytest.mark.parametrize(
    ("name", "text", "mode"),
    [
        ("tool", "#!/bin/sh\necho got $1 and $2", 0o755),
        ("plain.sh", "echo got $1 and $2", 0o644),
        ("code.py", "import sys; print('got', sys.argv[1], 'and', sys.argv[2])", 0o644),
    ],
    ids=["executable", "shell", "python"],
)
def test_each_kind_of_script_is_run_with_its_arguments(tmp_path: Path, name: str, text: str, mode: int) -> None:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(mode)
    run = Runner()
    run.start(path, "a b", "c")
    assert run.finish() == (0, "got a b and c\n")


def test_kill_ends_the_script_and_what_it_started(tmp_path: Path) -> None:
    path = tmp_path / "deaf.sh"
    path.write_text("trap '' TERM; sleep 300 & echo up; wait; wait; sleep 300")
    run = Runner()
    run.start(path)
    assert os.read(run.read, 3) == b"up\n"
    run.script.stop(kill=False, grace_s=0.05)
    status, rest = run.finish()  # the pipe's end also means that the child in the background is gone
    assert status == signal.SIGKILL
    assert rest == ""


def test_unrunnable_script_is_an_error_of_the_system(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)
    run = Runner()
    with pytest.raises(OSError, match="Exec format"):
        run.start(path)
    os.close(run.read)
