"""The vote outlives its agent, and is either whole or not there."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from hyperpodrun.agent.vote_file import VoteFile, path_for, remove_old
from hyperpodrun.agent.wire.mesh import ZERO, Accepted, Member, View, Vote

VIEW = View("chain", 0, 3, 1, "parent", (Member("a", 1), Member("b", 2)), "a", ("a", "b"), "run")
LOWER, HIGHER = (msgspec.structs.replace(ZERO, round=number, node=node, incarnation=7) for number, node in ((3, "b"), (4, "a")))
VOTE = Vote(7, VIEW, HIGHER, Accepted(LOWER, VIEW))


def never(text: str) -> None:
    raise AssertionError(text)


def test_what_was_written_is_read_by_the_next_life(tmp_path: Path) -> None:
    path = str(tmp_path / "vote")
    assert VoteFile(path, never).read() is None
    VoteFile(path, never).write(VOTE)
    assert VoteFile(path, never).read() == VOTE
    assert os.stat(path).st_mode & 0o777 == 0o600
    VoteFile(path, never).write(None)
    VoteFile(path, never).write(None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xc1", b"\x93\x07\xc0", b"x" * 1000])
def test_anything_else_is_no_vote(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "vote"
    path.write_bytes(content)
    assert VoteFile(str(path), never).read() is None


def test_cut_votes_are_no_votes(tmp_path: Path) -> None:
    path = tmp_path / "vote"
    VoteFile(str(path), never).write(VOTE)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert VoteFile(str(path), never).read() is None, length


def test_a_link_is_no_vote_and_is_not_written_through(tmp_path: Path) -> None:
    theirs, path = tmp_path / "theirs", tmp_path / "vote"
    VoteFile(str(theirs), never).write(VOTE)
    before = theirs.read_bytes()
    path.symlink_to(theirs)
    assert VoteFile(str(path), never).read() is None
    VoteFile(str(path), never).write(Vote(1, None))
    assert theirs.read_bytes() == before and not path.is_symlink()


def test_where_no_vote_can_be_written_none_stays_and_it_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    said: list[str] = []
    file = VoteFile(str(folder / "vote"), said.append)
    file.write(VOTE)
    (folder / f"vote.{os.getpid()}.new").mkdir()  # the draft's name is taken: as good as a full file system
    for _ in range(2):
        file.write(Vote(8, VIEW))
        assert not (folder / "vote").exists(), "the old vote would be used again"
    assert len(said) == 1 and str(folder / "vote") in said[0]
    (folder / f"vote.{os.getpid()}.new").rmdir()
    file.write(VOTE)
    assert file.read() == VOTE


def test_each_job_and_slot_has_its_own() -> None:
    assert len({path_for(job, slot) for job in ("a", "b", "") for slot in ("x:1", "x:2")}) == 6
    assert os.path.dirname(path_for("j", "s")) == "/dev/shm"
    assert path_for("j\udcff", "s") == path_for("j\udcff", "s")


def aged(path: Path, days: float) -> Path:
    path.write_bytes(b"\x00")
    then_s = time.time() - days * 86400
    os.utime(path, (then_s, then_s))
    return path


def test_votes_that_nobody_renews_are_removed_after_a_week(tmp_path: Path) -> None:
    mark = f"hyperpodrun-{os.getuid()}-"
    mine = aged(tmp_path / f"{mark}mine.vote", 30)
    young = aged(tmp_path / f"{mark}young.vote", 6.9)
    others = aged(tmp_path / f"hyperpodrun-{os.getuid() + 1}-x.vote", 30)
    foreign = aged(tmp_path / f"{mark}notes.txt", 30)
    link = tmp_path / f"{mark}link.vote"
    link.symlink_to(foreign)
    for name in ("old.vote", "older.vote", "older.vote.123.new"):
        aged(tmp_path / f"{mark}{name}", 7.1)
    said: list[str] = []
    remove_old(str(mine), said.append, [str(tmp_path), str(tmp_path / "nowhere")])
    assert set(tmp_path.iterdir()) == {mine, young, others, foreign, link}
    assert len(said) == 1 and "2 vote file(s)" in said[0]
    remove_old(str(mine), never, [str(tmp_path)])


def test_vote_that_is_renewed_stays(tmp_path: Path) -> None:
    path = aged(tmp_path / f"hyperpodrun-{os.getuid()}-live.vote", 30)
    VoteFile(str(path), never).renew()
    VoteFile(str(tmp_path / "not there"), never).renew()
    remove_old("", never, [str(tmp_path)])
    assert path.exists()
