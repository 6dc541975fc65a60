"""Who is accused by whom, and when that is enough (M4).

Theory: Rapid's cut detection. Alerts about one member are counted by rings. Fewer than L is noise; L or more makes a
suspect and asks for a roll call once no new alert has come for a while; H or more is beyond doubt. An observer that
is itself suspect cannot be heard: its alert about somebody already accused is implied.

States of a member: clear (< L), suspect (L..H-1), certain (>= H, with the time since when).
An alert about somebody outside of the view, who wants to be taken in, bars the door (M8).

Invariants: alerts of other views and of strangers count nothing; an alert never goes back to an older `seq`.
"""

from hyperpodrun.agent.mesh.config import MS
from hyperpodrun.agent.mesh.rings import Rings
from hyperpodrun.agent.wire.mesh import Alert

SETTLE_NS = 20 * MS


class Alerts:
    """One table for one view. Times: nanoseconds of the local clock."""

    def __init__(self, digest: str, rings: Rings) -> None:
        self.digest = digest
        self._rings = rings
        self._table: dict[tuple[str, str], Alert] = {}
        self._raw: dict[str, int] = {}
        self._count: dict[str, int] = {}
        self._outside: set[str] = set()
        self._dirty = False
        self._settled_ns = -SETTLE_NS
        self._certain_since: dict[str, int] = {}
        self._suspects: tuple[str, ...] = ()
        self.first_ns: int | None = None
        """When the oldest suspicion that still stands began."""
        self.last_ns = 0

    def apply(self, now: int, alert: Alert) -> bool:
        """Take in an alert; True when it was news."""
        observers = self._rings.observers
        weight = observers.get(alert.subject, {}).get(alert.observer, 0)
        outside = alert.subject not in observers and alert.observer in observers
        if alert.view != self.digest or not (weight or outside):
            return False
        key = (alert.observer, alert.subject)
        old = self._table.get(key)
        if old is not None and old.seq >= alert.seq:
            return False
        self._table[key] = alert
        if outside:
            self._outside.add(alert.subject)
            return True
        change = alert.down - (old.down if old is not None else False)
        if change:
            self._raw[alert.subject] = self._raw.get(alert.subject, 0) + change * weight
            self._dirty = True
        if alert.down:
            self.last_ns = now
        return True

    def settle(self, now: int, must: bool = False) -> int | None:
        """Count what came in; apart from `apply`, for alerts come in bursts. A count takes a walk over all suspects and their
        observers (1 ms where a third of 512 is lost), so it is put off to `settle_ns` after the last one unless it `must` be
        now: returns when, or None."""
        if not self._dirty:
            return None
        if not must and now < self._settled_ns + SETTLE_NS:
            return self._settled_ns + SETTLE_NS
        self._dirty, self._settled_ns = False, now
        low, high = self._rings.low, self._rings.high
        self._count = {}
        suspects = []
        for subject in sorted(self._raw):
            count = self._raw[subject]
            if not count:
                continue
            for observer, weight in self._rings.observers[subject].items():
                alert = self._table.get((observer, subject))
                if (alert is None or not alert.down) and self._raw.get(observer, 0) >= low:
                    count += weight
            self._count[subject] = count
            if count >= low:
                suspects.append(subject)
            if count >= high:
                self._certain_since.setdefault(subject, now)
            else:
                self._certain_since.pop(subject, None)
        for subject in [s for s in self._certain_since if s not in self._count]:
            del self._certain_since[subject]
        self._suspects = tuple(suspects)
        if not suspects:
            self.first_ns = None
        elif self.first_ns is None:
            self.first_ns = now
        return None

    @property
    def is_quiet(self) -> bool:
        """Nobody is suspected, and nothing is left to be counted."""
        return self.first_ns is None and not self._dirty

    def count(self, subject: str) -> int:
        """Alerts about `subject`, by rings, implied ones included."""
        return self._count.get(subject, 0)

    def suspects(self) -> tuple[str, ...]:
        """Members with at least L alerts, sorted."""
        return self._suspects

    def beyond_doubt(self) -> frozenset[str]:
        """Members with at least H alerts; a suspect with fewer may still answer a roll call."""
        return frozenset(self._certain_since)

    def certain(self, now: int, for_ns: int) -> frozenset[str]:
        """Members that have had at least H alerts for `for_ns`."""
        return frozenset(s for s, since in self._certain_since.items() if now - since >= for_ns)

    def certain_at(self, for_ns: int) -> int | None:
        """When the next member will have had H alerts for `for_ns`."""
        return min((since + for_ns for since in self._certain_since.values()), default=None)

    def standing(self) -> tuple[Alert, ...]:
        """All alerts that accuse somebody now."""
        return tuple(alert for _, alert in sorted(self._table.items()) if alert.down)

    def said(self, observer: str, subject: str) -> Alert | None:
        """The last word of this observer about that subject."""
        return self._table.get((observer, subject))

    def barred(self) -> frozenset[str]:
        """Those outside of the view whom a member cannot hear that is itself not suspected (M8)."""
        return frozenset(s for s in self._outside if any(o not in self._suspects for o in self.accusers_of(s)))

    def accusers_of(self, subject: str) -> tuple[str, ...]:
        """Who accuses `subject` now."""
        return tuple(sorted(a.observer for a in self._table.values() if a.down and a.subject == subject))
