"""From a decided generation to running workers (A8): all stopped, then all started.

Theory: a world may start only when no worker of an older one runs on any of its nodes. Each active node says READY to
the node of rank 0 once its own are gone, again and again until it hears GO; the leader says GO once all are ready,
and again to whoever repeats READY. If an earlier world might still run in full (a ghost: none of its nodes has
stopped) and none of the ready nodes is of that world, GO waits until every lease of that world has run out.

States: idle, stopping (workers of older generations still here), ready (they are gone), gone (GO seen).
Invariants: GO only after READY of every active member of exactly this chain and generation.
"""

from typing import Literal

from hyperpodrun.agent.mesh.config import MS, MeshConfig
from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.wire.mesh import Brief, Go, Ready, View

State = Literal["idle", "stopping", "ready", "gone"]
TABLE: dict[tuple[State, str], State] = {
    ("idle", "a generation with me, old workers here"): "stopping",
    ("idle", "a generation with me, none here"): "ready",
    ("stopping", "they are gone"): "ready",
    ("ready", "GO (the leader: all are ready and no ghost is left)"): "gone",
    ("gone", "the next generation, old workers here"): "stopping",
    ("gone", "a view without me in its world"): "idle",
}
"""(state, what happens) -> state."""


class Barrier:
    """One agent's part; `lead` is the leader's. Times: nanoseconds of the local clock."""

    def __init__(self, config: MeshConfig, me: str) -> None:
        self._config = config
        self._me = me
        self.state: State = "idle"
        self._view: View | None = None
        self._ready: set[str] = set()
        self._since_ns = 0
        self._free_ns = 0
        self.due_ns: int | None = None
        self._gap_ns = 0

    def adopt(self, now: int, view: View, fresh: bool, workers_here: bool, free_ns: int) -> None:
        """A new view. `fresh`: its generation is new to us. `free_ns`: when ghosts are gone at the latest."""
        self._free_ns = free_ns
        if view.mode != "run" or self._me not in view.order:
            self.state, self._view, self.due_ns = "idle", view, None
            return
        self._view = view
        if fresh:
            self.state = "stopping" if workers_here else "ready"
            self._ready.clear()
            self._since_ns = now
            self._gap_ns = self._config.resend_ns
            self.due_ns = now

    def reset(self) -> None:
        """No view, no barrier."""
        self.state, self._view, self.due_ns = "idle", None, None

    def workers_gone(self, now: int) -> None:
        """Nothing of an older generation runs here."""
        if self.state == "stopping":
            self.state = "ready"
            self.due_ns = now

    @property
    def leads(self) -> bool:
        """Whether this node's is rank 0's."""
        return self._view is not None and bool(self._view.order) and self._view.order[0] == self._me

    def on_ready(self, now: int, node: str, ready: Ready, brief: Brief) -> list[Effect]:
        """READY of an active member."""
        view = self._view
        if view is None or ready.generation != view.generation or ready.brief.chain != view.chain or node not in view.order:
            return []
        if self.state == "gone":
            return [Send(node, Go(brief, view.generation))]
        self._ready.add(node)
        return []

    def on_go(self, go: Go) -> None:
        """GO from the leader."""
        view = self._view
        if view is not None and self.state == "ready" and (go.generation, go.brief.chain) == (view.generation, view.chain):
            self.state, self.due_ns = "gone", None

    def advance(self, now: int, brief: Brief) -> list[Effect]:
        """Send what is due: READY, or as the leader GO."""
        view = self._view
        if view is None or self.state not in ("ready", "stopping"):
            return []
        if self.state == "stopping":
            self.due_ns = None
            return []
        if not self.leads:
            if self.due_ns is None or now < self.due_ns:
                return []
            self.due_ns = now + self._gap_ns
            self._gap_ns = min(2 * self._gap_ns, 1000 * MS)
            return [Send(view.order[0], Ready(brief, view.generation))]
        self._ready.add(self._me)
        self.due_ns = None
        if not self._ready.issuperset(view.order):
            return []
        if any(not self._ready.intersection(world) for world in view.ghosts) and now < self._free_ns:
            self.due_ns = self._free_ns
            return []
        self.state = "gone"
        return [Send(node, Go(brief, view.generation)) for node in view.order if node != self._me]

    def late_ns(self) -> int | None:
        """When whoever keeps this barrier waiting is too late: after `barrier_ns` for the leader, after twice that for others,
        for then it is the leader who does not act."""
        if self.state not in ("ready", "stopping"):
            return None
        if self.leads:
            return self._since_ns + self._config.barrier_ns
        return self._since_ns + 2 * self._config.barrier_ns if self.state == "ready" else None

    def overdue(self, now: int) -> tuple[str, ...]:
        """Whom to blame; the time starts again."""
        self._since_ns = now
        if self.leads or self._view is None:
            return self.missing()
        return self._view.order[:1]

    def missing(self) -> tuple[str, ...]:
        """Active members that are not ready, as the leader sees it."""
        return tuple(n for n in self._view.order if n not in self._ready) if self._view is not None else ()
