"""Workers' output from real pipes to consoles, files and the failure report."""

import gc
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.config import JobConfig, Streams
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.agent.workers import console as console_module
from hyperpodrun.agent.workers import output as output_module
from hyperpodrun.agent.workers.output import Output

BOTH = Streams(stdout=True, stderr=True)
OUT = Streams(stdout=True)
ERR = Streams(stderr=True)


class Launcher:
    """An Output with two files as its consoles, or whatever descriptors a test has."""

    def __init__(self, folder: Path, stdout_fd: int | None = None, stderr_fd: int | None = None, **config: Any) -> None:
        self.folder = folder
        self.reactor = Reactor()
        self.fds: list[int] = []
        self.stdout_path, self.stderr_path = folder / "console.out", folder / "console.err"
        stdout_fd = self.file(self.stdout_path) if stdout_fd is None else stdout_fd
        stderr_fd = self.file(self.stderr_path) if stderr_fd is None else stderr_fd
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.config = JobConfig(program=Program("script", "x.py", ()), **{"job_id": "job", "nproc_per_node": 2} | config)
        self.output = Output(self.reactor, self.config, str(self.run_dir), stdout_fd, stderr_fd)
        self.ends: dict[int, tuple[int, int]] = {}
        self.drained: list[int] = []

    def file(self, path: Path) -> int:
        self.fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        return self.fds[-1]

    def begin(self, attempt: int = 0) -> None:
        if attempt == 0:
            self.output.prepare()
        self.drained.clear()
        self.output.begin_attempt(attempt, range(self.config.nproc_per_node))
        self.ends = {rank: self.output.open_worker(rank) for rank in range(self.config.nproc_per_node)}

    def write(self, rank: int, stdout: bytes = b"", stderr: bytes = b"") -> None:
        for fd, data in zip(self.ends[rank], (stdout, stderr), strict=True):
            if data:
                assert os.write(fd, data) == len(data)

    def until(self, condition: Callable[[], object], limit_s: float = 20.0) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, "it never came"
            self.reactor.turn(0.05)

    def end_worker(self, rank: int) -> None:
        for fd in self.ends.pop(rank):
            os.close(fd)
        self.output.worker_ended(rank, lambda: self.drained.append(rank))

    def finish(self) -> None:
        for rank in list(self.ends):
            self.end_worker(rank)
        self.until(lambda: len(self.drained) == self.config.nproc_per_node)
        done: list[bool] = []
        self.output.finish(lambda: done.append(True))
        self.until(lambda: done)

    def close(self) -> None:
        self.output.close()
        for fd in (*self.fds, *(fd for pair in self.ends.values() for fd in pair)):
            os.close(fd)

    @property
    def stdout(self) -> bytes:
        return self.stdout_path.read_bytes()

    @property
    def stderr(self) -> bytes:
        return self.stderr_path.read_bytes()

    def log(self, path: str) -> bytes | None:
        """Content of a file below `<log dir>/<this run>/`."""
        found = list((self.folder / "logs").glob(f"job_*/{path}"))
        return found[0].read_bytes() if found else None


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(**kwargs: Any) -> Launcher:
        started.append(Launcher(tmp_path, **kwargs))
        return started[-1]

    yield start
    for launcher in started:
        launcher.close()


Launch = Callable[..., Launcher]


class TestConsole:
    def test_each_stream_goes_to_its_own_with_the_ranks_name(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        job.write(0, b"a\nb\n", b"c\n")
        job.write(1, b"d\n", b"e\n")
        job.finish()
        assert sorted(job.stdout.splitlines()) == [b"[default0]:a", b"[default0]:b", b"[default1]:d"]
        assert sorted(job.stderr.splitlines()) == [b"[default0]:c", b"[default1]:e"]

    def test_the_prefix_follows_the_template(self, launch: Launch) -> None:
        job = launch(log_line_prefix_template="<$role_name ${rank} of ${local_rank} ${unknown}> ", role="trainer")
        job.begin()
        job.write(1, b"x\n")
        job.finish()
        assert job.stdout == b"<trainer 1 of 1 ${unknown}> x\n"

    def test_the_prefix_names_the_global_rank(self, launch: Launch) -> None:
        job = launch(nproc_per_node=1, max_nodes=2)
        job.output.prepare()
        job.output.begin_attempt(0, [5])
        job.ends = {0: job.output.open_worker(0)}
        job.write(0, b"x\n")
        job.finish()
        assert job.stdout == b"[default5]:x\n"

    def test_the_only_rank_is_shown_byte_for_byte(self, launch: Launch) -> None:
        job = launch(nproc_per_node=1)
        job.begin()
        job.write(0, b"\xff\0 50%\r 100%\nprompt> ", b"\x1b[1mbold")
        job.finish()
        assert job.stdout == b"\xff\0 50%\r 100%\nprompt> "
        assert job.stderr == b"\x1b[1mbold"

    def test_the_only_rank_on_one_console_gets_no_newline_between_its_streams(self, launch: Launch, tmp_path: Path) -> None:
        fd = os.open(tmp_path / "console.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        job = launch(nproc_per_node=1, stdout_fd=fd, stderr_fd=fd)
        job.fds.append(fd)
        job.begin()
        for stdout, stderr in ((b"a", b""), (b"", b"b"), (b"c", b"")):
            job.write(0, stdout, stderr)
            job.reactor.turn(1.0)
        job.finish()
        assert job.stdout == b"abc"

    def test_a_prompt_is_shown_soon_and_goes_on_without_a_second_prefix(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        job.write(0, b"name? ")
        job.reactor.turn(0.0)
        assert job.stdout == b""
        job.until(lambda: job.stdout == b"[default0]:name? ")
        job.write(0, b"thanks\n")
        job.finish()
        assert job.stdout == b"[default0]:name? thanks\n"

    def test_lines_of_two_streams_are_never_mixed(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        for data in (b"be", b"gin", b" end\n"):
            job.write(0, data)
            job.write(1, data)
            job.reactor.turn(0.0)
        job.finish()
        assert sorted(job.stdout.splitlines()) == [b"[default0]:begin end", b"[default1]:begin end"]

    def test_mid_line_words_of_a_killed_worker_are_shown(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        job.write(0, b"last wor")
        job.write(1, b"x\n")
        job.finish()
        assert b"[default0]:last wor\n" in job.stdout and b"[default1]:x\n" in job.stdout

    def test_ten_megabytes_without_a_newline(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        writer = subprocess.Popen(
            [sys.executable, "-c", "import sys\nfor _ in range(160): sys.stdout.write('#' * 65536)\nprint('\\nafter')"],
            stdout=job.ends[0][0],
        )
        job.until(lambda: job.stdout.endswith(b"after\n"))
        assert writer.wait() == 0
        job.finish()
        assert job.stdout == b"[default0]:" + b"#" * (160 * 65536) + b"\n[default0]:after\n"

    def test_filtered_ranks_are_hidden_from_the_console_only(self, launch: Launch, tmp_path: Path) -> None:
        job = launch(local_ranks_filter=frozenset({1}), log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH))
        job.begin()
        job.write(0, b"hidden\n")
        job.write(1, b"shown\n")
        job.finish()
        assert job.stdout == b"[default1]:shown\n"
        assert job.log("attempt_0/0/stdout.log") == b"hidden\n"

    def test_filtered_ranks_have_no_lines_in_the_duplicates(self, launch: Launch, tmp_path: Path) -> None:
        only_one = {"local_ranks_filter": frozenset({1}), "duplicate_stdout_filters": ("loss",)}
        job = launch(log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH), **only_one)
        job.begin()
        for rank in (0, 1):
            job.write(rank, b"loss %d\n" % rank)
        job.finish()
        assert job.log("attempt_0/filtered_stdout.log") == b"[default1]:loss 1\n"

    def test_the_launcher_speaks_between_lines(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        job.write(0, stderr=b"before\nope")
        job.until(lambda: job.stderr.endswith(b"ope"))
        job.output.say("rank 0 failed\nit was killed")
        job.write(0, stderr=b"n end\n")
        job.finish()
        assert job.stderr == (b"[default0]:before\n[default0]:ope\nhyperpodrun: rank 0 failed\nit was killed\n[default0]:n end\n")

    def test_a_helper_speaks_under_its_name(self, launch: Launch) -> None:
        job = launch()
        ends = job.output.open_helper("forkserver")
        assert os.write(ends[0], b"out\n") and os.write(ends[1], b"no newline")
        for fd in ends:
            os.close(fd)
        job.output.helper_ended("forkserver")
        assert job.stdout == b"[forkserver]:out\n" and job.stderr == b"[forkserver]:no newline\n"

    @pytest.mark.parametrize(("no_colour", "prefix"), [("", b"\x1b[36m[default0]:\x1b[0m"), ("1", b"[default0]:")])
    def test_colour_on_a_terminal(self, launch: Launch, monkeypatch: pytest.MonkeyPatch, no_colour: str, prefix: bytes) -> None:
        monkeypatch.setenv("NO_COLOR", no_colour)
        monkeypatch.setenv("TERM", "xterm")
        master, slave = pty.openpty()
        job = launch(stdout_fd=slave)
        job.fds += [master, slave]
        job.begin()
        job.write(0, b"x\n", b"y\n")
        job.finish()
        assert os.read(master, 1000) == prefix + b"x\r\n"
        assert job.stderr == b"[default0]:y\n", "a file gets no colour though the other one is a terminal"

    def test_one_pipe_for_both_keeps_their_order(self, launch: Launch) -> None:
        read, write = os.pipe()
        job = launch(stdout_fd=write, stderr_fd=write)
        job.fds += [read, write]
        job.begin()
        for i in range(50):
            job.write(0, *((b"%d\n" % i, b"") if i % 2 else (b"", b"%d\n" % i)))
            job.reactor.turn(1.0)
        job.finish()
        assert os.read(read, 100_000) == b"".join(b"[default0]:%d\n" % i for i in range(50))

    def test_one_pipe_for_both_knows_of_one_open_line(self, launch: Launch) -> None:
        read, write = os.pipe()
        job = launch(stdout_fd=write, stderr_fd=write)
        job.fds += [read, write]
        job.begin()
        job.write(0, b"open")
        job.until(lambda: select.select([read], [], [], 0)[0])
        job.write(0, stderr=b"error\n")
        job.reactor.turn(1.0)
        job.finish()
        assert os.read(read, 1000) == b"[default0]:open\n[default0]:error\n"


class TestFiles:
    @pytest.mark.parametrize(
        ("redirects", "tee", "files", "shown"),
        [
            ((BOTH, BOTH), (), {"0/out", "0/err", "1/out", "1/err"}, set()),
            ((), (BOTH, BOTH), {"0/out", "0/err", "1/out", "1/err"}, {"0/out", "0/err", "1/out", "1/err"}),
            ((OUT, ERR), (), {"0/out", "1/err"}, {"0/err", "1/out"}),
            ((BOTH, Streams()), (OUT, Streams()), {"0/out", "0/err"}, {"0/out", "1/out", "1/err"}),
        ],
    )
    def test_redirected_and_teed(
        self,
        launch: Launch,
        tmp_path: Path,
        redirects: tuple[Streams, ...],
        tee: tuple[Streams, ...],
        files: set[str],
        shown: set[str],
    ) -> None:
        job = launch(log_dir=str(tmp_path / "logs"), redirects=redirects, tee=tee)
        job.begin()
        for rank in (0, 1):
            job.write(rank, b"<%d/out>\n" % rank, b"<%d/err>\n" % rank)
        paths = {
            f"{rank}/{name[3:]}": job.output.log_path(rank, name)  # type: ignore[arg-type]
            for rank in (0, 1)
            for name in ("stdout", "stderr")
        }
        job.finish()
        for what in ("0/out", "0/err", "1/out", "1/err"):
            line = f"<{what}>".encode()
            assert (line in job.stdout + job.stderr) == (what in shown), what
            assert job.log(f"attempt_0/{what[:2]}std{what[2:]}.log") == (line + b"\n" if what in files else None), what
            assert (paths[what] is not None) == (what in files)

    def test_each_attempt_has_its_own_folder_files_and_last_lines(self, launch: Launch, tmp_path: Path) -> None:
        job = launch(log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH))
        job.begin(0)
        job.write(0, b"first\n")
        for rank in (0, 1):
            job.end_worker(rank)
        job.until(lambda: len(job.drained) == 2)
        assert job.output.tail(0).stdout == ("first",)
        job.begin(1)
        assert job.output.tail(0).stdout == ()
        assert "/attempt_1/0/" in job.output.error_file(0)
        job.write(0, b"second\n")
        job.finish()
        assert job.log("attempt_0/0/stdout.log") == b"first\n" and job.log("attempt_1/0/stdout.log") == b"second\n"
        assert job.output.tail(0).stdout == ("second",)

    def test_without_redirects_only_the_launchers_own_folder_is_used(self, launch: Launch, tmp_path: Path) -> None:
        job = launch()
        job.begin()
        assert Path(job.output.error_file(1)) == job.run_dir / "attempt_0" / "1" / "error.json"
        assert Path(job.output.error_file(1)).parent.is_dir()
        assert job.output.log_path(0, "stdout") is None
        job.finish()
        assert {path.name for path in tmp_path.iterdir()} == {"run", "console.out", "console.err"}

    def test_without_a_log_dir_the_place_is_told(self, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        job = launch(redirects=(BOTH, BOTH))
        job.begin()
        job.write(0, b"kept\n")
        job.finish()
        (folder,) = tmp_path.glob("hyperpodrun_*/job_*")
        assert job.stderr.startswith(f"hyperpodrun: logs are kept in {folder} ".encode())
        assert (folder / "attempt_0" / "0" / "stdout.log").read_bytes() == b"kept\n"

    def test_the_null_device_as_log_dir_keeps_nothing(self, launch: Launch) -> None:
        job = launch(log_dir=os.devnull, redirects=(BOTH, BOTH))
        job.begin()
        job.write(0, b"gone\n")
        job.finish()
        assert job.stdout == b"" and job.stderr == b""

    def test_an_impossible_log_dir_is_named(self, launch: Launch, tmp_path: Path) -> None:
        (tmp_path / "logs").write_text("a file")
        with pytest.raises(OSError) as caught:
            launch(log_dir=str(tmp_path / "logs")).output.prepare()
        assert caught.value.filename == str(tmp_path / "logs")

    def test_duplicate_filters_copy_matching_lines_of_all_ranks(self, launch: Launch, tmp_path: Path) -> None:
        filters = {"duplicate_stdout_filters": ("loss",), "duplicate_stderr_filters": ("Error",)}
        job = launch(log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH), **filters)
        job.begin()
        for rank in (0, 1):
            job.write(rank, b"loss %d\nother\n" % rank, b"warning\nValueError" if rank else b"")
        job.finish()
        filtered = job.log("attempt_0/filtered_stdout.log") or b""
        assert sorted(filtered.splitlines()) == [b"[default0]:loss 0", b"[default1]:loss 1"]
        assert job.log("attempt_0/filtered_stderr.log") == b"[default1]:ValueError\n"

    @pytest.mark.parametrize(("tee", "ranks"), [((OUT, Streams()), [b"0"]), ((), [b"0", b"1"])])
    def test_duplicate_filters_look_at_what_is_teed_or_else_at_all(
        self, launch: Launch, tmp_path: Path, tee: tuple[Streams, ...], ranks: list[bytes]
    ) -> None:
        job = launch(log_dir=str(tmp_path / "logs"), tee=tee, duplicate_stdout_filters=("loss",))
        job.begin()
        for rank in (0, 1):
            job.write(rank, b"loss %d\n" % rank)
        job.finish()
        filtered = job.log("attempt_0/filtered_stdout.log") or b""
        assert sorted(line[-1:] for line in filtered.splitlines()) == ranks

    def test_a_full_disk_costs_the_file_and_nothing_else(self, launch: Launch, tmp_path: Path) -> None:
        job = launch(log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH))
        job.begin()
        for rank in (0, 1):
            path = job.output.log_path(rank, "stdout")
            assert path is not None
            full = os.open("/dev/full", os.O_WRONLY)
            file = job.output._streams[rank, "stdout"].file
            assert file is not None
            os.dup2(full, file._fd)
            os.close(full)
            job.write(rank, b"to the console\n")
        job.finish()
        assert job.stdout.count(b"to the console\n") == 2
        assert job.stderr.count(b"No space left on device") == 1
        assert b"hyperpodrun: 15 bytes are missing in " in job.stderr and b"(incomplete log files in all: 2)" in job.stderr

    def test_a_log_folder_that_is_gone_at_a_restart_costs_files_only(self, launch: Launch, tmp_path: Path) -> None:
        job = launch(log_dir=str(tmp_path / "logs"), redirects=(OUT, OUT))
        job.begin(0)
        for rank in (0, 1):
            job.end_worker(rank)
        job.until(lambda: len(job.drained) == 2)
        (folder,) = (tmp_path / "logs").glob("job_*")
        folder.rename(tmp_path / "moved")
        folder.write_text("in the way")
        job.begin(1)
        assert Path(job.output.error_file(0)).parent == job.run_dir / "attempt_1" / "0"
        job.write(0, stderr=b"goes on\n")
        job.finish()
        assert b"cannot write" in job.stderr and b"[default0]:goes on\n" in job.stderr

    @settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=40), st.booleans()), max_size=25))
    def test_any_bytes_in_any_chunks_are_in_the_files_as_they_were(
        self, tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes, bool]]
    ) -> None:
        folder = tmp_path_factory.mktemp("any")
        job = Launcher(folder, log_dir=str(folder / "logs"), tee=(BOTH, BOTH))
        job.begin()
        for stream, data, turn in writes:
            job.write(stream // 2, *((data, b"") if stream % 2 == 0 else (b"", data)))
            if turn:
                job.reactor.turn(0.0)
        job.finish()
        job.close()
        for stream in range(4):
            name = f"attempt_0/{stream // 2}/{('stdout', 'stderr')[stream % 2]}.log"
            assert job.log(name) == b"".join(data for which, data, _ in writes if which == stream)
        for line in (job.stdout + job.stderr).removesuffix(b"\n").split(b"\n"):
            assert line.startswith((b"[default0]:", b"[default1]:")) or not (job.stdout + job.stderr)


class TestEnds:
    def test_a_grandchild_that_keeps_the_pipe_delays_nothing(self, launch: Launch) -> None:
        job = launch(nproc_per_node=1)
        job.begin()
        job.write(0, b"last words\n")
        kept = [os.dup(fd) for fd in job.ends[0]]
        started_s = time.monotonic()
        job.end_worker(0)
        assert job.stdout == b"last words\n", "what is there is read at once"
        assert not job.drained
        os.write(kept[0], b"later words\n")
        job.until(lambda: job.drained)
        assert time.monotonic() - started_s >= output_module.GRANDCHILD_S - 0.01
        assert job.stdout == b"last words\nlater words\n"
        with pytest.raises(BrokenPipeError):
            os.write(kept[0], b"too late")
        for fd in kept:
            os.close(fd)
        job.finish()

    def test_a_grandchild_that_never_stops_writing_delays_nothing(self, launch: Launch) -> None:
        job = launch(nproc_per_node=1)
        job.begin()
        flood = subprocess.Popen(["yes"], stdout=job.ends[0][0], stderr=subprocess.DEVNULL)
        job.end_worker(0)
        job.until(lambda: job.drained)
        assert flood.wait(20) == -13  # SIGPIPE
        job.finish()

    def test_callbacks_come_from_the_loop(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        job.end_worker(0)
        assert not job.drained
        job.until(lambda: job.drained == [0])
        job.finish()

    def test_a_new_attempt_ends_what_was_left_of_the_last(self, launch: Launch) -> None:
        job = launch(nproc_per_node=1)
        job.begin(0)
        kept = os.dup(job.ends[0][0])
        job.end_worker(0)
        job.begin(1)
        with pytest.raises(BrokenPipeError):
            os.write(kept, b"of the attempt before")
        os.close(kept)
        job.write(0, b"new\n")
        job.finish()
        assert job.drained == [0] and job.stdout == b"new\n"

    def test_last_lines_of_both_streams(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        job.write(1, b"step 1\nstep 2\n", b"\xff Traceback\nboom")
        job.end_worker(1)
        tail = job.output.tail(1)
        assert tail.stdout == ("step 1", "step 2") and tail.stderr == ("� Traceback", "boom")
        assert job.output.tail(0).stdout == ()
        job.finish()
        assert job.output.tail(1) == tail

    def test_descriptors_are_closed_in_programs_that_are_executed(self, launch: Launch) -> None:
        job = launch()
        job.begin()
        assert not any(os.get_inheritable(fd) for pair in job.ends.values() for fd in pair)
        assert not any(os.get_inheritable(stream._fd) for stream in job.output._streams.values())
        job.finish()

    def test_nothing_stays_open(self, launch: Launch, tmp_path: Path) -> None:
        def opened() -> list[str]:
            gc.collect()  # what other tests left goes now, not in between
            return sorted(
                os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
            )

        read, write = os.pipe()
        job = launch(stdout_fd=write, log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH))
        job.fds += [read, write]
        before = opened()
        job.begin()
        assert len(opened()) == len(before) + 4 + 8
        job.finish()
        job.output.close()
        assert len(opened()) == len(before) - 1, "only the console's own description was open before"


class TestSlowConsole:
    def test_a_closed_console_stops_nobody(self, launch: Launch, tmp_path: Path) -> None:
        read, write = os.pipe()
        job = launch(stdout_fd=write, log_dir=str(tmp_path / "logs"), tee=(BOTH, BOTH))
        job.fds.append(write)
        job.begin()
        os.close(read)
        for _ in range(100):
            job.write(0, b"#" * 9999 + b"\n", b"still here\n")
            job.reactor.turn(1.0)
        job.finish()
        assert len(job.log("attempt_0/0/stdout.log") or b"") == 1_000_000
        assert job.stderr.count(b"still here\n") == 100
        assert b"hyperpodrun:" not in job.stderr, "a reader that left is no trouble (| head)"

    def test_a_stopped_console_stops_nobody_and_the_loss_is_told(self, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_module, "STALL_S", 0.05)
        read, write = os.pipe()
        job = launch(stdout_fd=write)
        job.fds += [read, write]
        job.begin()
        source = subprocess.Popen(["sh", "-c", f"yes {'0123456789' * 4} | head -c 40000000"], stdout=job.ends[0][0])
        job.until(lambda: source.poll() is not None)
        job.finish()
        told = [line for line in job.stderr.splitlines() if line.startswith(b"hyperpodrun: ")]
        assert len(told) == 3, told
        assert b"the console is too slow" in told[0] and b"--log-dir DIR -t 3" in told[0]
        dropped, given_up = int(told[1].split()[1]), int(told[2].split()[1])
        shown = len(os.read(read, 1 << 20))
        assert dropped > 20_000_000 and given_up > 10_000_000
        assert dropped + given_up + shown >= 40_000_000

    def test_a_console_that_is_only_busy_gets_everything(self, launch: Launch) -> None:
        read, write = os.pipe()
        job = launch(nproc_per_node=1, stdout_fd=write)
        job.fds.append(write)
        job.begin()
        with open(job.folder / "read.txt", "wb") as sink:
            # Reads 64 KiB at a time, slower than the source writes but not slow.
            reader = subprocess.Popen(
                [sys.executable, "-c", "import os, time\nwhile data := os.read(0, 65536): time.sleep(0.0005); os.write(1, data)"],
                stdin=read,
                stdout=sink,
            )
        os.close(read)
        source = subprocess.Popen(["head", "-c", "60000000", "/dev/zero"], stdout=job.ends[0][0])
        job.until(lambda: source.poll() is not None)
        job.finish()
        job.output.close()
        os.close(write)
        job.fds.remove(write)
        assert reader.wait(20) == 0
        assert (job.folder / "read.txt").stat().st_size == 60_000_000
        assert b"too slow" not in job.stderr
