"""`--start-method spawn`: a fresh process for each worker, through the prelude (hyperpodrun/worker/prelude.py).

All processes are made first and wait at the gate, one pipe; then the agent is told their pids, then the gate opens. So a start
that fails or is called off half-way has run nothing of the user's, and no worker can end before the agent knows it.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

from hyperpodrun.agent import open_files
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.launch import Worker
from hyperpodrun.agent.workers.command import NotExecutable

GATE_FD = 3
HINTS = {
    errno.EAGAIN: "look at `ulimit -u` and the cgroup's pids.max",
    errno.ENOMEM: "the machine or the cgroup is out of memory",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open",
    errno.ETOOMANYREFS: "raise `ulimit -n`",
    errno.EFBIG: "raise `ulimit -f`",
    errno.E2BIG: "arguments and environment together are too long",
}
Command = tuple[bytes, list[bytes]]
"""(file to execute, argv)."""


class Gate:
    """Where new workers wait: `go` lets them run, `close` sends them home. `read_fd` is theirs."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def handed_over(self) -> None:
        """The workers hold the read end by now: drop ours."""
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def go(self, count: int) -> None:
        """Let `count` workers run."""
        try:
            os.write(self._write_fd, b"g" * count)
        except BrokenPipeError:
            pass  # all of them were killed: their exits tell
        self.close()

    def close(self) -> None:
        """Whoever still waits ends without having run anything."""
        self.handed_over()
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1


def raised(fd: int) -> int:
    """`fd` as a new close-on-exec descriptor above those that a child's 0 to 3 will overwrite."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def spawn_worker(
    python: str, prelude: str, worker: Worker, program: bytes, argv: Sequence[bytes], streams: tuple[int, int], gate: Gate
) -> int:
    """Make the process of one worker, which will execute `program` as `argv`; its pid. Raises OSError."""
    cpus = ",".join(map(str, worker.cpus or ()))
    gate_fd = raised(gate.read_fd)
    try:
        pid = os.posix_spawn(
            python,
            [os.fsencode(word) for word in (python, "-I", "-S", prelude, str(os.getpid()), cpus)] + [program, *argv],
            dict(worker.env),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, streams[0], 1),
                (os.POSIX_SPAWN_DUP2, streams[1], 2),
                (os.POSIX_SPAWN_DUP2, gate_fd, GATE_FD),
            ],
            setsigmask=[],
        )
    finally:
        os.close(gate_fd)
    open_files.give_back(pid)
    return pid


class Spawner:
    """Starts one attempt's workers at a time."""

    def __init__(
        self,
        reactor: Reactor,
        watch_child: Callable[[int, Callable[[int], None]], None],
        prelude: str,
        programs: Callable[[Worker], Command],
    ) -> None:
        self._reactor = reactor
        self._watch_child = watch_child
        self._prelude = prelude
        self._command = programs
        self._gate: Gate | None = None
        self._timer: Timer | None = None

    def start(
        self,
        workers: Sequence[Worker],
        streams: Sequence[tuple[int, int]],
        on_started: Callable[[list[tuple[int, int]]], None],
        on_failed: Callable[[str, int], None],
    ) -> None:
        """See WorkerStarter.start; both callbacks come from the loop, never from within this call."""
        gate: Gate | None = None
        pids: list[tuple[int, int]] = []
        try:
            gate = Gate()
            for worker, pair in zip(workers, streams, strict=True):
                program, argv = self._command(worker)
                pids.append((worker.local_rank, spawn_worker(sys.executable, self._prelude, worker, program, argv, pair, gate)))
        except (OSError, NotExecutable) as error:
            if gate is not None:
                gate.close()
            self._fail([pid for _, pid in pids], error, on_failed)
            return
        gate.handed_over()
        self._gate = gate
        self._timer = self._reactor.call_later(0, lambda: self._started(pids, on_started))

    def cancel(self) -> None:
        """Give up a start that is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def _started(self, pids: list[tuple[int, int]], on_started: Callable[[list[tuple[int, int]]], None]) -> None:
        gate, self._gate, self._timer = self._gate, None, None
        assert gate is not None
        on_started(pids)
        gate.go(len(pids))

    def _fail(self, pids: list[int], error: OSError | NotExecutable, on_failed: Callable[[str, int], None]) -> None:
        """Report once all processes of this attempt have ended."""
        if isinstance(error, NotExecutable):
            sentence, code = str(error), error.code
        else:
            sentence, code = (
                f"the workers cannot be started: {error.strerror}; {HINTS.get(error.errno or 0, 'see execve(2)')}",
                exit_codes.CONFIG,
            )
        left = set(pids)

        def gone(pid: int) -> None:
            left.discard(pid)
            if not left:
                on_failed(sentence, code)

        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            self._watch_child(pid, lambda _, pid=pid: gone(pid))  # type: ignore[misc]
        if not pids:
            self._reactor.call_later(0, lambda: on_failed(sentence, code))
