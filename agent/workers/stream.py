"""One pipe of one process on its way to the console, the files and the failure report; and the brake for a busy console.

States of a stream: *new*, *open*, *paused* (the brake is on), *closed* (at the pipe's end, or given up).
States of a brake: *off*, *on* (a bet that the console drains), *lost* (a slow console: no bets until its backlog is empty).
Invariants: at most `READ_BYTES` a callback, so that one chatty rank does not starve the others; a line without its newline is
shown after `HOLD_S`; reading is paused for at most `BRAKE_S` a bet; a closed stream shows nothing more.
Source: pipe(7), fcntl(2) F_SETPIPE_SZ.
"""

import os
from collections.abc import Callable

from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.workers.console import Console
from hyperpodrun.agent.workers.lines import Held, LastLines, Matching, Voice
from hyperpodrun.agent.workers.logfiles import LogFile

READ_BYTES = 256 * 1024
PIPE_BYTES = 1024 * 1024
HOLD_S = 0.1
BRAKE_S = 0.25
_F_SETPIPE_SZ = 1031
_buffer = memoryview(bytearray(READ_BYTES))  # one for all: nothing stays in it between callbacks


class Brake:
    """Pauses the streams of a console whose backlog passed one half, until it is down to a quarter or `BRAKE_S` is over."""

    def __init__(self, reactor: Reactor, console: Console) -> None:
        self.console = console
        self.streams: set[Stream] = set()
        """The open streams that this console shows."""
        self._reactor = reactor
        self._paused: list[Stream] = []
        self._timer: Timer | None = None
        self._lost = False
        console.on_room = self._room

    def check(self) -> None:
        """To be called after something was shown."""
        if self._timer is None and not self._lost and self.console.backlog_bytes > self.console.limit_bytes // 2:
            self._timer = self._reactor.call_later(BRAKE_S, self._lose)
            self._paused = list(self.streams)
            for stream in self._paused:
                stream.pause()

    def _room(self) -> None:
        if self._timer is not None and self.console.backlog_bytes <= self.console.limit_bytes // 4:
            self._release(self._timer)
        if not self.console.backlog_bytes:
            self._lost = False

    def _lose(self) -> None:
        self._lost = True
        if self._timer is not None:
            self._release(self._timer)

    def _release(self, timer: Timer) -> None:
        timer.cancel()
        self._timer = None
        for stream in self._paused:
            if stream in self.streams:
                stream.resume()
        self._paused = []


class Stream:
    """`brake`: of the console that shows this stream; None: it is not shown. The fields may be set until `open`."""

    def __init__(self, reactor: Reactor, brake: Brake | None, voice: Voice) -> None:
        self.brake = brake
        self.voice = voice
        self.last = LastLines()
        self.file: LogFile | None = None
        self.matching: tuple[Matching, LogFile] | None = None
        self.on_closed: Callable[[], None] | None = None
        self._reactor = reactor
        self._held = Held()
        self._held_since_s = 0.0
        self._timer: Timer | None = None
        self._fd = -1

    def open(self) -> int:
        """Make the pipe; returns its write end, the caller's to close. Raises OSError."""
        self._fd, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)  # the reading end only: the writing end is an open file description of its own
        _enlarge(write)
        if self.brake is not None:
            self.brake.streams.add(self)
        self.resume()
        return write

    def pause(self) -> None:
        """Leave what comes in the pipe for now."""
        self._reactor.forget_readable(self._fd)

    def resume(self) -> None:
        """Read again."""
        self._reactor.on_readable(self._fd, self._readable)

    def drain(self) -> bool:
        """Read what is in the pipe by now, and no more (somebody may write on for ever). False when the stream is closed."""
        left_bytes = PIPE_BYTES
        while self._fd >= 0 and left_bytes > 0 and (count := self._read()):
            left_bytes -= count
        if self._fd >= 0 and left_bytes <= 0:
            self._read()  # the end may stand right behind a full pipe
        return self._fd >= 0

    def close(self) -> None:
        """Let go of the pipe and show what is held."""
        if self._fd < 0:
            return
        self._reactor.forget(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.brake is not None:
            self.brake.streams.discard(self)
            self.brake.console.show(self.voice, self._held.take())
            self.brake.console.end(self.voice)
        if self.matching is not None:
            matching, file = self.matching
            file.write(matching.end())
        if self.on_closed is not None:
            self.on_closed()

    def _readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            count = os.readv(self._fd, [_buffer])
        except BlockingIOError:
            return 0
        if not count:
            self.close()
            return 0
        data = bytes(_buffer[:count])
        self.last.feed(data)
        if self.file is not None:
            self.file.write(data)
        if self.matching is not None:
            matching, file = self.matching
            file.write(matching.feed(data))
        if self.brake is not None:
            self._show(self.brake.console, data)
            self.brake.check()
        return count

    def _show(self, console: Console, data: bytes) -> None:
        if self.voice.exact:
            console.show(self.voice, data)
            return
        had_held = bool(self._held)
        console.show(self.voice, self._held.feed(data))
        if self._held:
            if not had_held or b"\n" in data:
                self._held_since_s = self._reactor.now_s()
            if self._timer is None:
                self._timer = self._reactor.call_later(HOLD_S, self._show_held)

    def _show_held(self) -> None:
        self._timer = None
        if not self._held or self.brake is None:
            return
        due_s = self._held_since_s + HOLD_S
        if self._reactor.now_s() < due_s:  # a younger line than the one the timer was set for
            self._timer = self._reactor.call_at(due_s, self._show_held)
        else:
            self.brake.console.show(self.voice, self._held.take())


def _enlarge(fd: int) -> None:
    """A larger pipe lets a worker go on while the agent is busy. Allowed up to a per-user sum (pipe-user-pages-soft)."""
    from fcntl import fcntl

    for size_bytes in (PIPE_BYTES, PIPE_BYTES // 4):
        try:
            fcntl(fd, _F_SETPIPE_SZ, size_bytes)
        except OSError:  # EPERM: the default of 64 KiB does as well
            continue
        return
