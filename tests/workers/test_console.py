"""The launcher's own outputs: never waited for, never torn, whatever holds the other end."""

import errno
import fcntl
import os
import pty
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.workers import console as console_module
from hyperpodrun.agent.workers.console import Console
from hyperpodrun.agent.workers.lines import Voice

LIMIT_BYTES = 256 * 1024


class Bench:
    """Consoles on one reactor, and descriptors that are closed after the test."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.fds: list[int] = []
        self.consoles: list[Console] = []
        self.drops = 0

    def pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC)
        self.fds += ends
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 65536)
        return ends

    def console(self, fd: int, limit_bytes: int = LIMIT_BYTES) -> Console:
        def count() -> None:
            self.drops += 1

        console = Console(self.reactor, fd, limit_bytes=limit_bytes, on_drop=count)
        self.consoles.append(console)
        return console

    def close_end(self, fd: int) -> None:
        self.fds.remove(fd)
        os.close(fd)

    def until(self, condition: Callable[[], object], limit_s: float = 20.0) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, "it never came"
            self.reactor.turn(0.05)

    def flush(self, console: Console) -> None:
        done: list[bool] = []
        console.flush(lambda: done.append(True))
        self.until(lambda: done)

    def read_all_while_flushing(self, console: Console, fd: int) -> bytes:
        """What arrives at `fd` until the backlog is empty."""
        os.set_blocking(fd, False)
        read: list[bytes] = []

        def more() -> None:
            try:
                read.append(os.read(fd, 1 << 20))
            except BlockingIOError:
                pass

        self.reactor.on_readable(fd, more)
        self.flush(console)
        more()
        self.reactor.forget_readable(fd)
        return b"".join(read)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for console in bench.consoles:
        console.close()
    for fd in bench.fds:
        os.close(fd)


def fill(console: Console, voice: Voice, size_bytes: int, line: bytes = b"0123456789" * 100 + b"\n") -> int:
    count = size_bytes // len(line) + 1
    for _ in range(count):
        console.show(voice, line)
    return count


@pytest.fixture(params=["opened again", "polite"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of not blocking on a pipe or terminal."""
    if request.param == "polite":
        monkeypatch.setattr(console_module, "_open_again", lambda fd, is_terminal: -1)  # another user's


@pytest.mark.usefixtures("way")
class TestPipe:
    def test_what_is_shown_arrives_at_once(self, bench: Bench) -> None:
        read, write = bench.pipe()
        bench.console(write).show(Voice(b"[0]:"), b"hello\n")
        assert os.read(read, 100) == b"[0]:hello\n"

    def test_all_of_it_arrives_in_order_through_a_small_pipe(self, bench: Bench) -> None:
        read, write = bench.pipe()
        console = bench.console(write, limit_bytes=1 << 24)
        lines = [b"%d\n" % i * 50 for i in range(10_000)]
        for line in lines:
            console.show(Voice(), line)
        assert bench.read_all_while_flushing(console, read) == b"".join(lines)
        assert not bench.drops

    def test_the_flags_that_others_share_stay(self, bench: Bench) -> None:
        _, write = bench.pipe()
        fill(bench.console(write), Voice(), 2 * LIMIT_BYTES)
        assert os.get_blocking(write)

    def test_a_full_pipe_is_not_waited_for_and_the_backlog_is_bounded(self, bench: Bench) -> None:
        _, write = bench.pipe()
        console = bench.console(write)
        fill(console, Voice(b"[0]:"), 10 * LIMIT_BYTES)
        assert console.backlog_bytes <= LIMIT_BYTES
        assert console.dropped_bytes > 8 * LIMIT_BYTES
        assert bench.drops == 1

    def test_many_tiny_pieces_are_bounded_as_well(self, bench: Bench) -> None:
        _, write = bench.pipe()
        console = bench.console(write)
        voices = [Voice(b"[0]:"), Voice(b"[1]:")]
        fill(console, voices[0], 70_000)
        for i in range(20_000):
            console.show(voices[i % 2], b"x")
        assert len(console._queue) * 100 < LIMIT_BYTES

    def test_the_oldest_goes_first_and_what_stays_are_whole_lines(self, bench: Bench) -> None:
        read, write = bench.pipe()
        console = bench.console(write)
        voices = [Voice(b"[0]:"), Voice(b"[1]:")]
        for i in range(20_000):
            console.show(voices[i % 2], b"%06d ends here\n" % i)
        shown = bench.read_all_while_flushing(console, read).splitlines()
        numbers = [int(line[4:10]) for line in shown]
        assert all(line == b"[%d]:%06d ends here" % (i % 2, i) for line, i in zip(shown, numbers, strict=True))
        assert numbers == sorted(numbers)
        assert numbers[0] == 0 and numbers[-1] == 19_999 and len(numbers) < 20_000

    def test_a_line_whose_rest_is_dropped_is_not_glued_to_the_next(self, bench: Bench) -> None:
        read, write = bench.pipe()
        console = bench.console(write)
        voice = Voice(b"[0]:")
        console.show(voice, b"begin")
        for i in range(1000):
            console.show(voice, b"%d" % i * 1000)
        console.show(voice, b"\n")
        fill(console, voice, 2 * LIMIT_BYTES, b"whole line\n")
        shown = bench.read_all_while_flushing(console, read)
        assert shown.endswith(b"\n" + b"[0]:whole line\n" * 3)
        first, *others = shown.splitlines()
        assert first.startswith(b"[0]:begin0") and b"whole" not in first
        assert set(others) == {b"[0]:whole line"}

    def test_the_launchers_words_are_never_dropped(self, bench: Bench) -> None:
        read, write = bench.pipe()
        console = bench.console(write)
        fill(console, Voice(), LIMIT_BYTES // 2)
        console.show(Voice(vital=True), b"rank 0 died\n")
        fill(console, Voice(), 10 * LIMIT_BYTES)
        assert b"\nrank 0 died\n" in bench.read_all_while_flushing(console, read)

    def test_a_reader_that_leaves_closes_it_and_nothing_is_kept(self, bench: Bench) -> None:
        read, write = bench.pipe()
        console = bench.console(write)
        fill(console, Voice(), LIMIT_BYTES // 2)
        bench.close_end(read)
        bench.until(lambda: console.closed)
        console.show(Voice(), b"unheard\n")
        assert console.backlog_bytes == 0
        bench.flush(console)
        assert console.given_up_bytes == 0

    def test_no_reader_from_the_start(self, bench: Bench) -> None:
        read, write = bench.pipe()
        bench.close_end(read)
        console = bench.console(write)
        console.show(Voice(), b"unheard\n")
        assert console.closed

    def test_at_the_end_a_stopped_reader_is_given_up(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_module, "STALL_S", 0.05)
        read, write = bench.pipe()
        console = bench.console(write)
        count = fill(console, Voice(), LIMIT_BYTES // 2)
        bench.flush(console)
        assert console.closed and not console.trouble
        os.set_blocking(read, False)
        assert console.given_up_bytes + len(os.read(read, 1 << 20)) == count * 1001

    def test_at_the_end_a_trickle_is_not_waited_for_without_end(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console_module, "END_LIMIT_S", 0.2)
        read, write = bench.pipe()
        console = bench.console(write)
        fill(console, Voice(), LIMIT_BYTES - 10_000)

        def sip() -> None:
            os.read(read, 4096)
            bench.reactor.call_later(0.05, sip)

        sip()
        bench.flush(console)
        assert console.closed and console.given_up_bytes


class TestTerminal:
    def test_lines_arrive_and_flags_stay(self, bench: Bench) -> None:
        master, slave = pty.openpty()
        bench.fds += [master, slave]
        console = bench.console(slave)
        assert console.is_terminal
        console.show(Voice(b"[0]:"), b"hello\n")
        assert os.read(master, 100) == b"[0]:hello\r\n"
        assert os.get_blocking(slave)

    @pytest.mark.usefixtures("way")
    def test_a_stopped_one_is_not_waited_for(self, bench: Bench) -> None:
        master, slave = pty.openpty()
        bench.fds += [master, slave]
        console = bench.console(slave)
        fill(console, Voice(), 2 * LIMIT_BYTES)
        assert console.dropped_bytes and console.backlog_bytes <= LIMIT_BYTES
        assert os.get_blocking(slave)
        assert len(bench.read_all_while_flushing(console, master)) > LIMIT_BYTES // 2

    def test_a_stopped_one_costs_no_processor_time(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        master, slave = pty.openpty()
        bench.fds += [master, slave]
        console = bench.console(slave)
        tries: list[int] = []

        def put(data: memoryview) -> int:
            tries.append(len(data))
            raise BlockingIOError  # although it polls writable, as with one column left and a newline to write

        monkeypatch.setattr(console, "_put", put)
        console.show(Voice(), b"x\n")
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            bench.reactor.turn(0.05)
        assert len(tries) < 60

    def test_one_that_hangs_up_closes_it(self, bench: Bench) -> None:
        master, slave = pty.openpty()
        bench.fds += [master, slave]
        console = bench.console(slave)
        bench.close_end(master)
        console.show(Voice(), b"unheard\n")
        assert console.closed


class TestSocket:
    def test_full_then_read_then_gone(self, bench: Bench) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            console = bench.console(ours.fileno(), limit_bytes=1 << 24)
            count = fill(console, Voice(), 4 << 20)
            assert console.backlog_bytes
            assert ours.getblocking()
            with theirs:
                assert len(bench.read_all_while_flushing(console, theirs.fileno())) == count * 1001
            console.show(Voice(), b"unheard\n")
            assert console.closed


class TestFile:
    def test_it_is_appended_to_at_the_shared_position(self, bench: Bench, tmp_path: Path) -> None:
        path = tmp_path / "console.txt"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        bench.fds.append(fd)
        os.write(fd, b"before\n")
        bench.console(fd).show(Voice(b"[0]:"), b"x\n")
        os.write(fd, b"after\n")
        assert path.read_bytes() == b"before\n[0]:x\nafter\n"

    def test_a_full_disk_is_waited_out(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(console_module, "_FULL_DISK_RETRY_S", 0.01)
        path = tmp_path / "console.txt"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        bench.fds.append(fd)
        console = bench.console(fd)
        full = [True]

        def put(data: memoryview) -> int:
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.write(fd, data)

        console._put = put
        console.show(Voice(), b"kept\n")
        console.show(Voice(), b"in order\n")
        bench.reactor.turn(0.05)
        assert path.read_bytes() == b""
        full.clear()
        bench.until(lambda: not console.backlog_bytes)
        assert path.read_bytes() == b"kept\nin order\n"

    def test_a_device_that_is_always_full_is_given_up_with_its_reason(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(console_module, "STALL_S", 0.05)
        fd = os.open("/dev/full", os.O_WRONLY)
        bench.fds.append(fd)
        console = bench.console(fd)
        console.show(Voice(), b"12345\n")
        bench.flush(console)
        assert console.given_up_bytes == 6
        assert console.trouble == "No space left on device"


def test_a_descriptor_that_is_closed_is_no_error(bench: Bench) -> None:
    read, write = bench.pipe()
    bench.close_end(write)
    console = bench.console(write)
    console.show(Voice(), b"unheard\n")
    assert console.closed
    bench.flush(console)
    bench.close_end(read)


def test_the_null_device_takes_everything(bench: Bench) -> None:
    fd = os.open(os.devnull, os.O_WRONLY)
    bench.fds.append(fd)
    console = bench.console(fd)
    fill(console, Voice(), 4 * LIMIT_BYTES)
    assert not console.backlog_bytes and not console.dropped_bytes


def test_room_is_told(bench: Bench) -> None:
    read, write = bench.pipe()
    console = bench.console(write)
    told: list[int] = []
    console.on_room = lambda: told.append(console.backlog_bytes)
    fill(console, Voice(), LIMIT_BYTES // 2)
    told.clear()
    bench.read_all_while_flushing(console, read)
    assert told[-1] == 0
