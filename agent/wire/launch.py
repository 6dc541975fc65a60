"""What the agent and a node's forkserver say to each other.

One SOCK_SEQPACKET socket pair, one MessagePack message a packet, save `Fork`: it holds every rank's environment and may be
larger than a packet can be, so it travels in a memory file among the descriptors. Bytes are used for arguments and variables
because Unix does not promise UTF-8.

    agent                         forkserver
      |  <---------- Ready | Unfit    after the preloads
      |  Fork + descriptors ---------->
      |  <---------- Forked | Failed  after Forked every worker is the agent's own child and waits at the gate
      |  gate: one byte a worker ---->  (to the workers) run; closed without: end, having run nothing

Source: unix(7) SCM_RIGHTS (at most 253 descriptors a packet), memfd_create(2).
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import socket

RunAs = Literal["script", "module", "run-path", "program"]

STACK_DUMP_SIGNAL_OFFSET = 2
"""Forked workers print the stacks of all their threads to stderr at signal SIGRTMAX - 2 (`faulthandler`, no chaining).

Other workers have no such handler and would die of it: look at SigCgt in /proc/<pid>/status first.
"""


class Program(msgspec.Struct, frozen=True):
    """What each worker runs.

    `run_as`: "script" (`python target args`), "module" (`python -m target args`), "run-path" (`runpy.run_path(target)`) or
    "program" (execute `target` itself: --no-python).
    """

    run_as: RunAs
    target: str
    args: tuple[str, ...]


class Worker(msgspec.Struct, frozen=True):
    """One worker to start.

    `argv`: the arguments behind the program's name (sys.argv[1:]); `env`: its whole environment; `cpus`: its CPU affinity
    (None: as the agent's).
    """

    local_rank: int
    argv: list[bytes]
    env: list[tuple[bytes, bytes]]
    cpus: list[int] | None = None


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start these workers. Descriptors, in order: stdout and stderr of each worker, then the gate's read end."""

    workers: list[Worker]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The preloads are done; `skipped` says why some modules were left to the workers, or is ""."""

    skipped: str = ""


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """Forking from this process would not be safe or not be right; `reason` is a sentence for the user."""

    reason: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """(local rank, pid) of each worker."""

    pids: list[tuple[int, int]]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The workers could not be forked and none of them is left; `reason` is a sentence for the user."""

    reason: str


FromForkserver = Ready | Unfit | Forked | Failed

_FDS_IN_A_PACKET = 250
_MORE, _LAST = b"+", b"!"


def send_fork(channel: "socket.socket", fork: Fork, descriptors: Sequence[int]) -> None:
    """Send one `Fork`; the descriptors stay the caller's. Raises OSError."""
    import socket

    sheet = os.memfd_create("hyperpodrun-fork")
    try:
        with open(sheet, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(fork))
        os.lseek(sheet, 0, os.SEEK_SET)
        left = [sheet, *descriptors]
        while left:
            some, left = left[:_FDS_IN_A_PACKET], left[_FDS_IN_A_PACKET:]
            socket.send_fds(channel, [_MORE if left else _LAST], some)
    finally:
        os.close(sheet)


def receive_fork(channel: "socket.socket") -> tuple[Fork, list[int]] | None:
    """Wait for the next `Fork` and its descriptors, the caller's from now on; None when the agent has closed its end."""
    import socket

    fds: list[int] = []
    while True:
        text, some, _, _ = socket.recv_fds(channel, 1, _FDS_IN_A_PACKET)
        if not text:
            return None
        for fd in some:
            os.set_inheritable(fd, False)
        fds += some
        if text == _LAST:
            break
    with open(fds.pop(0), "rb") as sheet:
        return msgspec.msgpack.decode(sheet.read(), type=Fork), fds
