"""This node's workers as the mesh sees them: started by GO, stopped by a decision or by the fence (A8, A9).

Theory: workers run only between GO of their generation and the moment another generation is adopted or the lease runs
out. Suspicion never stops them. The permit to write checkpoints comes with GO, or, when a member of an earlier world
was lost and may still run (`view.fence`), once every lease of that world has run out.

States: none, running, stopping (until the driver says that they are gone), parked (so are those of the last generation,
but processes of theirs wait at the restart barrier).
Invariants: at most one generation is here at a time; never started without a valid lease; no permit without running
workers; processes are parked only from one restart in place to the next world, and nowhere else.
"""

from typing import Literal

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.effects import Effect, Permit, StartWorkers, StopWorkers
from hyperpodrun.agent.wire.mesh import View

State = Literal["none", "running", "stopping", "parked"]
TABLE: dict[tuple[State, str], State] = {
    ("none", "GO and a lease"): "running",
    ("running", "another generation, HOLD or the end is adopted"): "stopping",
    ("running", "the lease is over"): "stopping",
    ("running", "this incarnation is over"): "stopping",
    ("stopping", "the driver says that they are gone"): "none",
    ("stopping", "it says that they are back at the restart barrier"): "parked",
    ("parked", "GO and a lease"): "running",
    ("parked", "a decision that keeps no processes here"): "stopping",
}
"""(state, what happens) -> state."""


class Works:
    """Times: nanoseconds of the local clock."""

    def __init__(self, config: MeshConfig) -> None:
        self._config = config
        self.state: State = "none"
        self.generation = -1
        self._in_place = False
        self._permitted = False
        self.permit_ns = 0
        """When the fence of the current view is over."""
        self.adopted_ns = 0

    def adopt(self, now: int, view: View, careful: bool) -> None:
        """A new view. `careful`: views before it were missed, or an earlier life adopted it: assume that it has a fence."""
        self.adopted_ns = now
        self.permit_ns = now + (self._config.fence_ns if view.fence or careful else 0)

    @property
    def idle(self) -> bool:
        """Nothing of any generation runs here."""
        return self.state in ("none", "parked")

    def fence_over(self, now: int) -> bool:
        """No worker of an earlier world can run any more, wherever it was lost."""
        return now >= self.permit_ns

    def settled(self, now: int) -> bool:
        """The current view is older than any lease from before it."""
        return now >= self.adopted_ns + self._config.fence_ns

    def start(self, view: View, cause: str) -> list[Effect]:
        """GO and a lease are here."""
        self.state, self.generation, self._permitted = "running", view.generation, False
        return [StartWorkers(view, cause)]

    def permit(self, now: int, view: View) -> list[Effect]:
        """Give the permit when it is due."""
        if self.state != "running" or self._permitted or now < self.permit_ns:
            return []
        self._permitted = True
        return [Permit(view.chain, view.generation)]

    def permit_due(self) -> int | None:
        """When `permit` has something to do."""
        return self.permit_ns if self.state == "running" and not self._permitted else None

    def stop(self, kill: bool, cause: str, in_place: bool = False) -> list[Effect]:
        """Have them stopped, `in_place`: their processes may stay. Again only for more than was asked: to kill, or to end what may
        stay by then."""
        if self.state == "none" or (self.state == "parked" and in_place and not kill):
            return []
        if self.state == "stopping" and not kill and (in_place or not self._in_place):
            return []
        self._in_place = in_place and not kill
        self.state = "stopping"
        return [StopWorkers(self.generation, kill, cause, self._in_place)]

    def gone(self, generation: int, parked: bool = False) -> bool:
        """The driver says that this generation's are gone; True when that ended something. An older word, from before processes
        were asked to end after all, does not count."""
        if self.state != "stopping" or generation < self.generation or (parked and not self._in_place):
            return False
        self.state = "parked" if parked else "none"
        return True

    def reset(self) -> None:
        """Another incarnation: generations of another chain may follow."""
        if self.state == "none":
            self.generation = -1
