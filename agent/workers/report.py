"""The text of a failure report: what failed first, why as far as it left a trace, what else fell, and what happens now.

Pure: values in, plain text out (no colour, no time of day, nothing looked up), so that a report can be tested word for word.
Order of the parts, each only where there is something to say: head line, hints, traceback, last lines of output, files, other
ranks, next step. Everything a report claims has a source: an OOM kill is named only when the cgroup's
counter rose, an exception only when it ended the process.
"""

import signal
from collections.abc import Sequence

import msgspec

from hyperpodrun.agent.health.shm import ShmFigures
from hyperpodrun.agent.policy.blame import Evidence, WorkerEnd
from hyperpodrun.agent.wire.exit_codes import from_wait_status, signal_name, signal_of_wait_status
from hyperpodrun.agent.wire.rungs import Asked
from hyperpodrun.agent.workers.lines import Tail
from hyperpodrun.agent.workers.plain import plain, plain_text

LAST_LINES = 50
LINE_CHARS = 2000
"""A longer line is cut: one line of binary noise must not fill the screen."""
TRACEBACK_LINES = 80
SHORT_LINES = 5
OTHERS_SHOWN = 16
FATAL_PREFIX = "Fatal Python error"


class FailedRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's end with all that is known of it."""

    end: WorkerEnd
    evidence: Evidence = Evidence()
    tail: Tail = Tail()
    log_files: tuple[str, ...] = ()
    rung: Asked = ""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows beside the ranks.

    `started_at_s`: monotonic time of this attempt's start. `restart_count` is that of the attempt, 0 for the first. `next_step`
    says what happens now. `oom_kills` is by how much the cgroup's counter rose during the attempt (None: not known).
    """

    host: str
    started_at_s: float
    restart_count: int
    next_step: str
    program: str = ""
    oom_kills: int | None = None
    memory_limit_bytes: int | None = None
    shm: ShmFigures | None = None


def ending(status: int) -> str:
    """ "exited with code 5" or "killed by SIGKILL (signal 9)", from a wait(2) status."""
    number = signal_of_wait_status(status)
    if number is None:
        return f"exited with code {from_wait_status(status)}"
    verb = "aborted by" if number == signal.SIGABRT else "killed by"
    name = signal_name(number)
    return f"{verb} {name} (signal {number})" if name != f"signal {number}" else f"{verb} {name}"


def headline(root: FailedRank, about: Circumstances) -> str:
    """The report in one line: for other nodes and for logs."""
    end = root.end
    what = ending(end.status) if signal_of_wait_status(end.status) is None else f"was {ending(end.status)}"
    if end.unkillable:
        what = "could not be killed: the kernel holds it"
    elif end.hung:
        what = "was hung" if end.why else f"was hung and had to be stopped ({ending(end.status)})"
    elif end.left:
        what = "failed"
    line = f"rank {end.rank} (local rank {end.local_rank}, pid {end.pid}) on {about.host} {what}"
    line += f", {_seconds(end.at_s - about.started_at_s)} after the start"
    if about.restart_count:
        line += f" (restart {about.restart_count})"
    if end.why:
        line += f": {plain(end.why)}"
    elif cause := exception_line(root):
        line += f": {cause}" if _exception_is_certain(root) else f"; the last exception in its output is {cause}"
    return line


def exception_line(failed: FailedRank) -> str:
    """Type and first line of the message of the exception that ended the process; "" when none can have."""
    if failed.evidence.recorded is not None:
        return _cut(_first_line(failed.evidence.recorded.text), 300)
    raised = failed.evidence.raised
    if raised is None or not _ended_by_exception(failed):
        return ""
    message = _first_line(raised.message)
    return _cut(f"{raised.type}: {message}" if message else raised.type, 300)


def render(root: FailedRank, others: Sequence[FailedRank], about: Circumstances) -> str:
    """The whole report, several lines, no newline at its end. `others` are the other failed ranks, in any order."""
    lines = [f"first failure: {headline(root, about)}" if others else headline(root, about)]
    lines += [f"  hint: {hint}" for hint in hints(root, about)]
    traceback = _traceback(root)
    if traceback:
        lines += [f"traceback of rank {root.end.rank}:", *_indent(_lines(traceback, TRACEBACK_LINES))]
    lines += _last_output(root, beside_traceback=bool(traceback))
    if root.log_files:
        lines += ["log files: " + ", ".join(root.log_files)]
    lines += _others(root, others)
    lines.append(about.next_step)
    return "\n".join(lines)


def hints(root: FailedRank, about: Circumstances) -> list[str]:
    """Sentences on what this kind of end usually means and what to do; each backed by something measured."""
    number = signal_of_wait_status(root.end.status)
    code = None if number is not None else from_wait_status(root.end.status)
    found = []
    if about.oom_kills and number == signal.SIGKILL and not root.end.signalled:
        limit = f" (memory limit {_size(about.memory_limit_bytes)})" if about.memory_limit_bytes else ""
        times = "once" if about.oom_kills == 1 else f"{about.oom_kills} times"
        found.append(
            f"the kernel's OOM killer struck in this cgroup {times} during this attempt{limit}: "
            "give the job more memory, or use less (smaller batches, fewer DataLoader workers)"
        )
    elif number == signal.SIGKILL and not root.end.signalled:
        known = " and the cgroup's OOM counter did not rise" if about.oom_kills == 0 else ""
        found.append(f"this launcher sent no SIGKILL{known}: look for a person, a scheduler, or the kernel's log (dmesg)")
    elif about.oom_kills:
        found.append("the kernel's OOM killer struck in this cgroup during this attempt: maybe a child process of this rank")
    if number == signal.SIGTERM and not root.end.signalled:
        found.append("this launcher sent no SIGTERM: the program itself, a person or a scheduler did")
    if shm := _shm_hint(root, number, about.shm):
        found.append(shm)
    if number in (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE) and not _faulted(root):
        found.append("a crash in native code: set PYTHONFAULTHANDLER=1 to see the Python line on which it happens")
    if number == signal.SIGILL:
        found.append("an instruction this CPU does not have: a library built for another CPU model")
    if number == signal.SIGABRT and not exception_line(root):
        found.append("abort(): a failed check in native code (its message is in the output), or a watchdog that gave up waiting")
    program = f" (the program is {about.program})" if about.program else ""
    if code == 127:
        found.append(f"by code 127 shells report that a command was not found{program}")
    if code == 126:
        found.append(f"by code 126 shells report that a command was found but cannot be executed{program}")
    if code is not None and 128 < code <= 128 + 31:
        found.append(f"by this code shells and some wrappers report that a child was killed by {signal_name(code - 128)}")
    if root.evidence.victim:
        found.append(
            "its words say that a peer was lost, but no other rank here has failed: one may have ended with code 0 while others still "
            "communicated; with several nodes, look at the other nodes' reports"
        )
    return found


def _shm_hint(root: FailedRank, number: int | None, shm: ShmFigures | None) -> str:
    if shm is None or not (number == signal.SIGBUS or any("bus error" in line.lower() for line in root.tail.stderr)):
        return ""
    figures = f"/dev/shm holds {_size(shm.used_bytes)} of {_size(shm.size_bytes)}"
    return (
        f"a bus error mostly means that shared memory ran out (now {figures}): "
        "give the container more (docker --shm-size, a memory-backed volume at /dev/shm) or use fewer DataLoader workers"
    )


def _others(root: FailedRank, others: Sequence[FailedRank]) -> list[str]:
    failed = sorted((other for other in others if other.end.failed), key=lambda other: (other.end.at_s, other.end.rank))
    lines = [_other(root, other) for other in failed[:OTHERS_SHOWN]]
    if len(failed) > OTHERS_SHOWN:
        lines.append(f"and {len(failed) - OTHERS_SHOWN} more ranks ended after it")
    return lines


def render_short(root: FailedRank, victims: int, about: Circumstances) -> str:
    """A fault that is healed in place, in a few lines: the head line, the end of the traceback, what follows. `victims`: so many
    other ranks failed because of it.
    """
    lines = [headline(root, about)]
    traceback = _traceback(root)
    if traceback:
        lines += _indent(_lines(traceback, TRACEBACK_LINES)[-SHORT_LINES:])
    elif not root.end.left and not root.end.hung and any(line.strip() for line in root.tail.stderr):
        lines += _last_output(root, beside_traceback=False)[-SHORT_LINES:]
    if victims:
        lines.append(f"{victims} other ranks failed with it" if victims > 1 else "another rank failed with it")
    lines.append(about.next_step)
    return "\n".join(lines)


def _other(root: FailedRank, other: FailedRank) -> str:
    delay_s = other.end.at_s - root.end.at_s
    if abs(delay_s) < 0.05:
        when = "at the same time"
    else:
        when = f"{_seconds(delay_s)} later" if delay_s > 0 else f"seen {_seconds(-delay_s)} earlier"
    if other.end.unkillable:
        return f"rank {other.end.rank} could not be killed: the kernel holds it"
    line = f"rank {other.end.rank} {'failed' if other.end.left else ending(other.end.status)}, {when}"
    if other.end.hung:
        return f"{line}: it was hung"
    if other.evidence.victim:
        return f"{line}: a consequence, it lost its peer"
    if other.end.signalled:
        return f"{line}: a consequence, it was being stopped"
    cause = exception_line(other)
    return f"{line}: {cause}" if cause else line


def _ended_by_exception(failed: FailedRank) -> bool:
    raised = failed.evidence.raised
    if raised is None:
        return False
    number = signal_of_wait_status(failed.end.status)
    if number is None:
        return raised.final or from_wait_status(failed.end.status) == 1
    # Killed from outside, whatever stood last in its output did not end it.
    return raised.final and (number == signal.SIGABRT or _faulted(failed) or failed.end.signalled)


def _exception_is_certain(failed: FailedRank) -> bool:
    """Python leaves with 1 after an uncaught exception; other codes may follow one that was printed and handled."""
    code = failed.end.status >> 8
    return failed.evidence.recorded is not None or code in (0, 1)


def _faulted(failed: FailedRank) -> bool:
    return failed.evidence.raised is not None and failed.evidence.raised.type == FATAL_PREFIX


def _traceback(failed: FailedRank) -> str:
    recorded = failed.evidence.recorded
    if recorded is not None:
        return recorded.traceback or recorded.text
    if failed.evidence.raised is not None and _ended_by_exception(failed):
        return failed.evidence.raised.traceback
    return ""


def _last_output(failed: FailedRank, *, beside_traceback: bool) -> list[str]:
    """The last lines of stderr (of stdout, where stderr is empty), without the traceback that stands above already."""
    wrote_stderr = any(line.strip() for line in failed.tail.stderr)
    name, tail = ("stderr", failed.tail.stderr) if wrote_stderr else ("stdout", failed.tail.stdout)
    lines = [plain(line) for line in tail]
    if beside_traceback and failed.evidence.raised is not None and _ended_by_exception(failed):
        lines = _without(lines, failed.evidence.raised.traceback.split("\n"))
    while lines and not lines[-1].strip():
        lines.pop()
    lines = [_cut(line, LINE_CHARS) for line in lines[-LAST_LINES:]]
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        return [] if beside_traceback else [f"rank {failed.end.rank} wrote nothing before it ended"]
    count = f"last {len(lines)} lines" if len(lines) > 1 else "last line"
    beside = ", beside the traceback" if beside_traceback and wrote_stderr else ""
    return [f"{count} of rank {failed.end.rank}'s {name}{beside}:", *_indent(lines)]


def _without(lines: list[str], shown: list[str]) -> list[str]:
    """Cut the last run of lines that equals `shown`; here each line may carry torch's prefix "[rank1]: "."""
    count = len(shown)
    for start in range(len(lines) - count, -1, -1):
        if all(line.rstrip().endswith(other.rstrip()) for line, other in zip(lines[start:], shown, strict=False)):
            return lines[:start] + lines[start + count :]
    return lines


def _lines(text: str, most: int) -> list[str]:
    lines = plain_text(text.strip("\n")).split("\n")
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]
    return [_cut(line, LINE_CHARS) for line in lines]


def _indent(lines: list[str]) -> list[str]:
    return [f"  | {line}" if line else "  |" for line in lines]


def _cut(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most} more characters)"


def _first_line(text: str) -> str:
    return plain(text.strip().partition("\n")[0])


def _seconds(duration_s: float) -> str:
    if duration_s < 9.95:
        return f"{max(duration_s, 0.0):.1f} s"
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _size(size_bytes: int) -> str:
    if size_bytes < 1024**2:
        return f"{size_bytes / 1024:.0f} KiB"
    if size_bytes < 1024**3:
        return f"{size_bytes / 1024**2:.0f} MiB"
    return f"{size_bytes / 1024**3:.1f} GiB"
