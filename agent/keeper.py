"""The keeper: the process the user started. It starts the agent, forwards signals, reaps, and clears up after a dead agent.

It does so little that there is little to fail: standard library only, one thread, no state but the agent's pid. As PID 1 of a
container it does that process's duties: signals are blocked and taken with sigwait, so they count although PID 1 has no default
actions (signal(7)), and every orphan is reaped.

States: *watching* (the agent lives), *clearing* (the agent died: its workers' processes are ended), *pausing* (before the next
agent), *leaving*.

Invariants
- The agent ended on purpose exactly if it wrote an exit code into the memo; anything else is a death and starts a new agent,
  at least 1 s after the last start, at most 5 deaths in 60 s. One that failed by itself before it began is not started again, nor
  one that had only to take its leave.
- A stop signal is never lost: one that comes while no agent lives ends the job with 128 + its number.
- When the keeper leaves, no process of the job is left and the run folder is gone.
- In a job of several nodes workers never outlive their lease (MESH A9), also when the agent stands still: the keeper holds the
  watch and ends them.

The agent has a session of its own: a terminal's Ctrl-C comes to the keeper alone and is forwarded once.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from hyperpodrun.agent import family, run_dir
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.workers.cgroup import WorkerCgroup

MIN_START_INTERVAL_S = 1.0
MAX_DEATHS = 5
DEATHS_WINDOW_S = 60.0
CLEAR_LIMIT_S = 10.0
LONGEST_AWAY_S = 1.8
"""An agent that was away for longer must not vote as the one before it: MESH's `absent_ns` is 2 s."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU, signal.SIGPWR)
_MEMO_BYTES = 4096
_REFUSALS = {
    errno.EAGAIN: "look at `ulimit -u` and the cgroup's pids.max",
    errno.ENOMEM: "the machine or the cgroup is out of memory",
    errno.EFBIG: "raise `ulimit -f`",
}
_LEASE_BYTES = 8
_LEAST_FILES = 16
_LEAST_FILE_BYTES = 64 * 1024
LEASE_SLACK_S = 0.5
"""An agent that runs ends its workers itself when the lease is over; the keeper comes after it, before the fence is (1 s)."""


class KeeperLink:
    """The agent's side of its keeper: what outlives an agent.

    `memo` holds what the previous agent remembered (empty for the first one); `deaths_s` are the monotonic times at which agents
    died before this one, `deaths` is their number.
    `signal_mask` is the mask to restore once the agent can take signals: until then they wait, so none is lost and none kills it.
    """

    def __init__(
        self,
        folder: run_dir.RunDir,
        family_mark: str,
        memo_fd: int,
        memo: dict[str, str],
        deaths_s: Sequence[float],
        signal_mask: Collection[int | signal.Signals],
    ) -> None:
        self.run_dir = folder
        self.signal_mask = signal_mask
        self.family = family_mark
        self.pid = os.getppid()
        self.memo = memo
        self.deaths_s = tuple(deaths_s)
        self._memo_fd = memo_fd
        self._leased = False

    @property
    def deaths(self) -> int:
        """Agents that died before this one."""
        return len(self.deaths_s)

    def remember(self, **facts: object) -> None:
        """Keep these facts for the next agent, should this one die. Values are single lines."""
        self.memo.update({key: str(value) for key, value in facts.items()})
        _write_memo(self._memo_fd, self.memo)

    def lease(self, until_ns: int) -> None:
        """Workers may run until this time of CLOCK_BOOTTIME; 0: without an end. The keeper ends them if nobody renews it."""
        os.pwrite(self._memo_fd, until_ns.to_bytes(_LEASE_BYTES), _MEMO_BYTES)
        if until_ns and not self._leased and self.alive():
            os.kill(self.pid, signal.SIGCHLD)  # look at it: without a lease the keeper waits for signals alone
        self._leased = bool(until_ns)

    def alive(self) -> bool:
        """Is the keeper still our parent?"""
        return os.getppid() == self.pid

    def leave(self, code: int) -> NoReturn:
        """End the agent process on purpose with this exit code."""
        self.remember(exit=code)
        if not self.alive():
            self.run_dir.remove()  # nobody else is left to do it
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:
                pass  # nobody reads it any more; the exit code still tells
        os._exit(code)  # the keeper's own clean-up handlers, copied by fork, must not run here


def main(run_agent: Callable[[KeeperLink], int]) -> NoReturn:
    """Run `run_agent` in a child process until it ends on purpose; leave with its exit code."""
    _open_standard_streams()
    if trouble := _too_tight() or _blind():
        _say(trouble)
        sys.exit(exit_codes.CONFIG)
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup(1): stays so, here and in workers
    forwarded = {number for number in FORWARDED if not (number == signal.SIGHUP and ignored)}
    # Whoever started us may have ignored or blocked these, which exec hands on: without SIGCHLD no end would ever be seen.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = forwarded | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited) - awaited
    family.become_subreaper()
    try:
        folder = run_dir.create()
    except OSError as error:
        _say(str(error))
        sys.exit(exit_codes.CONFIG)
    mark = os.urandom(8).hex()
    memo_fd = os.memfd_create("hyperpodrun-memo", os.MFD_CLOEXEC)
    code = exit_codes.INTERNAL
    try:
        code = _Keeper(run_agent, folder, mark, memo_fd, forwarded, mask).keep()
    finally:
        folder.remove()
        WorkerCgroup(mark).remove()
        _remove_vote(_read_memo(memo_fd).get("vote", ""))
    sys.exit(code)


class _Keeper:
    def __init__(
        self,
        run_agent: Callable[[KeeperLink], int],
        folder: run_dir.RunDir,
        mark: str,
        memo_fd: int,
        forwarded: set[signal.Signals],
        mask: set[int | signal.Signals],
    ) -> None:
        self.run_agent = run_agent
        self.folder = folder
        self.mark = mark
        self.memo_fd = memo_fd
        self.forwarded = forwarded
        self.mask = mask
        self.agent = 0
        self.agent_status: int | None = None
        self.stopped_by: int | None = None
        self.deaths_s: list[float] = []

    def keep(self) -> int:
        """The exit code of the job."""
        while True:
            started_s = time.monotonic()
            try:
                self.start_agent()
            except OSError as error:
                _say(f"the agent cannot be started: {error.strerror}; {_REFUSALS.get(error.errno or 0, 'see fork(2)')}")
                return exit_codes.CONFIG
            if not self.deaths_s:
                run_dir.remove_dead()  # the agent is busy starting and we have nothing to do
            status = self.watch()
            memo = _read_memo(self.memo_fd)
            died_s = time.monotonic()
            left = family.kill_all(self.mark, CLEAR_LIMIT_S, self.reap)
            for process in left:
                _say(
                    f"process {process.pid} ({process.name}, state {process.state}) cannot be killed and stays: the kernel holds it"
                )
            if "exit" in memo:
                return int(memo["exit"])
            if "ended" in memo:  # it was killed while it took leave: of the job nothing was left to do
                return int(memo["ended"])
            if self.stopped_by is not None:
                return exit_codes.for_signal(self.stopped_by)
            self.deaths_s.append(time.monotonic())
            cleared_s = self.deaths_s[-1] - died_s
            recent = [when_s for when_s in self.deaths_s if when_s > time.monotonic() - DEATHS_WINDOW_S]
            number = exit_codes.signal_of_wait_status(status)
            how = (
                f"was killed by {exit_codes.signal_name(number)}"
                if number
                else f"ended with code {exit_codes.from_wait_status(status)}"
            )
            if not memo and number is None:
                _say(
                    f"the agent (pid {self.agent}) {how} before it began, for the reason above; another one would do the same. "
                    "Look for a limit (`ulimit -a`) and for files in PYTHONPATH that hide a module; else it is a bug of hyperpodrun."
                )
                return exit_codes.INTERNAL
            if len(recent) >= MAX_DEATHS:
                _say(
                    f"the agent (pid {self.agent}) {how}: {len(recent)} deaths in {DEATHS_WINDOW_S:.0f} s, the job ends. "
                    "If nobody killed it, this is a bug of hyperpodrun or the machine is out of memory (see dmesg)."
                )
                return exit_codes.INTERNAL
            _say(
                f"the agent (pid {self.agent}) {how}; all its workers were ended, it starts again "
                f"(death {len(recent)} of {MAX_DEATHS} allowed in {DEATHS_WINDOW_S:.0f} s)"
            )
            if not self.pause(started_s + MIN_START_INTERVAL_S):
                assert self.stopped_by is not None
                return exit_codes.for_signal(self.stopped_by)
            if time.monotonic() - self.deaths_s[-1] + cleared_s > LONGEST_AWAY_S:
                # The others may have counted on its silence: it comes back as another incarnation (PROTOCOL section 2).
                _remove_vote(memo.get("vote", ""))

    def start_agent(self) -> None:
        """Fork the agent: it needs no second start of the interpreter."""
        keeper = os.getpid()
        self.agent_status = None
        memo = _read_memo(self.memo_fd)
        os.pwrite(self.memo_fd, bytes(_LEASE_BYTES), _MEMO_BYTES)
        self.agent = os.fork()
        if self.agent:
            return
        try:
            os.setsid()
            if not family.die_with_parent(signal.SIGTERM, keeper):
                os._exit(exit_codes.INTERNAL)
            link = KeeperLink(self.folder, self.mark, self.memo_fd, memo, self.deaths_s, self.mask)
            link.leave(self.run_agent(link))
        except BaseException:  # noqa: BLE001 - whatever it is, it must not unwind into the keeper's own code
            # A bug of ours: show it whole; the missing exit note makes the keeper start another agent.
            import traceback

            traceback.print_exc()
            os._exit(exit_codes.INTERNAL)

    def watch(self) -> int:
        """Forward signals until the agent is gone; its wait status."""
        awaited = self.forwarded | {signal.SIGCHLD}
        while self.agent_status is None:
            until_ns = _read_lease(self.memo_fd)
            left_s = (until_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9 + LEASE_SLACK_S
            number = _next_signal(awaited, left_s if until_ns else None)
            if number:
                self.take(number)
            elif until_ns and left_s <= 0 and until_ns == _read_lease(self.memo_fd):
                self.fence()
        return self.agent_status

    def fence(self) -> None:
        """The lease ran out and the agent did nothing about it: it stands still."""
        for process in family.members(os.getpid(), self.mark, spare=[self.agent]):
            family.send(process, signal.SIGKILL)
        os.pwrite(self.memo_fd, bytes(_LEASE_BYTES), _MEMO_BYTES)
        _say(
            f"the agent (pid {self.agent}) stands still and its lease is over: the other nodes may go on without this one, "
            "so its workers were ended. It joins again once it runs"
        )

    def pause(self, until_s: float) -> bool:
        """Wait before the next agent; False when a stop signal came."""
        while self.stopped_by is None and (left_s := until_s - time.monotonic()) > 0:
            if number := _next_signal(self.forwarded | {signal.SIGCHLD}, left_s):
                self.take(number)
        return self.stopped_by is None

    def take(self, number: int) -> None:
        """One signal of ours."""
        if number == signal.SIGCHLD:
            self.reap()
            return
        if number in STOP_SIGNALS and self.stopped_by is None:
            self.stopped_by = number
        if self.agent_status is None:
            os.kill(self.agent, number)

    def reap(self) -> None:
        """Take leave of every dead child, the agent and adopted orphans alike."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.agent:
                self.agent_status = status


def _next_signal(awaited: Collection[signal.Signals], left_s: float | None) -> int:
    """The next of these (blocked) signals; 0 when none came for so long, or a moment earlier: look at the clock and call again.

    Not sigtimedwait: Python 3.11's gives a signal number that was never set when its time ran out while this process was stopped.
    The timer's own SIGALRM is known by its code: the kernel sent it. One that comes late counts for nothing.
    """
    info: signal.struct_siginfo | None
    if left_s is None:
        info = signal.sigwaitinfo(awaited)
    elif left_s <= 0:
        info = signal.sigtimedwait(awaited, 0)  # it does not wait, so nothing can interrupt it
    else:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        info = signal.sigwaitinfo({*awaited, signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0 if info is None or (info.si_signo == signal.SIGALRM and info.si_code > 0) else info.si_signo


def _open_standard_streams() -> None:
    """A standard stream that was closed at the start becomes /dev/null: else the next file opened would get its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _too_tight() -> str:
    """A limit under which this program itself cannot work, as a sentence; "" when there is none."""
    import resource

    for what, unit, least, advice in (
        (resource.RLIMIT_NOFILE, "open files", _LEAST_FILES, "ulimit -n 1024"),
        (resource.RLIMIT_FSIZE, "bytes in a file", _LEAST_FILE_BYTES, "ulimit -f unlimited"),
    ):
        limit, _ = resource.getrlimit(what)
        if limit != resource.RLIM_INFINITY and limit < least:
            return f"the limit on {unit} is {limit} and the launcher alone needs {least}: raise it with {advice}"
    return ""


def _blind() -> str:
    """Why /proc cannot show this job's processes, as a sentence; "" when it can.

    Its numbers must be ours: in the /proc of another pid namespace they mean other processes, and we kill by them.
    """
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return ""
    except OSError:
        pass  # nothing is mounted there: the same sentence
    return (
        "/proc is not mounted or belongs to another pid namespace, so the job's processes cannot be found in it; "
        "mount it (mount -t proc proc /proc; unshare has --mount-proc)"
    )


def _say(text: str) -> None:
    try:
        os.write(2, f"hyperpodrun: {text}\n".encode(errors="replace"))
    except OSError:
        pass  # nobody is listening any more


def _write_memo(fd: int, memo: dict[str, str]) -> None:
    text = "".join(f"{key}={value}\n" for key, value in memo.items()).encode()
    if len(text) >= _MEMO_BYTES:
        raise ValueError(f"the memo holds {len(text)} bytes of {_MEMO_BYTES}")
    # One page in one call: a kill leaves the old text or the new one.
    os.pwrite(fd, text.ljust(_MEMO_BYTES, b"\0"), 0)


def _remove_vote(path: str) -> None:
    """The vote of an agent (MESH A2) that did not come to remove it itself: it must not speak in a later job of the same id."""
    try:
        if path:
            os.unlink(path)
    except OSError:
        pass  # the agent did


def _read_lease(fd: int) -> int:
    return int.from_bytes(os.pread(fd, _LEASE_BYTES, _MEMO_BYTES))


def _read_memo(fd: int) -> dict[str, str]:
    text = os.pread(fd, _MEMO_BYTES, 0).rstrip(b"\0").decode(errors="replace")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
