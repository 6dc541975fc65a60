"""The agent's only loop: one thread, one epoll, timers, signals through a wake-up descriptor.

States: *idle* (blocked in epoll until a descriptor or the next timer), *dispatching* (running callbacks), *stopped*.
Invariants: callbacks never block and run one after another; a removed descriptor or cancelled timer is never called again,
even when its event was already fetched in the same turn; timers fire in the order of their times.
Source: epoll(7), signal.set_wakeup_fd.
"""

import heapq
import os
import select
import signal
import time
from collections.abc import Callable, Iterable


class Timer:
    """Handle of one pending call; `cancel()` may be called at any time, also after it fired."""

    __slots__ = ("callback", "when_s")

    def __init__(self, when_s: float, callback: Callable[[], None]) -> None:
        self.when_s = when_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Forget the call."""
        self.callback = None


class Reactor:
    """Times are `time.monotonic()` seconds."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._stopped = False
        self._on_signal: dict[int, Callable[[int], None]] = {}
        self._wake_read = -1

    def now_s(self) -> float:
        """The monotonic clock, in seconds."""
        return time.monotonic()

    def on_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back (level-triggered) while `fd` has data, is at its end, or is broken. Replaces an earlier callback."""
        self._watch(fd, self._readers, callback)

    def on_writable(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back (level-triggered) while `fd` takes data or is broken. Replaces an earlier callback.

        Raises PermissionError for a regular file: such a descriptor never blocks, write to it directly.
        """
        self._watch(fd, self._writers, callback)

    def forget_readable(self, fd: int) -> None:
        """Stop watching `fd` for input; unknown descriptors are fine."""
        self._unwatch(fd, self._readers)

    def forget_writable(self, fd: int) -> None:
        """Stop watching `fd` for room; unknown descriptors are fine."""
        self._unwatch(fd, self._writers)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. To be called before it is closed."""
        self._unwatch(fd, self._readers)
        self._unwatch(fd, self._writers)

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once, at or soon after the monotonic time `when_s`."""
        timer = Timer(when_s, callback)
        self._sequence += 1
        heapq.heappush(self._timers, (when_s, self._sequence, timer))
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once, `delay_s` seconds from now."""
        return self.call_at(self.now_s() + delay_s, callback)

    def handle_signals(self, numbers: Iterable[int], callback: Callable[[int], None]) -> None:
        """Deliver these signals to `callback` from within the loop. To be called from the main thread."""
        if self._wake_read < 0:
            self._wake_read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self.on_readable(self._wake_read, self._read_signals)
        for number in numbers:
            self._on_signal[number] = callback
            signal.signal(number, lambda *_: None)  # the wake-up descriptor carries the number
            signal.siginterrupt(number, False)

    def stop(self) -> None:
        """Leave `run` once the current callback has returned."""
        self._stopped = True

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            self.turn()

    def turn(self, limit_s: float | None = None) -> None:
        """Wait for the next event (at most `limit_s` seconds) and dispatch all that is ready."""
        timeout_s = limit_s
        while self._timers and self._timers[0][2].callback is None:  # cancelled: nothing to wake up for
            heapq.heappop(self._timers)
        if self._timers:
            until_s = max(0.0, self._timers[0][0] - self.now_s())
            timeout_s = until_s if timeout_s is None else min(timeout_s, until_s)
        # epoll counts milliseconds and rounds down: a timer would spin through its last millisecond.
        events = self._epoll.poll(None if timeout_s is None else timeout_s + 0.001)
        for fd, mask in events:
            if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and (reader := self._readers.get(fd)):
                reader()
            if mask & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR) and (writer := self._writers.get(fd)):
                writer()
            if self._stopped:
                return
        self._fire_timers()

    def _fire_timers(self) -> None:
        now_s = self.now_s()
        while self._timers and self._timers[0][0] <= now_s and not self._stopped:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()

    def _read_signals(self) -> None:
        try:
            numbers = os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        for number in dict.fromkeys(numbers):  # each once: standard signals do not count themselves either
            if callback := self._on_signal.get(number):
                callback(number)

    def _watch(self, fd: int, table: dict[int, Callable[[], None]], callback: Callable[[], None]) -> None:
        known = fd in self._readers or fd in self._writers
        table[fd] = callback
        try:
            if known:
                self._epoll.modify(fd, self._mask(fd))
            else:
                self._epoll.register(fd, self._mask(fd))
        except OSError:
            del table[fd]
            raise

    def _unwatch(self, fd: int, table: dict[int, Callable[[], None]]) -> None:
        if table.pop(fd, None) is None:
            return
        if mask := self._mask(fd):
            self._epoll.modify(fd, mask)
        else:
            self._epoll.unregister(fd)

    def _mask(self, fd: int) -> int:
        return (select.EPOLLIN if fd in self._readers else 0) | (select.EPOLLOUT if fd in self._writers else 0)
