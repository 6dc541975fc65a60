"""A version counts when everybody holds it; until then nothing older goes."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery import parting, plan, shard, shm, versions
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import part_of
from hyperpodrun.recovery.versions import FAILED, HELD, Room, Versions
from hyperpodrun.recovery.where import Where

START = plan.restart(-1, 1)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="versions-", dir="/dev/shm") as base:
        monkeypatch.setattr(node_state, "folder_of", lambda job, node: os.path.join(base, node))
        monkeypatch.setattr(versions, "_told", set())
        yield Path(base) / "a"
        while lives:
            lives.pop().versions.close()


lives: list["Life"] = []


class Life:
    """Rank 0 of a job that has been restored to the last step of `history`; each rank has a shard of its own.

    `nodes` has the node of each rank, `free` the bytes that each node has.
    """

    def __init__(
        self, nodes: str = "a", history: plan.History = (START,), before: int | None = None, expected: int = 100, **free: int
    ) -> None:
        mine = Memory("shard 0", [part_of("model", torch.nn.Linear(50, 2))])
        mine.history = history
        self.mine, self.said = mine, list[str]()
        offers = {rank: plan.Offer(rank, node, (f"shard {rank}",)) for rank, node in enumerate(nodes)}
        rooms = {rank: Room(free.get(node, 1 << 30), expected, "", 0) for rank, node in enumerate(nodes)}
        self.versions = Versions(Where(0, len(nodes), 0, "a", "job", "0", True), mine, 2, b"t" * 16, self.said.append)
        lives.append(self)
        self.versions.begin(plan.went_to(history[-1]), ["shard 0"], offers, rooms, (), before)

    def step(self, step: int, elsewhere: int = HELD) -> int:
        """One step; how far this rank is with its version afterwards. `elsewhere`: how far others are."""
        self.mine.committed(step)
        self.versions.stepped(step, lambda: {"shard 0": shard.of(self.mine.parts)})
        self.versions.settle()
        _, said = self.versions.agree()
        self.versions.agreed(1, max(said, elsewhere))
        return said


def steps(folder: Path, files: tuple[str, ...] = shm.VERSIONS) -> set[int]:
    return {one.step for one in shm.Slots(str(folder), "shard 0", files).found()}


def test_what_could_not_be_written_is_no_version_and_replaces_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life()
    assert [life.step(0), life.step(1)] == [HELD, HELD]
    with monkeypatch.context() as patch:
        patch.setattr(shm.Slots, "reserve", no_room)
        assert [life.step(2), life.step(3)] == [FAILED, FAILED]
    assert len(life.said) == 1 and "no version of 'shard 0' after step 2" in life.said[0]
    assert steps(folder) == {0, 1}
    assert life.versions._whole == 1
    assert life.step(4) == HELD and steps(folder) == {1, 4}


def no_room(*_: object) -> None:
    raise shm.NoRoom(28, "No space left on device")


@pytest.mark.parametrize("fails", [0, 1, 4])
def test_what_failed_elsewhere_leaves_the_whole_one_here(folder: Path, fails: int) -> None:
    life = Life()
    for step in range(1 + fails):
        life.mine.state("rank 0 of 1").put(step, b"random")
        life.step(step, elsewhere=FAILED if step else HELD)
    assert 0 in steps(folder)
    assert life.mine.state("rank 0 of 1").get(0) is not None


def test_what_was_whole_before_this_life_stays_until_a_version_of_it_is(folder: Path) -> None:
    for step in (5, 6):
        shm.Slots(str(folder), "shard 0").write(step, layer(), (START,))
    life = Life(history=(START, plan.restart(6, 2)), before=5)  # step 6 is torn elsewhere
    for step in (7, 8, 9):
        life.step(step, elsewhere=FAILED)
        assert steps(folder) == {5, step}


def layer() -> shard.Shard:
    return shard.of([part_of("model", torch.nn.Linear(50, 2))])


def test_what_is_older_than_the_whole_version_makes_room_for_one_that_had_none(folder: Path) -> None:
    """Shards of another world, and what processes left that were replaced before; the version after step 6 is whole."""
    for step in (5, 6):
        shm.Slots(str(folder), "shard 0").write(step, layer(), (START,))
        shm.Slots(str(folder), "shard 0 of 8").write(step, layer(), (START,))
        shm.Slots(str(folder), "shard 0", shm.PARTING).write(step, layer(), (START,))
    life = Life(history=(START, plan.restart(6, 2)), before=6)
    assert len(shm.scan(str(folder))) == 6
    life.step(7, elsewhere=FAILED)
    there = {(one.name, one.step, one.path.endswith(shm.PARTING)) for one in shm.scan(str(folder))}
    assert there == {("shard 0", 6, False), ("shard 0", 7, False), ("shard 0 of 8", 6, False), ("shard 0", 6, True)}


def test_what_parting_processes_left_goes_when_a_version_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life()
    left = Memory("shard 0", life.mine.parts)
    left.history = (START,)
    left.committed(3)
    parting.write(str(folder), left, None)
    with monkeypatch.context() as patch:
        patch.setattr(shm.Slots, "reserve", no_room)
        life.step(4)
    assert steps(folder, shm.PARTING) == {3}
    life.step(5)
    assert steps(folder, shm.PARTING) == set()


def test_what_is_of_another_timeline_goes(folder: Path) -> None:
    history = (START, plan.restart(3, 2))
    shm.Slots(str(folder), "shard 0").write(2, layer(), history[:1])
    shm.Slots(str(folder), "shard 0").write(5, layer(), (START, plan.restart(4, 9)))
    Life(history=(*history, plan.restart(6, 3)))
    assert steps(folder) == {2}


def test_a_node_without_room_holds_nothing_unless_others_hold_it(folder: Path) -> None:
    assert Life(a=10).step(0) == FAILED
    assert Life("ab", a=10).versions._is_written, "its buddy fetches it from this process"


def test_the_cost_is_told_once_and_too_little_room_for_copies_before_anything_is_written(folder: Path) -> None:
    cost = "versions of this node's state take about 200 MiB of /dev/shm, copies for others 200 MiB"
    first, second = (Life("ab", expected=100 << 20, a=400 << 20) for _ in range(2))
    assert first.said[0] == cost
    assert not second.said
    small = Life("ab", expected=100 << 20, a=399 << 20)
    assert (
        "has 399 MiB free" in small.said[0] and "copies for others 200 MiB: the copies are kept by the processes" in small.said[0]
    )
    assert isinstance(small.versions._slots_of("shard 1"), shm.HeapSlots)
    assert not isinstance(first.versions._slots_of("shard 1"), shm.HeapSlots)


def test_where_nothing_can_be_written_there_is_no_room(folder: Path) -> None:
    """So the others know, and processes keep the copies."""
    folder.parent.joinpath("elsewhere").mkdir()
    folder.symlink_to("elsewhere")  # another user's doing
    life = Life()
    assert life.versions.room("", 100).free == 0
