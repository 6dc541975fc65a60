"""The agent's half of the forkserver: one child process and the line to it.

States
    loading   the process imports; nothing can be forked yet
    ready     waiting for `fork`
    forking   a `Fork` was sent, its answer is out
    gone      the process has ended, or was told to (then its death is no news)

Invariants: at most one `Fork` is out; after `discard` its workers find their gate closed, whatever the answer. Everything the
process has sent is handled before its death is. The messages are those of wire/launch.py, the other half is
hyperpodrun/worker/forkserver.py.
"""

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from hyperpodrun.agent import open_files
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import exit_codes, launch
from hyperpodrun.agent.workers.spawn import Gate, raised

LINE_FD = 3
State = Literal["loading", "ready", "forking", "gone"]
_PACKET_BYTES = 1 << 18


class Forkserver:
    """`on_message` gets Ready, Unfit, Forked and Failed; `on_death` how the process ended unexpectedly, and in which state."""

    def __init__(
        self, reactor: Reactor, on_message: Callable[[launch.FromForkserver], None], on_death: Callable[[str, State], None]
    ) -> None:
        self._reactor = reactor
        self._on_message = on_message
        self._on_death = on_death
        self._line: socket.socket | None = None
        self._gate: Gate | None = None
        self.pid: int | None = None
        self.state: State = "gone"

    def begin(
        self,
        argv: Sequence[str | bytes],
        env: Mapping[bytes, bytes],
        streams: tuple[int, int],
        watch_child: Callable[[int, Callable[[int], None]], None],
    ) -> None:
        """Start the process in the background; `streams` stay the caller's. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line_fd = -1
        try:
            line_fd = raised(theirs.fileno())
            pid = os.posix_spawn(
                os.fsdecode(argv[0]),
                list(argv),
                dict(env),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, streams[0], 1),
                    (os.POSIX_SPAWN_DUP2, streams[1], 2),
                    (os.POSIX_SPAWN_DUP2, line_fd, LINE_FD),
                ],
                setsigmask=[],
            )
        except OSError:
            ours.close()
            raise
        finally:
            if line_fd >= 0:
                os.close(line_fd)
            theirs.close()
        open_files.give_back(pid)  # and so to all that is forked from it
        ours.setblocking(False)
        self.pid, self._line, self.state = pid, ours, "loading"
        self._reactor.on_readable(ours.fileno(), self._read)
        watch_child(pid, lambda status: self._died(pid, status))

    def fork(self, workers: list[launch.Worker], streams: Sequence[tuple[int, int]]) -> None:
        """Ask for these workers (state: ready). They wait at a gate until `let_go`. Raises OSError, having asked nothing."""
        assert self._line is not None and self.state == "ready"
        gate = Gate()
        try:
            launch.send_fork(self._line, launch.Fork(workers), [*(fd for pair in streams for fd in pair), gate.read_fd])
        except OSError:
            gate.close()
            raise
        gate.handed_over()
        self._gate = gate
        self.state = "forking"

    def let_go(self, count: int) -> None:
        """The forked workers may run."""
        if self._gate is not None:
            self._gate.go(count)
            self._gate = None

    def discard(self) -> None:
        """The workers that are being forked are not wanted any more: they will end without having run anything."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def kill(self) -> None:
        """End the process now; its death is no news."""
        self.discard()
        self.state = "gone"
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._reactor.forget(self._line.fileno())
            self._line.close()
            self._line = None

    def _read(self) -> None:
        while self._line is not None:
            try:
                packet = self._line.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._hang_up()  # its death will be told by the kernel
                return
            self._take(msgspec.msgpack.decode(packet, type=launch.FromForkserver))

    def _take(self, message: launch.FromForkserver) -> None:
        self.state = "gone" if isinstance(message, launch.Unfit) else "ready"
        if isinstance(message, launch.Failed):
            self.discard()
        self._on_message(message)

    def _died(self, pid: int, status: int) -> None:
        if pid != self.pid:
            return
        self._read()
        self._hang_up()
        self.pid = None
        state, self.state = self.state, "gone"
        self.discard()
        if state != "gone":
            number = exit_codes.signal_of_wait_status(status)
            how = (
                f"was ended by {exit_codes.signal_name(number)}"
                if number
                else f"exited with code {exit_codes.from_wait_status(status)}"
            )
            self._on_death(how, state)
