"""Which rank hangs: pure, from what workers say of their progress and from their silence.

Theory. A worker's link tells each second for how long its function has made no progress (`Beat.still_s`: steps, collectives, calls of
ping, entering the function). One hung rank soon stands for all: the others wait for it in a collective, and are as still as it is. So
when one is still for the timeout, the culprit is looked for among all, best evidence first:

1. silent links (a few beats are enough here): the beats come from a thread of their own, so the process is stopped, or a call holds
   the interpreter's lock;
2. ranks that have not entered the function while others wait inside (still importing, or hung before it);
3. of the still ranks, those that are behind a rank here and ahead of none: who waits in a collective has begun it, who hangs before it
   has not. Compared are steps, and the collectives of each group by themselves: ranks belong to different numbers of groups. A rank
   that is behind in one group and ahead in another waits itself. Where no group is counted, calls of ping stand in. Some backends
   number sends and receives too, of which each rank has its own share: they drift apart for ever, so only a small lead is a lead
   (`_leads`);
4. else no one in particular: all still ranks. Their stacks may tell (`workers/stacks.py`).

What a rank says is as old as its last beat, so the judgement waits for a further one of each rank inside, at most BEAT_S; ranks
that are still send one as soon as the timeout is over. Progress is noticed a little late, by one rank later than by another:
`_grace_s` is for that.

As long as some rank of the world, here or elsewhere, has not come to its function, waiting for it is no hang: new processes have to
import first. Until `assembled` the limit is START_TIMES the timeout, at least START_S.

Silence alone counts too, for ranks inside. A rank without a link that nobody waits for is none of this watch's business: its program
may know nothing of links.

The watch also knows whether a generation got anywhere (`progressed`). Where no step was ever counted, only time can tell: one whose
ranks were inside for `proof_s` has progressed, whatever ended it. Time in a hang is not counted. As long as no rank of the job has
ever greeted, its program may have no wrapped function: then the life of its processes counts.

States: *idle* (no generation runs, or a verdict was given), *watching*.
Invariants: one verdict a generation; a watch that was late itself (this process stood still) gives everybody `LAST_WORD_S` more.
"""

from collections.abc import Iterable

import msgspec

from hyperpodrun.agent.wire import link

SILENT_BEATS = 5
QUIET_BEATS = 2.5
"""Beats that a rank has left out on which others seem to wait."""
LAST_WORD_S = 1.5
START_TIMES, START_S = 10.0, 30.0
"""The limit, in timeouts and at least in seconds, as long as not all ranks of the world are inside."""

UNCOUNTED_S = 60.0
"""A generation in which nothing counts steps has progressed if its ranks were inside their function for so long."""
LEAD_SHARE = 8
"""Who is ahead by more than one is ahead by at most this part (one in so many) of what it has counted."""

_STEPS, _CALLS = -1, -2  # beside the keys of groups

_SILENT = "it is stopped, or a call holds the interpreter's lock"


class Verdict(msgspec.Struct, frozen=True):
    """These local ranks hang, as far as can be told; `why` is for people. `deaf`: their links are silent, they will hear nothing."""

    local_ranks: tuple[int, ...]
    why: str
    deaf: bool = False


class Unwatched(msgspec.Struct, frozen=True):
    """Nothing is watched: no rank has greeted in this time (said once)."""

    since_s: float


class _Rank:
    __slots__ = ("beat_s", "beaten", "counts", "entered", "heard_s", "moved_s")

    def __init__(self, now_s: float) -> None:
        self.entered = False
        self.beaten = False
        self.heard_s = now_s
        self.beat_s = now_s
        self.moved_s = now_s
        self.counts: dict[int, int] = {}


class HangWatch:
    """`timeout_s` is --hang-timeout; None: only progress is noted. `proof_s`: UNCOUNTED_S, or 0: where no step was ever counted,
    nobody can know and any generation has progressed. Times are of one clock, in seconds.
    """

    def __init__(self, timeout_s: float | None, proof_s: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.greeted = False
        """Has a rank of this job ever said anything?"""
        self._proof_s = proof_s
        self.silent_s = max(timeout_s or 0.0, SILENT_BEATS * link.BEAT_S)
        self._grace_s = 2 * link.count_every_s(timeout_s or 0.0)
        self._ranks: dict[int, _Rank] = {}
        self._watching = False
        self._due_s: float | None = None
        self._assembled_s: float | None = None
        self._steps_counted = False
        self._steps = 0
        self._born_s: float | None = None
        self._entered_s: float | None = None
        self._over_s: float | None = None
        self._greet_due_s: float | None = None
        self._unwatched_told = False

    def progressed(self, now_s: float) -> bool:
        """Has a rank here completed a step in this generation, or, if none was ever counted in this job, was it at work for long?"""
        if self._steps or self._steps_counted:
            return self._steps > 0
        began_s = self._entered_s if self.greeted else self._born_s
        over_s = now_s if self._over_s is None else self._over_s
        return (0.0 if began_s is None else over_s - began_s) >= self._proof_s

    def begin(self) -> None:
        """A generation begins."""
        self._watching = True
        self._assembled_s = None
        self._steps = 0
        self._born_s = self._entered_s = self._over_s = None

    def born(self, local_ranks: Iterable[int], now_s: float) -> None:
        """These ranks have a new process."""
        for local_rank in local_ranks:
            self._ranks[local_rank] = _Rank(now_s)
        self._born_s = now_s if self._born_s is None else self._born_s
        if not self.greeted and not self._unwatched_told:
            self._greet_due_s = now_s + self.silent_s
        self._reckon()

    def entered(self, local_ranks: Iterable[int], now_s: float) -> None:
        """These ranks enter their function."""
        for local_rank in local_ranks:
            rank = self._ranks[local_rank] = _Rank(now_s)
            rank.entered = True
        self._greet()
        self._first_entered(now_s)
        self._reckon()

    def assembled(self, now_s: float) -> None:
        """All ranks of the world, on all nodes, are inside their function."""
        self._assembled_s = now_s
        self._reckon()

    def gone(self, local_rank: int) -> None:
        """This rank's function has returned, or its process has ended."""
        self._ranks.pop(local_rank, None)
        self._reckon()

    def stop(self, now_s: float) -> None:
        """The generation is over, since then at the latest."""
        if self._watching:
            self._over_s = now_s
        self._watching = False
        self._due_s = None

    def heard(self, local_rank: int, message: link.FromWorker, now_s: float) -> None:
        """A message of this rank."""
        rank = self._ranks.get(local_rank)
        if rank is None:
            return
        self._greet()
        rank.heard_s = now_s
        if isinstance(message, link.Beat):
            if message.stage == "function" and not rank.entered:
                self._entered_by_itself(rank, now_s)
            elif message.stage == "returned":
                self.gone(local_rank)
                return
            if message.steps:
                self._steps_counted = True
                self._steps = max(self._steps, message.steps)
            if message.still_s is not None and rank.entered:
                rank.beaten = True
                rank.beat_s = now_s
                rank.moved_s = max(rank.moved_s, now_s - message.still_s)
                rank.counts = {_STEPS: message.steps} | (message.groups or {_CALLS: message.calls})
        self._reckon()

    def _entered_by_itself(self, rank: _Rank, now_s: float) -> None:
        """Where nobody restarts in place, a wrapped function is entered without a word, and beats tell."""
        rank.entered = True
        rank.moved_s = now_s
        self._first_entered(now_s)
        if all(other.entered for other in self._ranks.values()):
            self._assembled_s = now_s

    def next_deadline_s(self) -> float | None:
        """When `tick` is due."""
        return self._due_s

    def tick(self, now_s: float) -> Verdict | Unwatched | None:
        """Time has passed."""
        due_s = self._due_s
        if due_s is None or now_s < due_s:
            return None
        if now_s > due_s + LAST_WORD_S:
            self._due_s = now_s + LAST_WORD_S / 2
            return None
        if self._greet_due_s is not None and now_s >= self._greet_due_s:
            self._greet_due_s, self._unwatched_told = None, True
            self._reckon()
            return Unwatched(self.silent_s)
        verdict = self._judge(now_s)
        if verdict is not None:
            self.stop(now_s - (self.timeout_s or 0.0))
        return verdict

    # --- inside

    def _greet(self) -> None:
        self.greeted = True
        self._greet_due_s = None

    def _first_entered(self, now_s: float) -> None:
        self._entered_s = now_s if self._entered_s is None else self._entered_s

    def _reckon(self) -> None:
        """When a rank has been silent, or still, for too long."""
        inside = [rank for rank in self._ranks.values() if rank.entered]
        dues = [rank.heard_s + self.silent_s for rank in inside]
        if limits_s := [self._still_limit_s(rank) for rank in inside if rank.beaten]:
            first_s = min(limits_s)
            told = all(rank.beat_s >= first_s for rank in inside)
            dues.append(first_s + (self._grace_s if told else link.BEAT_S))
        if self._greet_due_s is not None and self._ranks:
            dues.append(self._greet_due_s)
        self._due_s = min(dues, default=None) if self._watching and self.timeout_s is not None else None

    def _still_limit_s(self, rank: _Rank) -> float:
        """When this rank has made no progress for too long."""
        if self._assembled_s is None:
            return rank.moved_s + self._patience_s
        return max(rank.moved_s, self._assembled_s) + (self.timeout_s or 0.0)

    @property
    def _patience_s(self) -> float:
        return max(START_TIMES * (self.timeout_s or 0.0), START_S)

    def _judge(self, now_s: float) -> Verdict | None:
        timeout_s = (self.timeout_s or 0.0) if self._assembled_s is not None else self._patience_s
        inside = {local_rank: rank for local_rank, rank in sorted(self._ranks.items()) if rank.entered}
        silent = tuple(r for r, rank in inside.items() if now_s >= rank.heard_s + self.silent_s)
        if silent:
            return Verdict(silent, f"its link is silent for {self.silent_s:g} s: {_SILENT}", deaf=True)
        still = {r: rank for r, rank in inside.items() if rank.beaten and now_s >= self._still_limit_s(rank)}
        if not still:
            self._reckon()
            return None
        if quiet := tuple(r for r, rank in inside.items() if now_s >= rank.heard_s + QUIET_BEATS * link.BEAT_S):
            why = f"others have made no progress for {timeout_s:g} s, and its link is silent: {_SILENT}"
            return Verdict(quiet, why, deaf=True)
        if absent := tuple(
            r for r, rank in sorted(self._ranks.items()) if not rank.entered and now_s >= rank.heard_s + timeout_s
        ):
            return Verdict(absent, f"not in its function while others have waited there for {timeout_s:g} s")
        counts = [rank.counts for rank in inside.values()]
        behind = tuple(r for r, rank in still.items() if _is_behind(rank.counts, counts))
        if behind:
            return Verdict(behind, f"no progress for {timeout_s:g} s, and behind the others")
        return Verdict(tuple(still), f"no progress for {timeout_s:g} s")


def _is_behind(mine: dict[int, int], counts: list[dict[int, int]]) -> bool:
    """Is somebody ahead of this rank in what they both count, and nobody behind it?"""
    pairs = [(count, other[key]) for other in counts for key, count in mine.items() if key in other]
    return any(_leads(other, own) for own, other in pairs) and not any(_leads(own, other) for own, other in pairs)


def _leads(one: int, other: int) -> bool:
    """Is `one` ahead by no more than ranks in step can be?"""
    lead = one - other
    return lead == 1 or 0 < lead * LEAD_SHARE <= one
