"""What a worker group hears and says: the vocabulary of group.py.

Events come in through `WorkerGroup.handle`, effects come out of it and are carried out in order by attempt.py. A new kind of either
begins here.
"""

from typing import Literal

import msgspec

from hyperpodrun.agent.wire import link
from hyperpodrun.agent.workers import recall
from hyperpodrun.agent.workers.recall import DumpStacks

Cause = Literal["failure", "order", "skew"]
"""Why a generation ended here: a worker failed, others say so, or some were done and others not."""


class End(msgspec.Struct, frozen=True):
    """How one worker ended, or failed without ending. `status` is its wait status; None when it has not ended: it left its function
    by itself (`fault`), or was found to hang (`why` says how), or SIGKILL had no effect.
    """

    local_rank: int
    pid: int
    status: int | None
    at_s: float
    sent: tuple[int, ...] = ()
    """The signals that we had sent it before it ended."""
    hung: bool = False
    """It was stopped because it would not end by itself."""
    fault: link.Fault | None = None
    why: str = ""
    rung: link.Rung = ""

    @property
    def failed(self) -> bool:
        """Did it end with anything but 0, or not at all?"""
        return self.status != 0


# --- events


class Start(msgspec.Struct, frozen=True):
    """Begin the attempt with this generation."""

    nproc: int
    generation: int = 0


class Started(msgspec.Struct, frozen=True):
    """All processes that were to be made exist: (local rank, pid) each."""

    pids: tuple[tuple[int, int], ...]


class StartFailed(msgspec.Struct, frozen=True):
    """No process of the attempt exists; `reason` is a sentence."""

    reason: str


class Exited(msgspec.Struct, frozen=True):
    """A main process was reaped."""

    local_rank: int
    status: int


class OthersDone(msgspec.Struct, frozen=True):
    """All ranks of another node have ended well."""


class Stop(msgspec.Struct, frozen=True):
    """End the group. `kill`: at once, without the grace. `part`: other processes take over; where that can be, these come to the
    restart barrier first and save there what they hold.
    """

    kill: bool = False
    part: bool = False


class Swept(msgspec.Struct, frozen=True):
    """Nothing but the named (unkillable) processes is left, and all output has been read."""

    left: tuple[str, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Said(msgspec.Struct, frozen=True):
    """A worker said something over its link."""

    local_rank: int
    message: link.FromWorker


class Unlinked(msgspec.Struct, frozen=True):
    """A worker's link is closed."""

    local_rank: int


class Hung(msgspec.Struct, frozen=True):
    """These ranks make no progress. `deaf`: they will not hear that they are to leave."""

    local_ranks: tuple[int, ...]
    why: str
    deaf: bool = False


class Leave(msgspec.Struct, frozen=True):
    """The generation is lost elsewhere: bring the workers out of it, in place where that saves a process. `reason` is for them."""

    reason: str


class SweptAlone(msgspec.Struct, frozen=True):
    """Nothing of these ranks, which have ended, is left, and their output has been read."""

    local_ranks: tuple[int, ...]


class Reenter(msgspec.Struct, frozen=True):
    """After `Back`: the world runs again, as this generation."""

    generation: int


class Release(msgspec.Struct, frozen=True):
    """The function has returned on all ranks of the world."""


Event = (
    Start | Started | StartFailed | Exited | OthersDone | Stop | Swept | Tick
    | Said | Unlinked | Hung | Leave | SweptAlone | Reenter | Release
)  # fmt: skip

# --- effects


class MakeProcesses(msgspec.Struct, frozen=True):
    """Start the workers of these local ranks; (): of all."""

    local_ranks: tuple[int, ...] = ()


class CancelStart(msgspec.Struct, frozen=True):
    """Give up the start under way; nothing of it may run later."""


class Part(msgspec.Struct, frozen=True):
    """Have these workers, which wait at the barrier, save what they hold; each answers with `link.Parted`."""

    local_ranks: tuple[int, ...]


class Ask(msgspec.Struct, frozen=True):
    """The shutdown signal to these workers' main processes."""

    local_ranks: tuple[int, ...]


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL to these workers and to all that is left of the group."""

    local_ranks: tuple[int, ...]


class FirstFailure(msgspec.Struct, frozen=True):
    """Said once a generation: a worker failed while the group was running."""

    end: End


class FurtherFailure(msgspec.Struct, frozen=True):
    """Another worker failed after the first, and not by our doing: maybe it is the cause of what was seen first."""

    end: End


class Sweep(msgspec.Struct, frozen=True):
    """End what the workers left behind and drain their output; answer with `Swept`."""


class Back(msgspec.Struct, frozen=True):
    """The generation is over here: its workers wait at the restart barrier (`kept`) or are gone. `failures` in the order in which they
    were seen: at most one a rank.
    """

    failures: tuple[End, ...]
    cause: Cause
    kept: tuple[int, ...]


class Over(msgspec.Struct, frozen=True):
    """The attempt is over. `ends` of the last generation in the order in which they were seen; ranks that failed before they ended
    stand in `ends` once, as they failed.
    """

    ends: tuple[End, ...]
    cause: Cause | None
    start_failure: str | None = None
    left: tuple[str, ...] = ()

    @property
    def success(self) -> bool:
        """Did every worker end by itself with 0?"""
        return self.cause is None and self.start_failure is None and not any(end.failed for end in self.ends)


Effect = (
    MakeProcesses | CancelStart | Part | Ask | DumpStacks | Kill | FirstFailure | FurtherFailure | Sweep | Back | Over
    | recall.Enter | recall.Interrupt | recall.KillAlone | recall.SweepAlone | recall.AllIn | recall.AllReturned | recall.Released
)  # fmt: skip
