"""Getting a thread out of the wrapped function.

Theory. A Python signal handler that raises breaks whatever the main thread waits for in Python's own C code (sleep, locks, queues,
sockets) in under a millisecond, because the call comes back with EINTR; PyThreadState_SetAsyncExc waits for such a call to end, so
it is only the second way, for a function that runs in another thread, where handlers never run. Neither reaches a thread that is
blocked in a library: `stop` calls `unblock` for that, which tears what the library waits for. A raise can be lost (`__del__`, a
callback of the collector, `except BaseException`), so it is repeated until the function has been left.

States of the region: *open* (not armed: every kick is ignored), *armed*, *asked* (a reason is set), *raised* (at least once).
A raise is not repeated while user code is still handling the one before (a `finally`, an `__exit__`) for up to CLEANUP_S: the
exception is then in the thread's chain of handled exceptions; when it is not there any more, it was swallowed.

Sections defer the raise: `critical()` for as long as it lasts (the agent's deadline is the bound), `update()` for UPDATE_S.

An exception that C code raises is not preceded by a look for signals: one that is pending by then is looked at when the next function
is entered, on the way out already. So the way out begins with a plain store, which the handler heeds, and not with a call.

Invariants: nothing is raised once `run` has been left, nor in any thread but the one that runs, nor in a forked child.
Source: signal(7), Python's `signal` (handlers run in the main thread), PEP 475.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from hyperpodrun.inprocess.errors import RestartRequested

CLEANUP_S = 5.0
"""How long a `finally`, `__exit__` or `except` of the user's may take before it is broken too."""
UPDATE_S = 2.0
"""How long an update of the state may hold a raise up; a torn update is known as torn."""
SECTION_S = 0.5
"""How long communication is left alone for the sake of a section: what it waits for may be gone."""
UNBLOCK_AFTER_S = 0.004
T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Interrupter:
    """One region of one thread at a time: what `run` runs. `stop` is called by another thread."""

    def __init__(self) -> None:
        self.left = threading.Event()
        """Set while the region is open."""
        self.left.set()
        self._section_over = threading.Event()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._signal = 0
        self._armed = False
        self._reason: str | None = None
        self._asked_at = 0.0
        self._raised_at = 0.0
        self._raised: RestartRequested | None = None
        self._critical = 0
        self._updates = 0
        self._thread = 0
        self._on_main = False

    # --- the thread that runs the function

    def run(self, body: Callable[[], T]) -> T:
        """What `body` gives. In it this thread can be told to leave: RestartRequested."""
        try:
            self._arm()
            return body()
        finally:
            self._armed = False
            while True:
                try:
                    self._disarm()
                    break
                except RestartRequested:
                    pass  # by SetAsyncExc, and on its way before

    def _arm(self) -> None:
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._on_main = threading.current_thread() is threading.main_thread()
        if self._on_main:
            self._install()
        self._reason = self._raised = None
        self._critical = self._updates = 0
        self.left.clear()
        self._armed = True

    def _disarm(self) -> None:
        if not self._on_main:
            with self._lock:
                _set_async(self._thread, None)
        self._raised = None
        self.left.set()

    @property
    def asked(self) -> bool:
        """Has this region been told to leave?"""
        return self._reason is not None

    def mine(self, error: BaseException | None) -> bool:
        """Did `error` grow out of a raise of this region (itself, or raised while it was handled)?"""
        seen = 0
        while error is not None and seen < 100:
            if isinstance(error, RestartRequested):
                return self.asked
            error, seen = error.__cause__ or error.__context__, seen + 1
        return False

    @contextmanager
    def critical(self) -> Iterator[None]:
        """No raise inside. In other threads, and outside a region: nothing."""
        with self._section("_critical"):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """No raise inside for UPDATE_S after the order."""
        with self._section("_updates"):
            yield

    @contextmanager
    def _section(self, counter: str) -> Iterator[None]:
        if not self._armed or threading.get_ident() != self._thread or os.getpid() != self._pid:
            yield
            return
        self._enter(counter)
        try:
            yield
        finally:
            setattr(self, counter, getattr(self, counter) - 1)
            self._section_over.set()
        if self._armed and self._reason is not None and not self._deferred():
            self._raise()

    def _enter(self, counter: str) -> None:
        with self._lock:
            setattr(self, counter, getattr(self, counter) + 1)
            self._section_over.clear()
            if not self._on_main:
                _set_async(self._thread, None)  # one that is on its way would arrive inside

    # --- another thread

    def stop(self, reason: str, unblock: Callable[[], None]) -> None:
        """Make the armed thread leave; returns when it has. `unblock` is called once when raising alone does not do it."""
        self._asked_at = time.monotonic()
        self._reason = reason
        unblocked, pause_s = False, _FIRST_PAUSE_S
        while not self.left.is_set() and os.getpid() == self._pid:
            waited_s = time.monotonic() - self._asked_at
            in_section = self._deferred()
            if in_section and waited_s < SECTION_S:
                self._section_over.wait(min(0.02, SECTION_S - waited_s))
                continue
            if not in_section:
                self._kick()
            if self.left.wait(pause_s):
                return
            if not unblocked and (not in_section or waited_s >= SECTION_S) and waited_s >= UNBLOCK_AFTER_S:
                unblocked = True
                unblock()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _kick(self) -> None:
        with self._lock:
            if not self._armed or self._deferred():
                return
            if self._on_main:
                try:
                    signal.pthread_kill(self._thread, self._signal)
                except ProcessLookupError:
                    pass  # the interpreter is ending
            elif not self._unwinding(_handled_by(self._thread)):
                self._raised_at = time.monotonic()
                _set_async(self._thread, RestartRequested)

    # --- inside

    def _deferred(self) -> bool:
        if self._critical:
            return True
        return self._updates > 0 and time.monotonic() < self._asked_at + UPDATE_S

    def _unwinding(self, handled: BaseException | None) -> bool:
        return self._raised_at + CLEANUP_S > time.monotonic() and self.mine(handled)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._armed or self._reason is None or os.getpid() != self._pid:
            return
        if not self._deferred() and not self._unwinding(sys.exc_info()[1]):
            self._raise()

    def _raise(self) -> None:
        self._raised_at = time.monotonic()
        raise RestartRequested(self._reason or "")

    def _install(self) -> None:
        if self._signal and signal.getsignal(self._signal) == self._on_signal:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [self._signal])
            return
        self._signal = unused_signal()
        signal.signal(self._signal, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [self._signal])
        _hide_unraisable()


def unused_signal() -> int:
    """A real-time signal for which nobody has a handler, C libraries and faulthandler included, and that nobody ignores.

    Raises RuntimeError when there is none.
    """
    taken = _mask("SigCgt") | _mask("SigIgn")
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL and not taken >> (number - 1) & 1:
            return number
    raise RuntimeError("every real-time signal of this process has a handler; the wrapper needs one of its own")


def _mask(name: str) -> int:
    """A set of signals in /proc/self/status: bit N - 1 is signal N; 0 where it cannot be read."""
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1], 16) for line in file if line.startswith(f"{name}:")), 0)
    except OSError:
        return 0


def _set_async(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind))


def _handled_by(thread: int) -> BaseException | None:
    found: Any = sys._current_exceptions().get(thread)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # Python 3.11 gives exc_info's triple
    return error


_hidden = False


def _hide_unraisable() -> None:
    """A raise that a destructor has swallowed comes again: nobody needs to read of it."""
    global _hidden
    if _hidden:
        return
    _hidden = True
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RestartRequested):
            before(unraisable)

    sys.unraisablehook = hook
