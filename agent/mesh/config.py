"""What a mesh must be told, with the formula beside each time. All agents of a job hold the same values except `me`."""

import msgspec

from hyperpodrun.agent.wire.rungs import Rules

MS = 1_000_000
S = 1_000_000_000


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times are integer nanoseconds. `roster` names the slots when they are known at launch (A10); () when they are not."""

    slots: int
    """M: nodes the job may have, spares included."""
    min_nodes: int
    max_nodes: int
    """Active nodes of a world: fewer than min_nodes hold, more than max_nodes stand by."""
    roster: tuple[str, ...] = ()
    first_contact: str = ""
    """The node on whose word view 0 is formed when `forms_anywhere` is false."""
    elastic_now: bool = True
    """--elastic-join now: a joiner restarts the world at once; else it waits for the next restart."""
    tiebreak: str = ""
    """Named by the operator; "": rank 0's node."""
    rules: Rules = Rules()
    """What faults may cost, and how they are healed (policy/escalation.py)."""

    rings: int = 10
    heartbeat_ns: int = 250 * MS
    phase_ns: int = 0
    """Rounds begin this long after multiples of their interval. Where it is the same moment everywhere (the driver takes the wall
    clock's), a node hears all its subjects in one wake-up; nothing of the agreement rests on it."""
    misses: int = 3
    """A silent peer is accused after heartbeat x misses x (health score + 1)."""
    stalled_ns: int = 3 * S
    """The same for a peer whose host still takes connections: its process stands still. Above 2 s (M3)."""
    loud_gap_ns: int = 50 * MS
    quiet_ns: int = 150 * MS
    """Alerts must have been quiet for so long before a roll call (A3) ..."""
    quiet_cap_ns: int = 600 * MS
    """... but no longer than this after the first."""
    report_quiet_ns: int = 20 * MS
    """The same for reports, which are facts: only long enough to collect those of the same moment."""
    stagger_ns: int = 200 * MS
    """Between one candidate and the next."""
    yield_ns: int = 400 * MS
    """A candidate that saw a higher ballot waits so long."""
    roll_ns: int = 250 * MS
    """A roll call with a quorum waits so long for the rest."""
    resend_ns: int = 100 * MS
    ballot_ns: int = 1 * S
    """No quorum within this: a new ballot."""
    backoff_cap_ns: int = 2 * S
    open_ns: int = 800 * MS
    """An accepted value undecided for so long is taken up by the next candidate."""
    one_way_ns: int = 3 * S
    """A member that answers roll calls but has H alerts for so long is dropped (A5)."""
    join_window_ns: int = 2 * S
    hello_ns: int = 500 * MS
    present_ns: int = 1500 * MS
    """A joiner is present when it was heard within this: 3 x hello_ns."""
    absent_ns: int = 2 * S
    """A contact refused for so long has no agent: longer than a keeper takes to restart one (1 s)."""
    beat_ns: int = 1 * S
    lease_fan: int = 16
    """So many members at most speak with a member of a lease tree (A9): (16 + 3) / 3 s are 6 messages a second."""
    lease_ns: int = 15 * S
    fence_ns: int = 16 * S
    """lease_ns + time to kill workers + drift of two clocks over it (1e-3): nothing older runs after this."""
    barrier_ns: int = 120 * S
    """Longest way to the restart barrier: shutdown timeout and abort timeout included."""
    leave_ns: int = 5 * S
    """A leaver waits so long for the view without it."""

    def wall_s(self, now: int) -> int:
        """The time of day, as far as `phase_ns` gives it, in seconds: only budgets over hours are counted in it."""
        return (now - self.phase_ns) // S

    def next_round_ns(self, now: int, every_ns: int) -> int:
        """The next beginning of a round."""
        return now + every_ns - (now - self.phase_ns) % every_ns

    @property
    def forms_anywhere(self) -> bool:
        """A10 (a): any group of min_nodes is more than half of a closed roster; else (b)."""
        return len(self.roster) == self.slots and 2 * self.min_nodes > self.slots
