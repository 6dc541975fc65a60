"""A node's shared memory holds whole versions or says that it has none."""

import fcntl
import os
import struct
import threading
from pathlib import Path

import pytest
import torch

from hyperpodrun.recovery import parting, plan, shard, shm
from hyperpodrun.recovery.held import Given
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.parts import part_of


def model(value: float, width: int = 3000) -> shard.Shard:
    layer = torch.nn.Linear(width, 2)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.constant_(layer.bias, value)
    return shard.of([part_of("model", layer)])


def steps(folder: Path, name: str = "model") -> dict[int, float]:
    return {
        step: found.tensors[0].view(torch.float32)[0].item() for step, found in shm.Slots(str(folder), name).versions().items()
    }


def test_the_last_two_versions_are_there_for_another_process(tmp_path: Path) -> None:
    slots = shm.Slots(str(tmp_path / "job"), "model")
    for step in range(5):
        slots.write(step, model(step / 2))
        assert steps(tmp_path / "job") == {at: at / 2 for at in (step - 1, step) if at >= 0}
    slots.write(4, model(9.0))
    assert steps(tmp_path / "job") == {3: 1.5, 4: 9.0}
    assert os.stat(tmp_path / "job").st_mode & 0o777 == 0o700


def test_a_restored_version_is_written_over_what_is_newer(tmp_path: Path) -> None:
    for step in (6, 7):
        shm.Slots(str(tmp_path), "model").write(step, model(step))
    slots = shm.Slots(str(tmp_path), "model")
    slots.forget_after(5)
    slots.write(6, model(1.0))
    assert steps(tmp_path) == {6: 1.0}


@pytest.mark.parametrize("place", [0, 8, 60, 4096, -1])
def test_one_flipped_bit_makes_it_no_version(tmp_path: Path, place: int) -> None:
    slots = shm.Slots(str(tmp_path), "model")
    for step in range(2):
        slots.write(step, model(step))
    (path,) = [path for path in tmp_path.iterdir() if struct.unpack("<8sq", path.read_bytes()[:16])[1] == 1]
    text = bytearray(path.read_bytes())
    text[place] ^= 1
    path.write_bytes(text)
    assert steps(tmp_path) == {0: 0.0}


def test_a_torn_write_is_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = shm.Slots(str(tmp_path), "model")
    slots.write(0, model(0.0))

    def killed(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shm, "_digest", killed)
        slots.write(1, model(1.0))
    assert steps(tmp_path) == {0: 0.0}
    slots.write(1, model(1.0))
    assert steps(tmp_path) == {0: 0.0, 1: 1.0}


@pytest.mark.parametrize("text", [b"", b"x", bytes(200), b"HPRstate" + bytes(300)])
def test_any_file_is_read_without_harm(tmp_path: Path, text: bytes) -> None:
    shm.Slots(str(tmp_path), "model").write(0, model(0.0))
    for path in tmp_path.iterdir():
        path.write_bytes(text)
    assert steps(tmp_path) == {}


def test_a_damaged_version_is_not_removed_with_the_one_that_was_written_over_it(tmp_path: Path) -> None:
    slots = shm.Slots(str(tmp_path), "model")
    for step in (0, 1):
        slots.write(step, model(step))
    damaged, other = (next(found for found in slots.found() if found.step == step) for step in (0, 1))
    damaged.shard.tensors[0][7] ^= 4
    slots.write(2, model(2.0))
    assert Given(lambda: damaged.shard, (), damaged).whole() is None
    assert steps(tmp_path) == {1: 1.0, 2: 2.0}
    other.shard.tensors[0][7] ^= 4
    assert Given(lambda: other.shard, (), other).whole() is None
    assert steps(tmp_path) == {2: 2.0} and len([*tmp_path.iterdir()]) == 1


def test_another_shape_takes_the_files_over(tmp_path: Path) -> None:
    slots = shm.Slots(str(tmp_path), "model")
    slots.write(0, model(0.0))
    slots.write(1, model(1.0, width=9000))
    slots.write(2, model(2.0, width=10))
    assert steps(tmp_path) == {1: 1.0, 2: 2.0}


def test_too_little_room_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(shm.NoRoom, match=r"has no room for .* MiB .*remount,size="):
        shm.Slots(str(tmp_path), "model").write(0, model(0.0))
    assert list(tmp_path.iterdir()) == []


EXACT = plan.private(0, 2)


def memory_at(step: int, *small: int) -> Memory:
    """What a process remembers that committed `step`, with its private states of these steps."""
    layer = torch.nn.Linear(3000, 2)
    torch.nn.init.constant_(layer.weight, float(step))
    torch.nn.init.constant_(layer.bias, float(step))
    mine = Memory("model", [part_of("model", layer)])
    mine.committed(step)
    for at in small:
        mine.state(EXACT).put(at, str(at).encode())
    return mine


def everything(folder: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for version in shm.scan(str(folder)):
        assert version.check()
        if version.name == "model":
            assert version.shard.tensors[0].view(torch.float32)[0].item() == version.step
        found.setdefault(version.name, set()).add(version.step)
    return found


@pytest.mark.parametrize("order", [(7, 8), (8, 7)])
def test_processes_that_part_leave_the_newest_of_what_they_hold_and_keep_what_was_whole(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    """Two ranks with the same parameters, one of them a step behind; the versions after 3 and 6 are there."""
    for step in (3, 6):
        shm.Slots(str(tmp_path), "model").write(step, model(step))
    for step in order:
        parting.write(str(tmp_path), memory_at(step, step - 1, step), whole=6)
    assert everything(tmp_path)["model"] == {6, 8}, "the newest version that all nodes have stays"
    assert everything(tmp_path)[EXACT] >= {7, 8}


@pytest.mark.parametrize("order", [(7, 8), (8, 7)])
def test_where_the_newest_version_may_be_torn_elsewhere_both_stay(tmp_path: Path, order: tuple[int, int]) -> None:
    for step in (3, 6):
        shm.Slots(str(tmp_path), "model").write(step, model(step))
    for step in order:
        parting.write(str(tmp_path), memory_at(step, step - 1, step), whole=None)
    assert everything(tmp_path)["model"] >= {3, 6, 8}
    # They part again, before any version was made since.
    mine = memory_at(9, 8, 9)
    mine.history = (plan.restart(8, 1),)
    parting.write(str(tmp_path), mine, whole=None)
    assert everything(tmp_path)["model"] >= {8, 9} and everything(tmp_path)[EXACT] >= {8, 9}
    parting.forget(str(tmp_path))
    assert everything(tmp_path) == {"model": {3, 6}}


def test_torn_parameters_are_not_left_to_anybody(tmp_path: Path) -> None:
    shm.Slots(str(tmp_path), "model").write(6, model(6))
    mine = memory_at(7, 7, 8)
    mine.torn = True
    parting.write(str(tmp_path), mine, whole=6)
    assert everything(tmp_path) == {"model": {6}, EXACT: {7, 8}}


def test_who_parts_a_step_behind_does_not_write_into_a_version_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes the version after 8 beside its next step; rank 1 was told to leave before its update, and then to part."""
    for step in (3, 6):
        shm.Slots(str(tmp_path), "model").write(step, model(step))
    under_way, may_commit = threading.Event(), threading.Event()
    commit, lock = shm.Slots.commit, fcntl.flock

    def late(slots: shm.Slots, expected: bytes = b"") -> bool:
        if threading.current_thread() is not parter:
            under_way.set()
            assert may_commit.wait(30)
        return commit(slots, expected)

    def locked(fd: int, how: int) -> None:
        try:
            lock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            may_commit.set()
            lock(fd, how)

    def part() -> None:
        parting.write(str(tmp_path), memory_at(7), whole=6)
        may_commit.set()

    parter = threading.Thread(target=part)
    monkeypatch.setattr(shm.Slots, "commit", late)
    monkeypatch.setattr(fcntl, "flock", locked)
    ahead = NodeState(str(tmp_path), {}, pytest.fail)
    ahead.begin(6, (), ["model"], [], True)
    ahead.took_s = 1.0
    ahead.write(8, {"model": model(8)}, 1.0, 6)
    assert under_way.wait(30)
    parter.start()
    parter.join()
    ahead.settle()
    assert everything(tmp_path)["model"] == {6, 8}
