"""Threads that run native code and are over before the interpreter is.

Theory. A daemon thread that comes back from native code while Python is being torn down is unwound on the spot (pthread_exit of the
C API, "Initialization, Finalization, and Threads"). On its way lie frames of C++ that must not be unwound, as those in which pybind11
takes the GIL again: the process, its work done, ends by SIGABRT ("terminate called without an active exception"). A thread that is no
daemon is waited for, but without end and before anything could tell it to stop. So these are told, and waited for, at exit.

Invariant: none of them is left at the end but one that outlasts its limit: it is stuck in native code, and does not come back.
"""

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 10.0
"""How long one is waited for, from the exit on."""

_running: dict[threading.Thread, tuple[Callable[[], object], float]] = {}
"""Those that have not ended: what stops a thread has it, as a rule, so that weak references would keep both for ever."""


def thread(
    target: Callable[..., object], *args: Any, name: str, stop: Callable[[], object], limit_s: float = LIMIT_S
) -> threading.Thread:
    """Start a thread that `stop` ends soon, within `limit_s` seconds at the longest (called from another thread, at exit)."""

    def body() -> None:
        try:
            target(*args)
        finally:
            _running.pop(made, None)

    made = threading.Thread(target=body, name=f"hyperpodrun-{name}", daemon=True)
    _running[made] = stop, limit_s
    try:
        made.start()
    except RuntimeError:  # no more threads
        del _running[made]
        raise
    return made


def by_itself() -> None:
    """The `stop` of a thread that ends by itself."""


def _end_all() -> None:
    running = list(_running.items())
    for _, (stop, _) in running:
        stop()
    began_s = time.monotonic()
    for made, (_, limit_s) in running:
        made.join(min(max(0.0, began_s + limit_s - time.monotonic()), threading.TIMEOUT_MAX))


atexit.register(_end_all)
