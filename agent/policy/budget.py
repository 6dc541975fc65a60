"""Budgets: how often a job may be brought back before it is given up.

`Total` counts for the life of the job (torchrun's --max-restarts). `Window` allows so many within any stretch of time
(--max-node-failures within --restart-window), so that a job of months survives rare faults but not a broken node.
Pure: times come in.
"""

from collections.abc import Iterable


class Total:
    """`limit` restarts in all, `used` of them spent (kept over the agent's own restarts)."""

    def __init__(self, limit: int, used: int = 0) -> None:
        self.limit = limit
        self.used = used

    @property
    def left(self) -> int:
        """Restarts that may still be made."""
        return max(0, self.limit - self.used)

    def spend(self) -> bool:
        """Take one; False, and nothing taken, when none is left."""
        if not self.left:
            return False
        self.used += 1
        return True


class Window:
    """At most `limit` (None: any number) within any `window_s` seconds. `spent_s`: when earlier ones were taken."""

    def __init__(self, limit: int | None, window_s: float, spent_s: Iterable[float] = ()) -> None:
        self.limit = limit
        self.window_s = window_s
        self._spent_s = list(spent_s)

    def spend(self, now_s: float) -> bool:
        """Take one now; False, and nothing taken, when the window is full."""
        self._spent_s = [when_s for when_s in self._spent_s if when_s > now_s - self.window_s]
        if self.limit is not None and len(self._spent_s) >= self.limit:
            return False
        self._spent_s.append(now_s)
        return True
