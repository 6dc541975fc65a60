"""What writes a node's versions beside the training leaves nothing half done, at the end of the process either."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hyperpodrun.recovery import shard, shm
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.parts import part_of

ENDS = """
import sys

import torch

from hyperpodrun.recovery import shard
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.parts import part_of

layer = torch.nn.Linear(1 << 24, 2)
node = NodeState(sys.argv[1], {}, print)
node.begin(-1, (), ["model"], [], True)
node.took_s = 1.0  # so much longer than a step that it is written beside the next one
node.write(7, {"model": shard.of([part_of("model", layer)])}, 1.0)
"""


def test_a_process_that_ends_finishes_the_version_under_way(tmp_path: Path) -> None:
    """A thread in torch's code when the interpreter goes away would take the process with it: SIGABRT, after all was done."""
    run = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert [version.step for version in shm.scan(str(tmp_path)) if version.check()] == [7]


class Told(Exception):
    """An order to leave, which breaks into whatever the main thread waits for."""


class Slow:
    """A version that is not whole before somebody waits for its writer. The first wait is broken into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._filled, self._broken = threading.Event(), False
        join, commit = threading.Thread.join, shm.Slots.commit

        def broken_into(thread: threading.Thread, timeout: float | None = None) -> None:
            if not self._broken:
                self._broken = True
                raise Told
            self._filled.set()
            join(thread, timeout)

        def late(slots: shm.Slots, expected: bytes = b"") -> bool:
            assert self._filled.wait(30)
            return commit(slots, expected)

        monkeypatch.setattr(threading.Thread, "join", broken_into)
        monkeypatch.setattr(shm.Slots, "commit", late)
        self.let_go = self._filled.set


def test_an_order_to_leave_that_breaks_into_the_wait_leaves_no_writer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would copy on while the next life trains in the same memory: a version of two steps, with a digest that fits."""
    slow = Slow(monkeypatch)
    node = NodeState(str(tmp_path), {}, print)
    node.begin(-1, (), ["model"], [], True)
    node.took_s = 1.0
    node.write(7, {"model": shard.of([part_of("model", torch.nn.Linear(8, 2))])}, 1.0)
    with pytest.raises(Told):
        node.settle()
    try:
        node.settle()
        assert [version.step for version in shm.scan(str(tmp_path))] == [7], "the second wait is for the end of it as well"
    finally:
        slow.let_go()


def test_a_life_that_is_over_has_nothing_mapped_but_keeps_what_has_no_room(tmp_path: Path) -> None:
    heap: dict[str, shm.HeapSlots] = {}
    for room in (True, False):
        node = NodeState(str(tmp_path), heap, print)
        node.begin(-1, (), ["model"], ["model"], room)
        for step in (1, 2):
            node.write(step, {"model": shard.of([part_of("model", torch.nn.Linear(8, 2))])}, 1.0)
        assert (str(tmp_path) in Path("/proc/self/maps").read_text()) == room
        node.close()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert [version.step for version in heap["model"].found()] == [1, 2]
