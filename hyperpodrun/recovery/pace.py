"""After which steps a version is made: a pure function of measured times that all ranks agree on.

Theory. A version costs a copy of the state, and sending it to buddies costs processor and wire. So it is made every k steps, k being
the least with which training slows by less than BUDGET: cost over the time of k steps. Times differ between ranks and the steps of
versions must not, so in the exchange that comes before an update each rank says its k and whether it still waits for the version
before; all take the largest k, and while anybody waits no version is begun. So the version before is whole everywhere when the one
before that is overwritten.

Invariants: fed with what was agreed, all ranks answer `due` alike.
"""

BUDGET = 0.02
MAX_EVERY = 10_000


class Pace:
    """Of one life of the training function."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._cost_s = 0.0
        self._next = 0
        self._last_at_s: float | None = None

    def begin(self, step: int) -> None:
        """The state after `step` is in place; the next one makes a version."""
        self._next = step + 1
        self._last_at_s = None

    def stepped(self, now_s: float) -> None:
        """A step ended."""
        if self._last_at_s is not None:
            took_s = now_s - self._last_at_s
            self.step_s = took_s if not self.step_s else 0.8 * self.step_s + 0.2 * took_s
        self._last_at_s = now_s

    def cost(self, took_s: float) -> None:
        """What a version took."""
        self._cost_s = took_s if not self._cost_s else 0.7 * self._cost_s + 0.3 * took_s

    def every(self) -> int:
        """This rank's k."""
        if not self.step_s:
            return 1
        return min(MAX_EVERY, max(1, -(-int(self._cost_s * 1e6) // max(1, int(self.step_s * BUDGET * 1e6)))))

    def due(self, step: int, every: int, waits: bool) -> bool:
        """Is a version of this step made? `every`, `waits`: as agreed for it. To be asked once a step."""
        if step < self._next or waits:
            return False
        self._next = step + every
        return True

    def meets(self, step: int) -> bool:
        """Can it be due: do the ranks have to agree?"""
        return step >= self._next
