"""The training state in a node's shared memory ends with the job, unless somebody can go on from it."""

import errno
import os
import time
from pathlib import Path

import pytest

from hyperpodrun.agent import node_state
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire import node_state as where
from hyperpodrun.recovery import shm, versions
from hyperpodrun.recovery.held import blob
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.where import Where


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(node_state, "folder_of", lambda job, node, base=str(tmp_path): where.folder_of(job, node, base))
    folder = Path(where.folder_of("job", "node", str(tmp_path)))
    folder.mkdir()
    (folder / "version.0").write_bytes(b"state")
    return folder


@pytest.mark.parametrize(
    ("success", "by_chance", "stays"), [(True, False, False), (True, True, False), (False, True, False), (False, False, True)]
)
def test_it_stays_only_where_somebody_can_go_on_from_it(folder: Path, success: bool, by_chance: bool, stays: bool) -> None:
    said: list[str] = []
    node_state.end("job", "node", success, by_chance, said.append)
    assert folder.exists() == stays
    assert [str(folder) in line and "id job " in line for line in said] == [True] * stays


def test_a_folder_that_a_worker_holds_is_left_alone(folder: Path) -> None:
    fd = where.hold(str(folder))
    node_state.end("job", "node", True, True, pytest.fail)
    assert folder.exists()
    os.close(fd)
    node_state.end("job", "node", True, True, pytest.fail)
    assert not folder.exists()


def test_what_long_dead_jobs_left_is_removed(tmp_path: Path) -> None:
    def made(job: str, age_s: float) -> Path:
        folder = Path(where.folder_of(job, "node", str(tmp_path)))
        folder.mkdir()
        os.utime(folder, (time.time() - age_s,) * 2)
        return folder

    old, young, mine = made("old", node_state.KEPT_S + 60), made("young", 60), made("mine", node_state.KEPT_S + 60)
    held = made("held", 0)
    fd = where.hold(str(held))
    os.utime(held, (0, 0))
    (tmp_path / "other").mkdir()
    said: list[str] = []
    node_state.remove_old("mine", "node", said.append, str(tmp_path))
    os.close(fd)
    assert not old.exists() and young.exists() and mine.exists() and held.exists() and (tmp_path / "other").exists()
    assert len(said) == 1 and "1 job(s)" in said[0]


def test_folders_of_different_jobs_and_nodes_differ() -> None:
    names = {where.folder_of(job, node) for job in ("a", "b", "a/b", "a_b", "ä" * 300) for node in ("n0", "n1:1")}
    assert len(names) == 10 and all(len(os.path.basename(name)) < 120 and "/" not in os.path.basename(name) for name in names)


def test_a_state_with_a_name_lies_within_and_holds_all(folder: Path) -> None:
    """What the agent looks at and removes is the folder of the job."""
    within = where.of_state(str(folder), "g/1")
    assert os.path.dirname(within) == str(folder) and where.of_state(str(folder), "default") == str(folder)
    fd = where.hold(within)
    assert where.lock_of(within) == where.lock_of(str(folder)) and os.path.isdir(within)
    node_state.end("job", "node", True, True, pytest.fail)
    assert folder.exists()
    os.close(fd)
    node_state.end("job", "node", True, True, pytest.fail)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["default", "g"])
def test_what_another_user_made_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """/dev/shm is everybody's: a link to a folder of ours, or a folder in which another user may read and change all."""
    private, link = tmp_path / "private", tmp_path / "link"
    private.mkdir()
    link.symlink_to(private)
    for folder in (link, private):
        if folder == private:
            monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(PermissionError, match="another user"):
            where.hold(where.of_state(str(folder), name))
    assert not any(found.is_file() for found in private.rglob("*"))


def test_nothing_is_read_from_a_link(tmp_path: Path) -> None:
    job = tmp_path / "job"
    shm.Slots(str(job), "model").write(3, blob("model", b"x"))
    (tmp_path / "link").symlink_to(job)
    assert len(shm.scan(str(job))) == 1 and shm.scan(str(tmp_path / "link")) == []


def test_a_folder_in_which_versions_are_written_is_not_old(folder: Path) -> None:
    """Between the last process of a generation and the first of the next nobody holds it."""
    node = NodeState(str(folder), {}, pytest.fail)
    node.begin(-1, (), ["model"], [], True)
    node.write(3, {"model": blob("model", b"x")}, 1.0)
    node.write(4, {"model": blob("model", b"x")}, 1.0)
    os.utime(folder, (0, 0))
    node.write(5, {"model": blob("model", b"x")}, 1.0)  # over the files that are there: the folder itself does not change
    assert folder.stat().st_mtime > time.time() - node_state.KEPT_S


def test_of_two_jobs_by_one_id_the_second_has_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands in one allocation of a scheduler: neither goes on from the other's state, or writes over it."""
    monkeypatch.setattr(where, "LINGER_S", 0.05)
    folder = str(tmp_path / "job")
    held = [where.hold(folder, "first"), where.hold(folder, "first")]
    for fd in held:
        with pytest.raises(BlockingIOError, match="another job with the same id"):
            where.hold(folder, "second")
        os.close(fd)
    held = [where.hold(folder, "second"), where.hold(folder, "second")]
    with pytest.raises(BlockingIOError):
        where.hold(folder, "first")
    for fd in held:
        os.close(fd)


def test_a_full_memory_keeps_nobody_from_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    for fd in [where.hold(str(tmp_path / "job"), "job"), where.hold(str(tmp_path / "job"), "job")]:
        os.close(fd)


def test_what_another_job_has_there_is_neither_read_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "LINGER_S", 0.0)
    shm.Slots(str(tmp_path), "model").write(3, blob("model", b"x"))
    fd = where.hold(str(tmp_path), "first")
    said: list[str] = []
    node = NodeState(str(tmp_path), {}, said.append)
    monkeypatch.setenv(names.STATE_OWNER, "second")
    assert not node.begin(-1, (), ["model"], [], True) and "another job" in said[0]
    node.only([])
    node.make_room([], 9)
    assert [version.step for version in shm.scan(str(tmp_path))] == [3]
    here = Where(0, 1, 0, "node", "job", "0", True)
    monkeypatch.setattr(where, "folder_of", lambda job, node: str(tmp_path))
    assert versions.found_by(here, None) == []
    os.close(fd)
    assert len(versions.found_by(here, None)) == 1
