"""What a worker and its node's agent say to each other while the worker runs.

One SOCK_SEQPACKET Unix socket a process, one MessagePack message a packet. The agent listens in its private folder
(`names.LINK` holds "unix:PATH"); who connects is known by SO_PEERCRED, not by what it says. The kernel tells each side when the
other has ended, so nothing is waited for without end.

    worker                                 agent
      |  Hello ----------------------------> |
      |  <-------------------------- Welcome |
      |  AtBarrier ------------------------> |   ready to run the function, nothing of an earlier generation left here
      |  <---------------------------- Enter |   run it as this rank, in this generation
      |  Beat ... -------------------------> |   once a second: alive, and how far
      |  Fault (its own) ------------------> |
      |  <------------------------ Interrupt |   leave the function: abort, finalize, health check ...
      |  AtBarrier ------------------------> |   ... and back
      |  <---------------------------- Enter |
      |  Returned -------------------------> |   the function has returned; held until all ranks' have
      |  <------------------------- Released |   go on behind it (an Interrupt instead: the function runs again)
      |  <------------------------------ End |   instead of Enter or Released: there will be no further world
      |  <----------------------------- Part |   before that, at the barrier: this process is replaced, but what it holds is wanted ...
      |  Parted ---------------------------> |   ... and now lies where another process finds it

A message about an older generation is ignored by both sides. Source: unix(7), DESIGN "A fault, end to end".
"""

from typing import Literal

import msgspec

PACKET_BYTES = 1 << 17
"""No message is longer."""
TEXT_BYTES = 1 << 16
"""Longest traceback or reason; what is longer is cut in the middle."""
BEAT_S = 1.0


def count_every_s(hang_timeout_s: float) -> float:
    """How often a worker looks for progress where a hang watch is on; so much too late it may notice any."""
    return min(BEAT_S / 2, max(0.1, hang_timeout_s / 20))


Rung = Literal["", "inplace", "node", "all", "replace", "end"]
Stage = Literal["function", "waiting", "aborting", "finalizing", "health check", "returned"]


# --- worker to agent


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`restartable`: this process has a wrapped function and can be restarted in place. `generation`: from its environment."""

    local_rank: int
    generation: int
    restartable: bool = False


class AtBarrier(msgspec.Struct, frozen=True, tag="barrier"):
    """Nothing of `generation` (-1: none was entered) and before runs in this process any more; it waits for Enter."""

    generation: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The function raised, or asked for a restart. The process is on its way to the barrier by itself.

    `kind` names the exception's class, `headline` is its last line, `text` the traceback. `rung`: the least rung that is asked
    for ("": whatever the policy says). `exit_status`: the process ends by itself instead, with this wait(2) status (SystemExit).
    """

    generation: int
    kind: str
    headline: str
    text: str = ""
    rung: Rung = ""
    exit_status: int | None = None


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """This process cannot be used again (an abort part, finalize or the health check failed): replace it."""

    generation: int
    reason: str
    rung: Rung = "inplace"


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The function has returned."""

    generation: int


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent each BEAT_S by a thread of the worker; after the hang timeout without progress, each `count_every_s` as well.

    `steps` and `calls` (ping) only grow within a generation. `groups`: collectives begun in each process group, by a number that all
    its members have for it. `still_s`: for how long the main thread has made no counted progress; None: nothing counts here yet.
    """

    generation: int
    stage: Stage
    steps: int = 0
    calls: int = 0
    still_s: float | None = None
    groups: dict[int, int] = {}


class StageChanged(msgspec.Struct, frozen=True, tag="stage"):
    """For deadlines and for people: what the process does between two generations."""

    generation: int
    stage: Stage


class Parted(msgspec.Struct, frozen=True, tag="parted"):
    """The answer to Part: nothing that this process holds is lost with it, as far as it could be saved."""

    generation: int


class Dumped(msgspec.Struct, frozen=True, tag="dumped"):
    """The answer to Dump: the stacks have been written."""


FromWorker = Hello | AtBarrier | Fault | Unfit | Returned | Beat | StageChanged | Parted | Dumped


# --- agent to worker


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to Hello. `inplace`: --inprocess-restart was given. Times in seconds; `hang_timeout_s` None: no watch."""

    inplace: bool
    abort_timeout_s: float
    hang_timeout_s: float | None = None


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """Run the function in this generation. `env`: variables to set (a value of None: to remove). `reason`: why again, or ""."""

    generation: int
    restart_count: int
    env: dict[str, str | None]
    mode: Literal["start", "inplace", "process"] = "start"
    reason: str = ""


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Leave `generation`, whatever you are doing."""

    generation: int
    reason: str


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The function has returned on all ranks of `generation`."""

    generation: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """No world follows: whoever waits at the barrier, or for Released, leaves (SystemExit with `code`)."""

    code: int
    reason: str


class Part(msgspec.Struct, frozen=True, tag="part"):
    """This process, which waits at the barrier, will be replaced: let it save what others cannot have. The shutdown signal follows
    on Parted, or when --shutdown-timeout is over."""


class Dump(msgspec.Struct, frozen=True, tag="dump"):
    """Write the stacks of all threads to standard error, and only then read on: what follows may change them."""


ToWorker = Welcome | Enter | Interrupt | Released | End | Part | Dump
