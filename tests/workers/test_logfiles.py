"""Log folders in any place, log files on any disk: a refused write is told and counted, never raised."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.workers import logfiles
from hyperpodrun.agent.workers.logfiles import LogFile, folder_name, make_run_folder, make_temporary_folder, make_unique


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


class Disk:
    """os.write, with a limit on what fits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room_bytes = 1 << 40
        self.error = errno.ENOSPC
        self._write = os.write
        monkeypatch.setattr(logfiles.os, "write", self.write)

    def write(self, fd: int, data: memoryview) -> int:
        if not self.room_bytes:
            raise OSError(self.error, os.strerror(self.error))
        count = self._write(fd, data[: self.room_bytes])
        self.room_bytes -= count
        return count


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


def open_log(path: Path, clock: Clock, told: list[tuple[str, str]]) -> LogFile:
    return LogFile(str(path), clock, lambda path, reason: told.append((path, reason)))


class TestNames:
    @given(st.text(max_size=300))
    def test_any_job_id_becomes_one_visible_path_component(self, job_id: str) -> None:
        name = folder_name(job_id)
        assert name and "/" not in name and not name.startswith(".") and len(os.fsencode(name)) <= 100

    @pytest.mark.parametrize(
        ("job_id", "name"),
        [("run-7.b_2", "run-7.b_2"), ("team/run 7", "team_run_7"), ("../../etc", "_.._etc"), ("..", "job"), ("", "job")],
    )
    def test_examples(self, job_id: str, name: str) -> None:
        assert folder_name(job_id) == name

    def test_two_runs_never_share_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        random = iter([b"aaaa", b"aaaa", b"bbbb"])
        monkeypatch.setattr(logfiles.os, "urandom", lambda _: next(random))
        assert make_unique(str(tmp_path), "x") != make_unique(str(tmp_path), "x")


class TestFolders:
    def test_missing_parents_are_made(self, tmp_path: Path) -> None:
        folder = make_run_folder(str(tmp_path / "a" / "b"), "team/run")
        assert Path(folder).is_dir() and folder.startswith(str(tmp_path / "a" / "b" / "team_run_"))

    def test_a_file_in_the_way_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("")
        with pytest.raises(NotADirectoryError) as caught:
            make_run_folder(str(tmp_path / "log"), "x")
        assert caught.value.filename == str(tmp_path / "log")

    def test_a_place_that_takes_no_folder_is_named(self) -> None:
        with pytest.raises(OSError) as caught:
            make_run_folder("/proc/logs", "x")
        assert str(caught.value.filename).startswith("/proc/logs")

    def test_the_first_place_that_works_is_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", "/proc")
        folder = make_temporary_folder()
        os.rmdir(folder)
        assert folder.startswith("/tmp/hyperpodrun_") or os.path.dirname(folder) != "/proc"
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        folder = make_temporary_folder()
        assert folder.startswith(f"{tmp_path}/hyperpodrun_")
        assert os.stat(folder).st_mode & 0o777 == 0o700


class TestLogFile:
    def test_bytes_stay_as_they_are(self, tmp_path: Path, told: list[tuple[str, str]]) -> None:
        log = open_log(tmp_path / "x.log", Clock(), told)
        log.write(b"\xff\0\r\n")
        log.write(b"")
        log.write(b"no newline")
        log.close()
        assert (tmp_path / "x.log").read_bytes() == b"\xff\0\r\nno newline"
        assert not told and not log.missing_bytes

    def test_a_full_disk_is_told_counted_and_tried_again(
        self, tmp_path: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk, clock = Disk(monkeypatch), Clock()
        log = open_log(tmp_path / "x.log", clock, told)
        disk.room_bytes = 3
        log.write(b"12345")
        assert log.missing_bytes == 2
        assert told == [(str(tmp_path / "x.log"), "No space left on device")]
        disk.room_bytes = 100
        log.write(b"67")
        assert log.missing_bytes == 4, "not tried again before a second is over"
        clock.s = 1.5
        log.write(b"89")
        log.close()
        assert (tmp_path / "x.log").read_bytes() == b"12389"
        assert log.missing_bytes == 4

    def test_an_error_that_does_not_pass_is_not_tried_again(
        self, tmp_path: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk, clock = Disk(monkeypatch), Clock()
        log = open_log(tmp_path / "x.log", clock, told)
        disk.room_bytes, disk.error = 0, errno.EFBIG
        log.write(b"1")
        disk.room_bytes, clock.s = 100, 100.0
        log.write(b"2")
        log.close()
        assert log.missing_bytes == 2 and len(told) == 1
        assert (tmp_path / "x.log").read_bytes() == b""

    def test_a_device_that_is_full(self, told: list[tuple[str, str]]) -> None:
        log = open_log(Path("/dev/full"), Clock(), told)
        log.write(b"12")
        log.close()
        assert log.missing_bytes == 2 and told == [("/dev/full", "No space left on device")]

    def test_a_file_that_cannot_be_made(self, tmp_path: Path, told: list[tuple[str, str]]) -> None:
        log = open_log(tmp_path / "no" / "x.log", Clock(), told)
        log.write(b"12")
        log.close()
        assert log.missing_bytes == 2 and len(told) == 1
