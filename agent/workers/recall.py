"""Bringing a node's workers out of a generation in place, and into the next one: a pure state machine over its local ranks.

Theory. A worker with a wrapped function runs it between `Enter` and the barrier (wire/link.py). When a generation is lost, each
living worker is interrupted and comes back to the barrier by itself; one that is late, silent or unfit is killed alone, and what
it left behind is ended before a new process takes its place. So the node is back as soon as each rank is at the barrier or gone,
and from then on nothing of that generation runs here.

States of a rank (`Place`)
- STARTING  its process runs; it has not been at the barrier yet, and may never come (a program without a wrapper)
- BARRIER   it waits for Enter
- INSIDE    it was entered
- RETURNED  its function has returned; it waits for Released
- FREE      released: what it does now is not protected, and it cannot come back
- LEAVING   it was told to leave, or leaves after a fault of its own
- DUMPED    too late: its stacks are being printed
- KILLED    SIGKILL was sent
- ENDED     its process has ended while the generation ran on
- SWEEPING  its process has ended; its descendants are being ended
- GONE      nothing of it is here

States of all: *running* a generation, *leaving* it, *back*.

Invariants
- a rank is entered at most once in a generation, and only at the barrier;
- `Back` is said once a recall, when each rank is at the BARRIER or GONE; every other place has a deadline while leaving;
- what a worker says of another generation than the one it was entered in changes nothing, but shows that it lives.
"""

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Literal

import msgspec

from hyperpodrun.agent.wire import link
from hyperpodrun.agent.workers.ladder import DUMP_S, KILL_WAIT_S

SILENT_S = 5.0
"""Beats come each second from a thread of the worker: one silent for so long holds the interpreter's lock, or is stopped."""
LAST_WORD_S = 1.0
UNLINKED_S = 1.0
"""A process whose link is closed is ending; so long that may take."""


class Place(Enum):
    """See the module's head."""

    STARTING = "starting"
    BARRIER = "at the barrier"
    INSIDE = "inside"
    RETURNED = "returned"
    FREE = "released"
    LEAVING = "leaving"
    DUMPED = "dumped"
    KILLED = "killed"
    ENDED = "ended"
    SWEEPING = "being swept"
    GONE = "gone"


# --- effects


class Enter(msgspec.Struct, frozen=True):
    """Tell these ranks to run their function in the present generation."""

    local_ranks: tuple[int, ...]


class Interrupt(msgspec.Struct, frozen=True):
    """Tell these ranks to leave their function."""

    local_ranks: tuple[int, ...]
    reason: str


class DumpStacks(msgspec.Struct, frozen=True):
    """Print the stacks of these ranks. `ends`: they are ended next, and may die of being looked at from outside (stacks.py)."""

    local_ranks: tuple[int, ...]
    why: str
    ends: bool = True


class KillAlone(msgspec.Struct, frozen=True):
    """SIGKILL to these ranks and to what is theirs, and to nobody else."""

    local_ranks: tuple[int, ...]


class SweepAlone(msgspec.Struct, frozen=True):
    """End what these ranks, which have ended, left behind; answer with `swept`."""

    local_ranks: tuple[int, ...]


class AllIn(msgspec.Struct, frozen=True):
    """Each rank here has entered the present generation."""


class AllReturned(msgspec.Struct, frozen=True):
    """Each rank's function has returned (or its process has ended well)."""


class Released(msgspec.Struct, frozen=True):
    """Tell these ranks to go on behind their function."""

    local_ranks: tuple[int, ...]


class Back(msgspec.Struct, frozen=True):
    """Each rank is at the barrier or gone."""


class Stuck(msgspec.Struct, frozen=True):
    """SIGKILL does not end these ranks: nothing can be restarted beside them in place."""

    local_ranks: tuple[int, ...]


Effect = Enter | Interrupt | DumpStacks | KillAlone | SweepAlone | AllIn | AllReturned | Released | Back | Stuck

_LIVING = frozenset(
    {Place.STARTING, Place.BARRIER, Place.INSIDE, Place.RETURNED, Place.FREE, Place.LEAVING, Place.DUMPED, Place.KILLED}
)
_OUT = frozenset({Place.BARRIER, Place.GONE})


class _Rank:
    __slots__ = ("due_s", "entered", "fresh", "heard_s", "place", "restartable")

    def __init__(self, now_s: float) -> None:
        self.place = Place.STARTING
        self.restartable: bool | None = None
        """None: it has said nothing yet."""
        self.entered = -1
        self.fresh = True
        self.heard_s = now_s
        self.due_s: float | None = None


class Recall:
    """`abort_timeout_s`: from the interrupt to the barrier, for each rank; `all_timeout_s`: for all of them, a start included."""

    def __init__(self, abort_timeout_s: float, all_timeout_s: float) -> None:
        self.abort_timeout_s = abort_timeout_s
        self.all_timeout_s = all_timeout_s
        self.reset(-1)

    def reset(self, generation: int) -> None:
        """An attempt begins with this generation; no process of it is there yet."""
        self.generation = generation
        self.state: Literal["running", "leaving", "back"] = "running"
        self._ranks: dict[int, _Rank] = {}
        self._all_due_s: float | None = None
        self._all_in = self._all_returned = False

    # --- what is so

    @property
    def feasible(self) -> bool:
        """Could anything be saved: some living rank has a wrapped function, and none is past it?"""
        places = [rank.place for rank in self._ranks.values()]
        return Place.FREE not in places and any(rank.restartable and rank.place in _LIVING for rank in self._ranks.values())

    @property
    def parked(self) -> tuple[int, ...]:
        """Ranks that wait at the barrier."""
        return self._at(Place.BARRIER)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a process."""
        return self._at(Place.GONE)

    @property
    def settled(self) -> bool:
        """Is each rank at the barrier or gone?"""
        return all(rank.place in _OUT for rank in self._ranks.values())

    def place(self, local_rank: int) -> Place:
        """Where this rank is."""
        return self._ranks[local_rank].place

    def is_fresh(self, local_rank: int) -> bool:
        """Is the present generation the first that this rank's process was entered in?"""
        return self._ranks[local_rank].fresh

    def late(self) -> tuple[int, ...]:
        """Living ranks that are not at the barrier yet."""
        return self._at(*(_LIVING - {Place.BARRIER}))

    def unfinished(self) -> tuple[int, ...]:
        """Living ranks whose function has not returned."""
        return self._at(Place.STARTING, Place.BARRIER, Place.INSIDE, Place.LEAVING)

    def next_deadline_s(self) -> float | None:
        """When `tick` is due."""
        return min((due_s for rank in self._ranks.values() if (due_s := self._due_s(rank)) is not None), default=None)

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for local_rank, rank in self._ranks.items():
            assert rank.entered <= self.generation, f"rank {local_rank} was entered in a generation to come"
            if self.state == "back":
                assert rank.place not in (Place.INSIDE, Place.RETURNED, Place.ENDED), f"rank {local_rank} back and {rank.place}"
            if self.state == "leaving" and rank.place not in (*_OUT, Place.SWEEPING):
                assert self._due_s(rank) is not None, f"rank {local_rank} is waited for without end ({rank.place})"

    # --- events

    def born(self, local_ranks: Iterable[int], now_s: float) -> list[Effect]:
        """These ranks have a process from now on."""
        for local_rank in local_ranks:
            self._ranks[local_rank] = _Rank(now_s)
        return []

    def heard(self, local_rank: int, message: link.FromWorker, now_s: float) -> list[Effect]:
        """A message of this rank's process."""
        rank = self._ranks.get(local_rank)
        if rank is None or rank.place not in _LIVING:
            return []
        rank.heard_s = now_s
        match message:
            case link.Hello(restartable=restartable):
                rank.restartable = restartable
                if rank.entered >= 0 and rank.place is not Place.KILLED:
                    rank.place, rank.entered = Place.STARTING, -1  # it has replaced itself by another program (execve)
                if self.state != "running" and not restartable:
                    return self._kill([local_rank], now_s)
            case link.AtBarrier(generation) if generation == rank.entered and rank.place is not Place.KILLED:
                return self._at_barrier(local_rank, rank)
            case link.Fault(generation) if generation == rank.entered and rank.place in (Place.INSIDE, Place.RETURNED):
                rank.place = Place.LEAVING
                rank.due_s = now_s + self.abort_timeout_s
            case link.Unfit(generation) if generation == rank.entered and rank.place is not Place.KILLED:
                return self._kill([local_rank], now_s)
            case link.Returned(generation) if generation == rank.entered and rank.place is Place.INSIDE:
                rank.place = Place.RETURNED
                return self._check_returned()
        return []

    def unlinked(self, local_rank: int, now_s: float) -> list[Effect]:
        """This rank's link is closed; it can be told nothing any more."""
        rank = self._ranks.get(local_rank)
        if rank is None or rank.place not in _LIVING:
            return []
        rank.restartable = False
        if self.state != "running" and rank.place in (Place.STARTING, Place.BARRIER, Place.LEAVING):
            rank.place = Place.LEAVING
            rank.due_s = now_s + UNLINKED_S
        return []

    def exited(self, local_rank: int, well: bool) -> list[Effect]:
        """This rank's process has ended, `well`: with 0."""
        rank = self._ranks.get(local_rank)
        if rank is None or rank.place not in _LIVING:
            return []
        rank.due_s = None
        rank.place = Place.ENDED
        if self.state != "running":
            rank.place = Place.SWEEPING
            return [SweepAlone((local_rank,))]
        return self._check_returned() if well else []

    def swept(self, local_ranks: Iterable[int]) -> list[Effect]:
        """Nothing of these ranks is here any more, and their output has been read."""
        for local_rank in local_ranks:
            if self._ranks[local_rank].place is Place.SWEEPING:
                self._ranks[local_rank].place = Place.GONE
        return self._check_back()

    def begin(self, reason: str, now_s: float, dumped: Collection[int] = ()) -> list[Effect]:
        """Bring all ranks out of the present generation; `reason` is for those inside.

        `dumped`: they are known not to hear of it, and their stacks are being printed already.
        """
        if self.state != "running":
            return []
        self.state = "leaving"
        self._all_due_s = now_s + self.all_timeout_s
        told, unfit, ended = [], [], []
        for local_rank, rank in sorted(self._ranks.items()):
            if rank.place is Place.ENDED:
                rank.place = Place.SWEEPING
                ended.append(local_rank)
            elif rank.place in (Place.INSIDE, Place.RETURNED, Place.LEAVING) and rank.restartable:
                rank.place = Place.LEAVING
                rank.due_s = now_s + self.abort_timeout_s
                # Silent before already: hardly more time. Not none: maybe this process stood still and has not read what was said.
                rank.heard_s = max(rank.heard_s, now_s - SILENT_S + LAST_WORD_S)
                if local_rank in dumped:
                    rank.place, rank.due_s = Place.DUMPED, now_s + DUMP_S
                told.append(local_rank)
            elif rank.place in _LIVING and rank.restartable is False:
                unfit.append(local_rank)
        effects: list[Effect] = []
        if told:
            effects.append(Interrupt(tuple(told), reason))
        effects += self._kill(unfit, now_s)
        if ended:
            effects.append(SweepAlone(tuple(ended)))
        return effects + self._check_back()

    def enter(self, generation: int) -> list[Effect]:
        """The world runs again, as this generation; to be called when back and `settled`. Ranks that are `missing` are to be born."""
        assert self.state == "back" and self.settled and generation > self.generation
        self.generation = generation
        self.state = "running"
        self._all_due_s = None
        self._all_in = self._all_returned = False
        return self._enter(self.parked)

    def release(self) -> list[Effect]:
        """The function has returned on all ranks of the world."""
        released = self._at(Place.RETURNED)
        if self.state != "running" or not released or self.unfinished():
            return []
        for local_rank in released:
            self._ranks[local_rank].place = Place.FREE
        return [Released(released)]

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed: whoever is late goes one step further down."""
        late: dict[str, list[int]] = {}
        dumped, stuck = [], []
        for local_rank, rank in sorted(self._ranks.items()):
            due_s = self._due_s(rank)
            if due_s is None or now_s < due_s:
                continue
            if rank.place is Place.DUMPED:
                dumped.append(local_rank)
            elif rank.place is Place.KILLED:
                stuck.append(local_rank)
            else:
                late.setdefault(self._why_late(rank, now_s), []).append(local_rank)
                rank.place = Place.DUMPED
                rank.due_s = now_s + DUMP_S
        effects: list[Effect] = [DumpStacks(tuple(local_ranks), why) for why, local_ranks in late.items()]
        effects += self._kill(dumped, now_s)
        if stuck:
            effects.append(Stuck(tuple(stuck)))
        return effects

    # --- inside

    def _at(self, *places: Place) -> tuple[int, ...]:
        return tuple(local_rank for local_rank, rank in sorted(self._ranks.items()) if rank.place in places)

    def _due_s(self, rank: _Rank) -> float | None:
        if self.state == "running":
            return None
        match rank.place:
            case Place.STARTING:
                return self._all_due_s
            case Place.LEAVING:
                dues = (rank.due_s, self._all_due_s, rank.heard_s + SILENT_S)
                return min(due_s for due_s in dues if due_s is not None)
            case Place.DUMPED | Place.KILLED:
                return rank.due_s
        return None

    def _why_late(self, rank: _Rank, now_s: float) -> str:
        if rank.place is Place.STARTING:
            return f"not at the restart barrier {self.all_timeout_s:g} s after the fault"
        if rank.due_s is not None and now_s >= rank.due_s:
            return (
                f"still on its way to the restart barrier {self.abort_timeout_s:g} s after it was told to leave (--abort-timeout)"
            )
        if now_s >= rank.heard_s + SILENT_S:
            return f"its link is silent for {SILENT_S:g} s: it is stopped, or holds the interpreter's lock"
        return f"still on its way to the restart barrier {self.all_timeout_s:g} s after the fault (--inprocess-timeout)"

    def _at_barrier(self, local_rank: int, rank: _Rank) -> list[Effect]:
        if rank.place is Place.BARRIER:
            return []
        rank.place = Place.BARRIER
        rank.due_s = None
        rank.restartable = True
        if self.state == "running":
            # Only a process that is new in this generation; one that has left it is waited for by `begin`.
            return self._enter((local_rank,)) if rank.entered < self.generation else []
        return self._check_back()

    def _enter(self, local_ranks: tuple[int, ...]) -> list[Effect]:
        if not local_ranks:
            return []
        for local_rank in local_ranks:
            rank = self._ranks[local_rank]
            rank.fresh = rank.entered < 0
            rank.place, rank.entered = Place.INSIDE, self.generation
        effects: list[Effect] = [Enter(local_ranks)]
        if not self._all_in and all(rank.entered == self.generation for rank in self._ranks.values()):
            self._all_in = True
            effects.append(AllIn())
        return effects

    def _check_returned(self) -> list[Effect]:
        entered = any(rank.entered == self.generation for rank in self._ranks.values())
        if self._all_returned or not entered or self.unfinished():
            return []
        self._all_returned = True
        return [AllReturned()]

    def _check_back(self) -> list[Effect]:
        if self.state != "leaving" or not self.settled:
            return []
        self.state = "back"
        return [Back()]

    def _kill(self, local_ranks: list[int], now_s: float) -> list[Effect]:
        for local_rank in local_ranks:
            self._ranks[local_rank].place = Place.KILLED
            self._ranks[local_rank].due_s = now_s + KILL_WAIT_S
        return [KillAlone(tuple(local_ranks))] if local_ranks else []
