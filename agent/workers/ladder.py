"""The shutdown ladder: how running workers are brought to their end, one rung after another, each with a deadline.

| rung | what happens | until |
|---|---|---|
| PART | ranks at the restart barrier save what they hold (only where processes are replaced) | all have, at most shutdown timeout |
| DUMP | hung ranks only: their stacks are printed, so that the reason of the hang is known | 1 s |
| ASK | the shutdown signal to each worker's main process; its own children live on, they serve its last save | shutdown timeout |
| DUMP_LATE | it did not leave in time: stacks of those that are left | 1 s |
| KILL | SIGKILL to everything in the workers' sessions | 5 s |
| GIVE_UP | what SIGKILL does not end sits in the kernel (state D): reported, not waited for | - |

The ladder only ever goes down. SIGKILL as shutdown signal leaves out what lies between PART and KILL.
Pure: times come in, rungs go out.
"""

from enum import Enum

DUMP_S = 1.0
KILL_WAIT_S = 5.0


class Rung(Enum):
    """Names of the table above."""

    PART = "part"
    DUMP = "dump"
    ASK = "ask"
    DUMP_LATE = "dump late"
    KILL = "kill"
    GIVE_UP = "give up"


_NEXT = {Rung.DUMP: Rung.ASK, Rung.ASK: Rung.DUMP_LATE, Rung.DUMP_LATE: Rung.KILL, Rung.KILL: Rung.GIVE_UP}
_ORDER = list(Rung)


class Ladder:
    """`timeout_s` is the grace between the first signal and SIGKILL. `rung` is where it stands, `deadline_s` when it moves on."""

    def __init__(self, now_s: float, timeout_s: float, hung: bool = False, kill: bool = False, part: bool = False) -> None:
        self.timeout_s = timeout_s
        first = Rung.KILL if kill else Rung.DUMP if hung else Rung.ASK
        self.rung = Rung.PART if part else first
        self._next = _NEXT | {Rung.PART: first}
        self.deadline_s = self._deadline(now_s)

    def _deadline(self, now_s: float) -> float | None:
        grace_s = self.timeout_s
        after_s = {Rung.PART: grace_s, Rung.DUMP: DUMP_S, Rung.ASK: grace_s, Rung.DUMP_LATE: DUMP_S, Rung.KILL: KILL_WAIT_S}
        return now_s + after_s[self.rung] if self.rung in after_s else None

    def tick(self, now_s: float) -> Rung | None:
        """The rung just entered, when the current one's time is over."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return None
        return self._go_down(now_s)

    def parted(self, now_s: float) -> Rung | None:
        """The rung that follows PART: all that could be saved has been. None when it is past that already."""
        return self._go_down(now_s) if self.rung is Rung.PART else None

    def _go_down(self, now_s: float) -> Rung:
        self.rung = self._next[self.rung]
        self.deadline_s = self._deadline(now_s)
        return self.rung

    def hurry(self, now_s: float) -> Rung | None:
        """Go to KILL at once (a second Ctrl-C). None when it is there or further down already."""
        if _ORDER.index(self.rung) >= _ORDER.index(Rung.KILL):
            return None
        self.rung = Rung.KILL
        self.deadline_s = self._deadline(now_s)
        return self.rung
