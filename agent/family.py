"""Finding and ending every process of a job, however deep and however re-parented.

Keeper and agent are child subreapers (prctl(2) PR_SET_CHILD_SUBREAPER): a process whose parent died becomes their child, so all of
a job's processes stay below them and the tree of parents finds them. Only when one of the two is killed can something slip out
of the tree; each process of a job therefore also carries the launcher's mark in its environment (`names.FAMILY`).

A pid can be used again at any moment, so nothing is signalled by number alone: a pidfd is opened first, the start time read
again behind it, and the signal goes through the pidfd (pidfd_open(2), pidfd_send_signal(2)).

Standard library only: the keeper uses it.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

from hyperpodrun.agent.wire import names

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Process:
    """One line of /proc/<pid>/stat: parent, state letter, session, start time in clock ticks since boot."""

    __slots__ = ("name", "parent", "pid", "session", "started_ticks", "state")

    def __init__(self, pid: int, text: bytes) -> None:
        # The name may hold blanks and parentheses; what follows the last one is numbers.
        head, _, tail = text.rpartition(b")")
        fields = tail.split()
        self.pid = pid
        self.name = head.partition(b"(")[2].decode(errors="replace")
        self.state = fields[0].decode()
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.started_ticks = int(fields[19])


def become_subreaper() -> None:
    """Adopt orphaned descendants from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> bool:
    """Ask the kernel to send us `signum` when our parent (its thread that forked us) ends; False when `parent` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def read_process(pid: int) -> Process | None:
    """What /proc says about this pid now; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return Process(pid, file.read())
    except (OSError, IndexError, ValueError):
        return None


def all_processes() -> dict[int, Process]:
    """Every process this one can see, by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read_process(int(entry))):
            found[process.pid] = process
    return found


def descendants(root: int, processes: dict[int, Process]) -> list[Process]:
    """All processes below `root`, parents before their children; zombies included."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), ())
        found += below
        queue += [process.pid for process in below]
    return found


def carries(pid: int, family: str) -> bool:
    """Was this process started with that launcher's mark?"""
    return started_with(pid, f"{names.FAMILY}={family}")


def started_with(pid: int, variable: str) -> bool:
    """Did this process's program find NAME=VALUE in its environment when it was executed?"""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return os.fsencode(variable) in file.read().split(b"\0")
    except OSError:
        return False  # gone, or another user's: then it is not ours


def remains(root: int, sessions: Collection[int], known: Mapping[int, int], variables: Collection[str]) -> list[Process]:
    """Live processes below `root` that some of its children, ended by now, left there, with all that is below them.

    They are told by their session (a worker begins one of its own), by having been seen below it (`known`: pid -> start time), and,
    where they are `root`'s own children now, by a variable that only they were given. A daemon with a session of its own that was
    forked and never executed anything is not told.
    """
    processes = all_processes()
    below = descendants(root, processes)
    found = {
        p.pid: p
        for p in below
        if p.session in sessions
        or known.get(p.pid) == p.started_ticks
        or (p.parent == root and any(started_with(p.pid, variable) for variable in variables))
    }
    for process in tuple(found.values()):
        found |= {p.pid: p for p in descendants(process.pid, processes)}
    return [p for p in found.values() if p.state not in "ZX" and p.pid != os.getpid()]


def members(root: int, family: str, spare: Collection[int] = (), marked: bool = False) -> list[Process]:
    """Live processes of the job below `root`, and with `marked` also those that only their mark gives away.

    `spare` names processes that are left alone together with nothing else: their children are still members.
    """
    processes = all_processes()
    found = {process.pid: process for process in descendants(root, processes)}
    if marked:
        for process in processes.values():
            if process.pid not in found and process.pid != root and carries(process.pid, family):
                found[process.pid] = process
    return [p for p in found.values() if p.state not in "ZX" and p.pid not in spare and p.pid != os.getpid()]


def send(process: Process, signum: int) -> bool:
    """Signal exactly this process, not one that got its number later. False when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.started_ticks != process.started_ticks:
            return False
        signal.pidfd_send_signal(fd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def kill_all(family: str, limit_s: float, reap: Callable[[], None]) -> list[Process]:
    """SIGKILL everything below this process, again and again until nothing is left or `limit_s` is over; gives what is left.

    `reap` is called between rounds so that dead children of this process leave the table. Blocks: for the keeper only.
    """
    root = os.getpid()
    if os.readlink("/proc/self") != str(root):
        raise RuntimeError(f"/proc is that of other processes: {os.readlink('/proc/self')} is not {root}; nothing is signalled")
    end_s = time.monotonic() + limit_s
    while True:
        left = members(root, family, marked=True)
        for process in left:
            send(process, signal.SIGKILL)
        reap()
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.005)
