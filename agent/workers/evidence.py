"""What a failed rank left behind, read once it has ended: torch's error file and the last of its output.

`torch.distributed.elastic.multiprocessing.errors.record` writes TORCHELASTIC_ERROR_FILE as JSON, in one of two forms:

    {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000000"}}}
    {"message": "text"}

The file belongs to the user's program: it may be missing, half written, huge, not JSON, not even a file. Then it says nothing.
"""

import os
import signal

import msgspec

from hyperpodrun.agent.policy.blame import Evidence, Recorded, blames_a_peer
from hyperpodrun.agent.wire.exit_codes import from_wait_status, signal_of_wait_status
from hyperpodrun.agent.workers.lines import Tail
from hyperpodrun.agent.workers.plain import plain_text
from hyperpodrun.agent.workers.tracebacks import last_exception, logged_errors

ERROR_FILE_LIMIT_BYTES = 8 * 1024 * 1024


def gather(error_file: str | None, tail: Tail, status: int) -> Evidence:
    """All that is known of one rank's end. `status` is its wait(2) status."""
    recorded = read_error_file(error_file) if error_file else None
    stderr = plain_text("\n".join(tail.stderr))
    found = last_exception(stderr)
    if recorded is not None:
        chain = last_exception(recorded.traceback)
        words = chain.origins if chain is not None else (recorded.text,)
    elif found is not None and (found.raised.final or from_wait_status(status) == 1):
        words = found.origins
    else:
        words = tuple(logged_errors(stderr)) if signal_of_wait_status(status) == signal.SIGABRT else ()
    # A group of exceptions is a victim's only when all of them are; of a log, one line is enough.
    judged = any if found is None and recorded is None else all
    victim = bool(words) and judged(blames_a_peer(word) for word in words)
    if signal_of_wait_status(status) == signal.SIGPIPE:
        victim = True
    return Evidence(recorded=recorded, raised=found.raised if found is not None else None, victim=victim)


def of_fault(text: str, headline: str) -> Evidence:
    """What a rank said itself when its function raised: a traceback, or (a reason that it gave) none."""
    shown = plain_text(text).strip()
    found = last_exception(shown)
    recorded = Recorded(plain_text(headline).strip() or shown.rpartition("\n")[2], shown)
    words = found.origins if found is not None else (recorded.text,)
    return Evidence(recorded=recorded, victim=all(blames_a_peer(word) for word in words))


def read_error_file(path: str) -> Recorded | None:
    """The error file's content; None when there is none that can be read and understood."""
    raw = _read_file(path, ERROR_FILE_LIMIT_BYTES)
    if not raw:
        return None
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return Recorded(plain_text(message)) if message.strip() else None
    if not isinstance(message, dict):
        return None
    text, extra = message.get("message"), message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    traceback = extra.get("py_callstack")
    if not isinstance(text, str) and not isinstance(traceback, str):
        return None
    shown = plain_text(traceback).strip() if isinstance(traceback, str) else ""
    told = plain_text(text).strip() if isinstance(text, str) else ""
    return Recorded(told or shown.rpartition("\n")[2], shown, _whole_seconds(extra.get("timestamp")))


def _whole_seconds(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = int(float(value))
    except (ValueError, OverflowError):
        return None
    return seconds if seconds > 0 else None


def _read_file(path: str, limit_bytes: int) -> bytes | None:
    """At most `limit_bytes` of the file (cut JSON is no JSON); None when it cannot be read. Does not block on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        chunks = []
        left = limit_bytes
        while left and (chunk := os.read(fd, min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return None
    finally:
        os.close(fd)
