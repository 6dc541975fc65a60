"""The right to run workers (A9): nobody trains on in a view that a quorum may have left.

Theory. A lease is not a promise about the future but a fact about the past: "at time s no successor of a view with me
in it had been decided". Whoever holds such an s may run until s + lease_ns, and whoever decides a view that drops
somebody knows that all its workers are gone fence_ns later. Proof of the fact: a quorum of members was each seen, at
s or later, not to have accepted a successor; a decision needs acceptance by a quorum before it; two quorums share a
member; so the decision came after s.

The three first candidates collect it. A member's beat echoes the newest stamp (candidate's clock) it saw from that
candidate, which proves that the beat was sent after the stamp; a beat that says `open` (I accepted something
undecided) proves nothing. The candidate answers with the age of its proof, and the member, which knows when it sent
the beat, dates the proof on its own clock, on the safe side. No two clocks are compared; only their rates matter,
over one lease.

The proof does not lapse with a view change: a later view that has me in it was decided later still.

States: none (no proof yet), held (now < anchor + lease_ns), expired (fence).
Invariants: `anchor_ns` never decreases; a beat with `open` or of another view never becomes evidence.
"""

from hyperpodrun.agent.mesh.config import MS, MeshConfig
from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.mesh.quorum import is_quorum
from hyperpodrun.agent.wire.mesh import Beat, Brief, Grant, View


class Lease:
    """Both ends of the lease of one agent. Times: nanoseconds of the local clock."""

    def __init__(self, config: MeshConfig, me: str) -> None:
        self._config = config
        self._me = me
        self._view: View | None = None
        self._digest = ""
        self.anchor_ns: int | None = None
        self._stamps: dict[str, int] = {}
        self._evidence: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._proof_ns: int | None = None
        self._computed_ns = -1
        self.beat_due_ns = 0

    def adopt(self, now: int, view: View, digest: str) -> None:
        """A new view: old evidence is about the old one. Beat at once."""
        self._view, self._digest = view, digest
        self._stamps.clear()
        self._evidence.clear()
        self._waiting.clear()
        self._proof_ns = None
        self._computed_ns = -1
        self.beat_due_ns = now

    def reset(self) -> None:
        """A new incarnation starts with nothing."""
        self._view = None
        self.anchor_ns = None

    def until_ns(self) -> int | None:
        """Workers may run until then; None: not at all."""
        return None if self.anchor_ns is None else self.anchor_ns + self._config.lease_ns

    def valid(self, now: int) -> bool:
        """Whether workers may run now."""
        return self.anchor_ns is not None and now < self.anchor_ns + self._config.lease_ns

    def beats(self, now: int, to: tuple[str, ...], brief: Brief, is_open: bool) -> list[Effect]:
        """Send the beats that are due. Quick ones while there is no fresh lease."""
        fresh = self.anchor_ns is not None and now - self.anchor_ns < self._config.lease_ns // 2
        self.beat_due_ns = self._config.next_round_ns(now, self._config.beat_ns) if fresh else now + 200 * MS
        self._prove(now, is_open)
        return [Send(node, Beat(brief, now, self._stamps.get(node, 0), is_open)) for node in to if node != self._me]

    def on_beat(self, now: int, node: str, beat: Beat, is_open: bool) -> list[Effect]:
        """A member asks: take its echo as evidence, answer; the first proof also answers those who had to wait."""
        if beat.brief.digest != self._digest or self._view is None:
            return []
        if beat.echo and not beat.open:
            self._evidence[node] = max(beat.echo, self._evidence.get(node, 0))
        had = self._proof_ns is not None
        self._prove(now, is_open)
        self._waiting[node] = beat.sent_ns
        if had or self._proof_ns is None:
            return self._grants(now, (node,))
        return self._grants(now, tuple(sorted(self._waiting)))

    def _grants(self, now: int, nodes: tuple[str, ...]) -> list[Effect]:
        age = None if self._proof_ns is None else now - self._proof_ns
        return [Send(node, Grant(self._digest, self._waiting[node], now, age)) for node in nodes]

    def on_grant(self, now: int, node: str, grant: Grant) -> bool:
        """An answer; True when a beat should follow at once (its stamp is the evidence others wait for)."""
        if grant.view != self._digest:
            return False
        first = node not in self._stamps
        self._stamps[node] = max(grant.stamp, self._stamps.get(node, 0))
        if grant.age_ns is not None:
            self._dated(grant.sent_ns - grant.age_ns)
        return first

    def _dated(self, anchor_ns: int) -> None:
        self.anchor_ns = anchor_ns if self.anchor_ns is None else max(self.anchor_ns, anchor_ns)

    def _prove(self, now: int, is_open: bool) -> None:
        """The latest s for which a quorum (I myself count as seen now, unless open) had accepted nothing."""
        view = self._view
        if view is None or (self._proof_ns is not None and now - self._computed_ns < len(view.members) * MS // 10):
            return
        self._computed_ns = now
        seen: list[tuple[int, str]] = [] if is_open else [(now, self._me)]
        seen += ((stamp, node) for node, stamp in self._evidence.items() if node != self._me)
        if 2 * len(seen) < len(view.members):
            return
        seen.sort(reverse=True)
        nodes: set[str] = set()
        for stamp, node in seen:
            nodes.add(node)
            if 2 * len(nodes) >= len(view.members) and is_quorum(view, nodes, True):
                self._proof_ns = stamp if self._proof_ns is None else max(self._proof_ns, stamp)
                self._dated(self._proof_ns)
                return
