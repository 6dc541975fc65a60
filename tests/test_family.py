"""Finding and ending processes of a job, and nobody else's."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hyperpodrun.agent import family
from hyperpodrun.agent.wire import names

# A process with a child in a session of its own; prints the child's pid and waits.
PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[tuple[int, int]]:
    """(pid, child's pid) of a small family marked "mark"."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, names.FAMILY: "mark"},
    )
    assert process.stdout and process.stdin
    child = int(process.stdout.readline())
    yield process.pid, child
    for process_seen in (family.read_process(child), family.read_process(process.pid)):
        if process_seen:
            family.send(process_seen, signal.SIGKILL)
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_descendants_are_found_across_sessions(parent: tuple[int, int]) -> None:
    pid, child = parent
    found = [process.pid for process in family.members(os.getpid(), "mark")]
    assert pid in found
    assert child in found
    assert os.getpid() not in found


def test_spared_process_is_left_but_its_children_are_not(parent: tuple[int, int]) -> None:
    pid, child = parent
    found = [process.pid for process in family.members(os.getpid(), "mark", spare=[pid])]
    assert pid not in found
    assert child in found


def test_mark_is_read_from_the_environment(parent: tuple[int, int]) -> None:
    pid, child = parent
    while not family.carries(child, "mark"):
        pass  # the kernel shows the environment a moment after the program has started
    assert family.carries(pid, "mark")
    assert not family.carries(pid, "mar")
    assert not family.carries(os.getpid(), "mark")
    marked = [process.pid for process in family.members(pid, "mark", marked=True)]
    assert child in marked


def test_reused_pid_is_not_signalled(parent: tuple[int, int]) -> None:
    pid, _ = parent
    process = family.read_process(pid)
    assert process is not None
    process.started_ticks -= 1  # as if another process had had this number before
    assert not family.send(process, signal.SIGKILL)
    assert family.read_process(pid) is not None


def test_odd_names_do_not_confuse_the_reader() -> None:
    line = b"42 (a) b (c)) S 7 42 40 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 99 1 1"
    process = family.Process(42, line)
    assert (process.name, process.state, process.parent, process.session, process.started_ticks) == ("a) b (c)", "S", 7, 40, 99)


def test_vanished_process_is_none() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert family.read_process(child.pid) is None
