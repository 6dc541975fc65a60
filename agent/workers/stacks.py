"""How to see where a hung rank stands before it is killed: a plan for the agent, which alone sends signals and starts helpers.

1. The worker's link, where there is one: its thread prints all stacks while it holds the interpreter's lock (`link.Dump`).

Ranks that are ended anyway are looked at from outside as well, which a process may die of:

2. `py-spy dump --native`, where it is installed and may look at the process (the same user, or the tracing capability): with the
   frames of C code, which is where a rank is that neither a raise nor an abort has freed. It stops the process for 0.1 to 0.3 s; what
   it has not printed when the ladder steps on (`ladder.DUMP_S`) may be lost.
3. Where the link has not answered within ANSWER_S, or there is none, the worker's own faulthandler: forked workers print all stacks to
   their stderr at one real-time signal. It reads other threads' frames without the lock: where threads begin or end meanwhile, the
   process dies of it (60 of 1,349 dumps in a trial). In other processes the signal itself would kill, so SigCgt in
   /proc/<pid>/status is read before it is ever sent.

And always, since a thread in state D answers none of them:

4. What the kernel says of each thread: state, where it waits, its system call.

Pure but for reading /proc, whose root is given in tests. Sources: proc(5), signal(7), faulthandler, ptrace(2), Yama's LSM docs.
"""

import os
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from hyperpodrun.agent.wire import launch

DUMP_SIGNAL = signal.SIGRTMAX - launch.STACK_DUMP_SIGNAL_OFFSET
ANSWER_S = 0.4
"""Less than `ladder.DUMP_S` by what a dump takes."""
THREAD_LINES = 24
# faulthandler.c, which lists the main thread last: dump_traceback, _Py_DumpTracebackThreads
_THREAD_HEAD = re.compile(r"(?:Thread|Current thread) 0x[0-9a-f]+.* \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line \d+ in (\S+)')
_WAITS = "/torch/distributed/"

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (a driver or a file system does not answer)",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "a zombie",
    "X": "dead",
    "I": "idle",
}

# The system calls in which threads of training jobs are found waiting; others keep their number. From the kernel's tables.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 23: "select", 34: "pause", 35: "nanosleep",
        42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 74: "fsync",
        128: "rt_sigtimedwait", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6",
        271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 29: "ioctl", 63: "read", 64: "write", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll",
        82: "fsync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 137: "rt_sigtimedwait", 202: "accept",
        203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}  # fmt: skip


class DumpPlan(msgspec.Struct, frozen=True):
    """How to look at one rank from outside. `signal`: it prints its stacks to its stderr at this one. `command`: prints them, with the
    frames of C code, to its stdout.
    """

    pid: int
    signal: int | None = None
    command: tuple[str, ...] = ()


def plan(pid: int, env: Mapping[str, str], proc: str = "/proc") -> DumpPlan:
    """For one process. `env` is the agent's environment (PATH)."""
    if not kernel_facts(pid, proc):
        return DumpPlan(pid)  # it is gone
    number = DUMP_SIGNAL if catches(pid, DUMP_SIGNAL, proc) else None
    py_spy = _on_path("py-spy", env)
    command = (py_spy, "dump", "--native", "--pid", str(pid)) if py_spy and _may_trace(proc) else ()
    return DumpPlan(pid, number, command)


def waits_in(lines: Sequence[str]) -> str | None:
    """The call of torch.distributed in which the last stack dump in a rank's stderr shows its main thread; "" for none, None where
    there is no dump.
    """
    heads = [at for at, line in enumerate(lines) if _THREAD_HEAD.search(line)]
    if not heads:
        return None
    for line in lines[heads[-1] + 1 :]:
        if (frame := _FRAME.search(line)) and _WAITS in frame.group(1):
            return frame.group(2)
    return ""


def out_of_step(waits: Mapping[int, str | None]) -> frozenset[int]:
    """Of ranks that all are still, those that the others wait for, as far as `waits_in` tells: who waits in no call of
    torch.distributed, else who waits in another one than most. Empty: it does not tell.
    """
    told = {rank: call for rank, call in waits.items() if call is not None}
    calls = Counter(told.values())
    if len(calls) < 2:
        return frozenset()
    most, count = calls.most_common(1)[0]
    if "" in calls:
        return frozenset(rank for rank, call in told.items() if not call)
    return frozenset(rank for rank, call in told.items() if call != most) if 2 * count > len(told) else frozenset()


def catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """Does the process have a handler for this signal? False when it is gone, or a zombie."""
    for line in _text(f"{proc}/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            try:
                return bool(int(line[7:], 16) >> (number - 1) & 1)
            except ValueError:
                return False
    return False


def kernel_facts(pid: int, proc: str = "/proc") -> str:
    """One line for each thread, the main thread first, equal ones counted together; "" when the process is gone."""
    try:
        threads = sorted((int(name) for name in os.listdir(f"{proc}/{pid}/task")), key=lambda tid: (tid != pid, tid))
    except (OSError, ValueError):
        return ""
    seen: dict[str, list[int]] = {}
    for tid in threads:
        if described := _thread(f"{proc}/{pid}/task/{tid}"):
            seen.setdefault(described, []).append(tid)
    lines = []
    for described, tids in seen.items():
        who = "main thread" if pid in tids else f"thread {tids[0]}"
        more = f" and {len(tids) - 1} more" if len(tids) > 1 else ""
        lines.append(f"{who}{more}: {described}")
    if len(lines) > THREAD_LINES:
        lines[THREAD_LINES:] = [f"... {len(lines) - THREAD_LINES} other kinds of threads"]
    return "\n".join(lines)


def _thread(folder: str) -> str:
    status = _text(f"{folder}/stat")
    name, closed, rest = status.partition("(")[2].rpartition(")")
    if not closed or not rest.split():
        return ""
    state = rest.split()[0]
    parts = [f"{name}, {_STATES.get(state, state)}"]
    wchan = _text(f"{folder}/wchan").strip()
    if wchan not in ("", "0"):
        parts.append(f"kernel function {wchan}")
    call = _text(f"{folder}/syscall").split()
    if call and call[0].isdecimal():
        parts.append(f"system call {_call_name(int(call[0]))}")
    return ", ".join(parts)


def _call_name(number: int) -> str:
    return _CALLS.get(os.uname().machine, {}).get(number, str(number))


def _on_path(name: str, env: Mapping[str, str]) -> str | None:
    for folder in env.get("PATH", os.defpath).split(":"):
        path = f"{folder or '.'}/{name}"
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def _may_trace(proc: str) -> bool:
    """Yama's scope 1 and higher keep a process from looking into its siblings, unless it has CAP_SYS_PTRACE."""
    scope = _text(f"{proc}/sys/kernel/yama/ptrace_scope").strip()
    if scope in ("", "0"):
        return True
    capable = next((line[7:] for line in _text(f"{proc}/self/status").splitlines() if line.startswith("CapEff:")), "0")
    return scope in ("1", "2") and bool(int(capable, 16) >> 19 & 1)


def _text(path: str) -> str:
    """A small kernel file; "" when it is missing or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
