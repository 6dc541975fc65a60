"""Exceptions as text for the agent, and getting rid of what they keep alive.

A traceback holds every frame it went through, a frame its locals: the tensors of the whole step. They must be gone before the function
runs again. An exception may refuse to be written down (`__str__` raises, a gigabyte of message, no memory): then less is told.
"""

import os
import traceback
from collections.abc import Iterator
from types import TracebackType

from hyperpodrun.agent.wire.link import TEXT_BYTES

_HEADLINE_BYTES = 2000
_RESERVE_BYTES = 4 << 20
_FRAMES = 400
_OURS = os.path.dirname(__file__)


class Reserve:
    """Memory kept for telling that there is none."""

    def __init__(self) -> None:
        self._held: bytearray | None = None

    def hold(self) -> None:
        """Take it, if there is any."""
        if self._held is None:
            try:
                self._held = bytearray(_RESERVE_BYTES)
            except MemoryError:
                pass

    def spend(self) -> None:
        """Give it back to the allocator."""
        self._held = None


def fit(text: str, size_bytes: int) -> str:
    """Cut in the middle to `size_bytes` of UTF-8; what has no UTF-8 is escaped."""
    if len(text) > size_bytes:  # before it is encoded: it may be huge
        text = text[: size_bytes // 2] + " [...] " + text[-(size_bytes // 2) :]
    data = text.encode(errors="backslashreplace")
    if len(data) > size_bytes:
        mark = b" [...] "
        half = (size_bytes - len(mark)) // 2
        data = data[:half] + mark + data[-half:]
    return data.decode(errors="ignore")


def headline(error: BaseException) -> str:
    """As the last line of a traceback."""
    kind = kind_of(error)
    try:
        words = str(error)
    except RecursionError:
        words = "<its text is too deep>"
    except BaseException as problem:  # noqa: BLE001 - user code; it must not cost the report
        words = f"<str() raised {type(problem).__name__}>"
    return fit(f"{kind}: {words}" if words else kind, _HEADLINE_BYTES)


def kind_of(error: BaseException) -> str:
    """The class's name, with its module where it is not Python's own."""
    kind = type(error)
    name = kind.__qualname__
    return name if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{name}"


def text_of(error: BaseException) -> str:
    """The traceback, cut in the middle; "" when it cannot be written."""
    try:
        trace = _without_ours(error.__traceback__)
        report = traceback.TracebackException(type(error), error, trace, limit=-_FRAMES, compact=True)
        return fit("".join(report.format()), TEXT_BYTES)
    except BaseException:  # noqa: BLE001 - a report without a traceback is better than none
        return ""


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """From the first frame of the user's on; the whole where there is none."""
    first = trace
    while first is not None and os.path.dirname(first.tb_frame.f_code.co_filename) == _OURS:
        first = first.tb_next
    return first or trace


def release(error: BaseException) -> None:
    """Let go of all frames, and with them of the locals, that `error` and the exceptions around it hold."""
    for one in _family(error):
        trace = one.__traceback__
        while trace is not None:
            try:
                trace.tb_frame.clear()
            except RuntimeError:
                pass  # still running: the wrapper's own
            trace = trace.tb_next
        one.__traceback__ = None


def _family(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
