"""One of the launcher's own outputs (a terminal, pipe, socket or file), written without ever waiting for it.

Theory. Whoever holds the other end may be slow, stopped or gone; training must not notice. So nothing is written that could
block: pipes and terminals are opened once more through /proc/self/fd with O_NONBLOCK (an open file description of our own: the
flags that a shell shares with us stay as they are), sockets take MSG_DONTWAIT, regular files are written directly. Where
opening again is refused (another user's), a pipe is polled first and given no more than polling promises, and a terminal is
made non-blocking for the moment of each write.

What cannot be written yet is a backlog of unrendered pieces. Prefixes and line ends are rendered on the way out, so that pieces
can be dropped from the backlog without tearing what remains.

States: *open* (backlog empty), *waiting* (backlog, for room or, on a full disk, for a second), *closed* (reader gone, given up).
Invariants: the backlog is at most `limit_bytes`: beyond it the oldest pieces go first, vital ones never; a closed console takes
everything and keeps nothing.
Source: pipe(7), open(2), proc_pid_fd(5), tty_ioctl(4), send(2).
"""

import errno
import os
import select
import stat
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.workers.lines import Screen, Voice

if TYPE_CHECKING:
    import socket

LIMIT_BYTES = 16 * 1024 * 1024
STALL_S = 5.0
"""At the end: this long without a byte taken, and the rest is given up."""
END_LIMIT_S = 30.0
_PIECE_OVERHEAD_BYTES = 128  # of a queued piece's objects, so that many small pieces are bounded too
_JOIN_BYTES = 4096  # smaller neighbours of one voice are queued as one piece
_BATCH_BYTES = 64 * 1024
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL_DISK_RETRY_S = 1.0
_NO_ROOM_RETRY_S = 0.02
_TIOCGDEV = 0x80045432
_MSG_DONTWAIT = 0x40

Put = Callable[[memoryview], int]
"""Writes a part of what it gets and returns how much; raises BlockingIOError instead of waiting."""


class Console:
    """`fd` stays the caller's. `on_drop` is called once, when something is dropped for the first time."""

    def __init__(
        self, reactor: Reactor, fd: int, *, limit_bytes: int = LIMIT_BYTES, on_drop: Callable[[], None] = lambda: None
    ) -> None:
        self._reactor = reactor
        self.limit_bytes = limit_bytes
        self._on_drop = on_drop
        self._screen = Screen()
        self._queue: deque[tuple[Voice, bytes | None]] = deque()  # None: the voice ends
        self._size_bytes = 0  # of the queue, overhead included
        self._head = memoryview(b"")  # rendered, partly written
        self._waiting = False
        self._retry: Timer | None = None
        self._progress_s = reactor.now_s()
        self._on_flushed: Callable[[], None] | None = None
        self._deadline: Timer | None = None
        self.dropped_bytes = 0
        self.given_up_bytes = 0
        self.trouble = ""
        """Why the last write was refused, in the system's words."""
        self.closed = False
        self.on_room: Callable[[], None] = lambda: None
        """Called whenever some of the backlog was written."""
        self._own_fd = -1
        self._socket: socket.socket | None = None
        self._fd = fd
        self.is_terminal = False
        self._put: Put = self._write
        try:
            kind = os.fstat(fd).st_mode
        except OSError:  # closed by whoever started us (`>&-`)
            self.closed = True
            return
        self.is_terminal = os.isatty(fd)
        if stat.S_ISSOCK(kind):
            self._socket = _socket_of(fd)
            self._put = self._send
        elif not stat.S_ISREG(kind):
            self._own_fd = _open_again(fd, self.is_terminal)
            if self._own_fd >= 0:
                self._fd = self._own_fd
            elif self.is_terminal:
                self._put = _hasty_put(fd)
            elif stat.S_ISFIFO(kind):
                self._put = _polite_put(fd)

    @property
    def backlog_bytes(self) -> int:
        """What waits to be written, with its overhead."""
        return self._size_bytes + len(self._head)

    def show(self, voice: Voice, data: bytes) -> None:
        """Let `data` of `voice` appear next; at once when nothing waits."""
        if self.closed or not data:
            return
        queue = self._queue
        if not queue and not self._head:
            self._head = memoryview(self._screen.render(voice, data))
            self._flush()
            return
        if queue and (last := queue[-1])[0] is voice and last[1] is not None and len(last[1]) + len(data) <= _JOIN_BYTES:
            queue[-1] = (voice, last[1] + data)
            self._size_bytes += len(data)
        else:
            self._push(voice, data)
        if self.backlog_bytes > self.limit_bytes:
            self._drop()

    def end(self, voice: Voice) -> None:
        """`voice` says nothing more: its open line is ended."""
        if not self.closed:
            self._push(voice, None)
            if not self._waiting and self._retry is None:
                self._flush()

    def flush(self, on_flushed: Callable[[], None]) -> None:
        """Call back from the loop once nothing waits, or the console was given up: no byte taken in 5 s, or 30 s in all.

        Given up, it is closed and `given_up_bytes` says how much was left.
        """
        self._on_flushed = on_flushed
        self._progress_s = self._reactor.now_s()
        self._watch_end(self._progress_s + END_LIMIT_S)

    def close(self) -> None:
        """Stop writing and forget what waits; the caller's descriptor stays open."""
        self.closed = True
        self._queue.clear()
        self._size_bytes = 0
        self._head = memoryview(b"")
        self._wait(False)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = self._fd = -1
        if self._socket is not None:
            self._socket.close()
        self._flushed()
        self.on_room()

    def _push(self, voice: Voice, data: bytes | None) -> None:
        self._queue.append((voice, data))
        self._size_bytes += _PIECE_OVERHEAD_BYTES + len(data or b"")

    def _drop(self) -> None:
        first = not self.dropped_bytes
        kept: list[tuple[Voice, bytes | None]] = []
        while self._queue and self.backlog_bytes > self.limit_bytes:
            voice, data = self._queue.popleft()
            if voice.vital or data is None:
                kept.append((voice, data))
                continue
            self._size_bytes -= _PIECE_OVERHEAD_BYTES + len(data)
            self.dropped_bytes += len(data)
            self._screen.lose(voice)  # all it said before is rendered or lost as well
        self._queue.extendleft(reversed(kept))
        if first and self.dropped_bytes:
            self._on_drop()

    def _flush(self) -> None:
        before_bytes, wrote = self.backlog_bytes, False
        try:
            while self._head or self._queue:
                if not self._head and not self._fill():
                    continue
                count = self._put(self._head)
                self._head = self._head[count:]
                if count:
                    wrote = True
                    self._progress_s = self._reactor.now_s()
        except BlockingIOError:
            if self._waiting and not wrote:  # a terminal may poll writable and take nothing: don't spin
                self._try_later(_NO_ROOM_RETRY_S)
            else:
                self._wait(True)
        except OSError as error:
            self.trouble = os.strerror(error.errno or 0)
            if error.errno not in _FULL_DISK:
                self.close()  # EPIPE, EIO (a terminal that hung up): nobody will ever read this again
                return
            self._try_later(_FULL_DISK_RETRY_S)
        else:
            self._wait(False)
            self._flushed()
        if self.backlog_bytes < before_bytes:
            self.on_room()

    def _fill(self) -> bool:
        pieces: list[bytes] = []
        size_bytes = 0
        while self._queue and size_bytes < _BATCH_BYTES:
            voice, data = self._queue.popleft()
            self._size_bytes -= _PIECE_OVERHEAD_BYTES + len(data or b"")
            piece = self._screen.end(voice) if data is None else self._screen.render(voice, data)
            pieces.append(piece)
            size_bytes += len(piece)
        self._head = memoryview(b"".join(pieces))
        return bool(size_bytes)

    def _write(self, data: memoryview) -> int:
        return os.write(self._fd, data)

    def _send(self, data: memoryview) -> int:
        return self._socket.send(data, _MSG_DONTWAIT) if self._socket is not None else 0

    def _try_later(self, delay_s: float) -> None:
        self._wait(False)
        if self._retry is None:
            self._retry = self._reactor.call_later(delay_s, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

    def _wait(self, wait: bool) -> None:
        if wait == self._waiting:
            return
        self._waiting = wait
        if wait:
            self._reactor.on_writable(self._fd, self._flush)
        else:
            self._reactor.forget_writable(self._fd)

    def _flushed(self) -> None:
        if self._on_flushed is not None and not self.backlog_bytes:
            callback, self._on_flushed = self._on_flushed, None
            if self._deadline is not None:
                self._deadline.cancel()
            self._reactor.call_later(0.0, callback)

    def _watch_end(self, limit_s: float) -> None:
        self._flushed()
        if self._on_flushed is None:
            return
        until_s = min(limit_s, self._progress_s + STALL_S)
        if self._reactor.now_s() >= until_s:
            self.given_up_bytes = sum(len(data) for _, data in self._queue if data) + len(self._head)
            self.close()
        else:
            self._deadline = self._reactor.call_at(until_s, lambda: self._watch_end(limit_s))


def _open_again(fd: int, is_terminal: bool) -> int:
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    except OSError:  # another user's (after su or sudo), or no /proc
        return _open_terminal(fd, flags) if is_terminal else -1


def _open_terminal(fd: int, flags: int) -> int:
    """/dev/tty may be opened whoever owns it; use it when it is the same terminal."""
    from fcntl import ioctl

    try:
        again = os.open("/dev/tty", flags)
    except OSError:  # no controlling terminal
        return -1
    try:
        if ioctl(again, _TIOCGDEV, b"\0\0\0\0") == ioctl(fd, _TIOCGDEV, b"\0\0\0\0"):
            return again
    except OSError:  # Linux before 3.3
        pass
    os.close(again)
    return -1


def _polite_put(fd: int) -> Put:
    """A pipe that polls writable takes PIPE_BUF bytes without blocking."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)

    def put(data: memoryview) -> int:
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(fd, data[: select.PIPE_BUF])

    return put


def _hasty_put(fd: int) -> Put:
    """A terminal promises nothing by polling writable. So the flag is set on the shared description, for one write at a time."""

    def put(data: memoryview) -> int:
        blocks = os.get_blocking(fd)
        os.set_blocking(fd, False)
        try:
            return os.write(fd, data)
        finally:
            os.set_blocking(fd, blocks)

    return put


def _socket_of(fd: int) -> "socket.socket":
    import socket

    return socket.socket(fileno=os.dup(fd))
