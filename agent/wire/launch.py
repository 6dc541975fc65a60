"""What the agent and a node's forkserver say to each other.

One SOCK_SEQPACKET socket pair, one MessagePack message a packet, agent -> forkserver `Fork`, back `Ready`, `Unfit`, `Forked`.
Bytes are used for arguments and variables because Unix does not promise UTF-8.

    agent                         forkserver
      |  <---------- Ready | Unfit    after the preloads
      |  Fork (+ the ranks' pipes as ancillary data) ---------->
      |  <---------- Forked           pids; the workers are by now the agent's own children
"""

from typing import Literal

import msgspec

RunAs = Literal["script", "module", "run-path", "program"]


class Program(msgspec.Struct, frozen=True):
    """What each worker runs.

    `run_as`: "script" (`python target args`), "module" (`python -m target args`), "run-path" (`runpy.run_path(target)`) or
    "program" (execute `target` itself: --no-python).
    """

    run_as: RunAs
    target: str
    args: tuple[str, ...]


class Worker(msgspec.Struct, frozen=True):
    """One worker to start. `env` is its whole environment; `cpus` its CPU affinity (None: as the agent's)."""

    local_rank: int
    argv: list[bytes]
    env: list[tuple[bytes, bytes]]
    cpus: list[int] | None = None


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start these workers. The packet carries 2 file descriptors a worker, in order: its stdout, its stderr."""

    workers: list[Worker]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The preloads are done. `preloaded` names the modules, `took_s` the seconds."""

    preloaded: list[str]
    took_s: float


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """Forking from this process would not be safe or not be right; `reason` is a sentence for the user."""

    reason: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """(local rank, pid) of each worker."""

    pids: list[tuple[int, int]]


ToForkserver = Fork
FromForkserver = Ready | Unfit | Forked
