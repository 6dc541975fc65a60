"""The right to run workers (A9): nobody trains on in a view that a quorum may have left.

Theory. A lease is not a promise about the future but a fact about the past: "at time s no successor of a view with me
in it had been decided". Whoever holds such an s may run until s + lease_ns, and whoever decides a view that drops
somebody knows that all its workers are gone fence_ns later. Proof of the fact: a quorum of members was each seen, at
s or later, not to have accepted a successor; a decision needs acceptance by a quorum before it; two quorums share a
member; so the decision came after s.

The first candidates collect the proof, each by a tree over the view's members (`trees`), so that nobody speaks with
more than a few, however large the job:

- Down: in each wave the root makes a stamp (its clock) and grants it to its children, and they at once to theirs.
- Up: a beat carries *evidence*: for a stamp, the members known to have had nothing open (accepted and not decided) at
  some time after they had it. A member adds itself when it beats, and only if nothing is open then; a parent adds what
  its children's beats carry. Who has no children beats at once; others when all their children have echoed the stamp,
  or after a wait that grows with the levels below them, and again when more comes in.
  The root, with evidence of a quorum for one stamp, has its proof: s is that stamp.
- The way of the evidence does not matter. That a member had nothing open at some time after s was true once and stays
  true, whoever carries it, in whatever order it comes, and if it comes twice. That holds within one view: to have
  nothing open in the next says that this one has a successor, so a beat of another view is no evidence.

Dating. A grant tells how old the tree's proof was when the child's last beat came in (less than nothing: so much
later). The beat was sent before it came in; so the child, which knows when it sent it, subtracts the age from that and
dates the proof on its own clock, never too late, and passes it on in the same way to those below. No two clocks are
compared; only their rates matter, at each level for no longer than a lease. A proof stays in its tree: passed around in
circles it would gain a little at each turn.

The proof does not lapse with a view change: a later view that has me in it was decided later still.

Loss. Beats that get no answer are repeated. A parent that is suspected is passed over: its own parent takes the beats.
Until then the other trees renew the lease, and if all are broken it lasts for several waves more.

States: none (no proof yet), held (now < anchor + lease_ns), expired (fence).
Invariants: `anchor_ns` never decreases; a beat with something open adds nothing of its sender, one of another view
nothing at all; in an idle job a member sends each tree one beat a wave, and a parent each child one grant.
"""

from collections.abc import Iterable

import msgspec

from hyperpodrun.agent.mesh.config import MS, MeshConfig
from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.mesh.quorum import is_quorum
from hyperpodrun.agent.mesh.trees import TREES, way_up
from hyperpodrun.agent.wire.mesh import Beat, Brief, Grant, View

QUICK_NS = 200 * MS
"""Without a fresh lease, or an answer in this view, ask again after this long."""
GATHER_NS = 100 * MS
"""For each level below, a parent waits so long for children that have not echoed the newest stamp."""
STAMPS = 4
"""Evidence for so many of the newest stamps is kept: older ones prove too little."""


class Child(msgspec.Struct, frozen=True):
    """The last beat of somebody below: when it was sent (its clock) and came in (mine), the newest stamp it echoes."""

    sent_ns: int
    came_ns: int
    echo: int


class Tree:
    """My place in one root's tree, in this view. Members are bits, by their place in the view."""

    def __init__(self, above: tuple[str, ...], levels: int, now: int) -> None:
        self.above = above
        self.levels = levels
        self.children: dict[str, Child] = {}
        self.stamp = 0
        self.seen: dict[int, int] = {}
        self.proof_ns: int | None = None
        self.gap_ns = QUICK_NS
        self.ask_ns = now
        """A beat that wants an answer is due, at the root a new stamp."""
        self.tell_ns: int | None = None
        """Evidence that was not passed on yet is due."""

    @property
    def due_ns(self) -> int:
        """When something is to be sent."""
        return self.ask_ns if self.tell_ns is None else min(self.ask_ns, self.tell_ns)

    def add(self, evidence: Iterable[tuple[int, int]]) -> bool:
        """Take in evidence; whether any of it is news."""
        news = False
        for stamp, bits in evidence:
            known = self.seen.get(stamp, 0)
            if bits & ~known:
                self.seen[stamp] = known | bits
                news = True
        for old in sorted(self.seen)[:-STAMPS]:
            del self.seen[old]
        return news

    def evidence(self) -> tuple[tuple[int, bytes], ...]:
        """All of it, the newest first: each member with the newest stamp it is known to have echoed."""
        told: list[tuple[int, bytes]] = []
        newer = 0
        for stamp in sorted(self.seen, reverse=True):
            if bits := self.seen[stamp] & ~newer:
                told.append((stamp, bits.to_bytes((bits.bit_length() + 7) // 8, "little")))
            newer |= self.seen[stamp]
        return tuple(told)

    def tell_soon(self, now: int) -> None:
        """There is evidence to pass on: at once if no child can add to it, else when they had time to."""
        waits = any(child.echo < self.stamp for child in self.children.values())
        at = now + self.levels * GATHER_NS if waits else now
        self.tell_ns = at if self.tell_ns is None else min(at, self.tell_ns)


class Lease:
    """The lease of one agent, and its part in those of others. Times: nanoseconds of the local clock."""

    def __init__(self, config: MeshConfig, me: str) -> None:
        self._config = config
        self._me = me
        self._view: View | None = None
        self._digest = ""
        self._order: tuple[str, ...] = ()
        self._mine = 0
        self._wave_ns = config.beat_ns
        self._shift_ns = 0
        self._trees: dict[str, Tree] = {}
        self.anchor_ns: int | None = None
        self.due_ns = 0

    def adopt(self, now: int, view: View, digest: str, order: tuple[str, ...]) -> None:
        """A new view, its members in the order of candidates: old evidence is about the old one. Beat at once."""
        config = self._config
        self._view, self._digest, self._order = view, digest, order
        self._mine = 1 << [member.node for member in view.members].index(self._me)
        few = 2 * (len(order) - 1) <= config.lease_fan
        # A root with few children can speak with them each second; none of many may need more messages than heartbeats leave.
        self._wave_ns = min(config.beat_ns, config.lease_ns // 5) if few else config.lease_ns // 5
        # The roots take turns, so that no lease gets as old as two waves; on heartbeats, so that nobody wakes up for it.
        self._shift_ns = order.index(self._me) % TREES * (self._wave_ns // TREES // config.heartbeat_ns * config.heartbeat_ns)
        self._trees.clear()
        self.due_ns = now

    def reset(self) -> None:
        """A new incarnation starts with nothing."""
        self._view = None
        self._trees.clear()
        self.anchor_ns = None

    def until_ns(self) -> int | None:
        """Workers may run until then; None: not at all."""
        return None if self.anchor_ns is None else self.anchor_ns + self._config.lease_ns

    def valid(self, now: int) -> bool:
        """Whether workers may run now."""
        return self.anchor_ns is not None and now < self.anchor_ns + self._config.lease_ns

    def _fresh(self, now: int, at: int | None) -> bool:
        """Recent enough that nothing needs to be hurried."""
        return at is not None and now - at < self._config.lease_ns // 2

    def tick(self, now: int, trusted: tuple[str, ...], brief: Brief, is_open: bool) -> list[Effect]:
        """Send what is due. `trusted`: the candidates that nobody suspects, in their order; the first of them collect."""
        if self._view is None:
            return []
        effects: list[Effect] = []
        roots = trusted[:TREES]
        lost = set(self._order).difference(trusted) if len(trusted) < len(self._order) else ()
        for root in roots:
            self._tree(now, root)
        for root, tree in tuple(self._trees.items()):
            late = [node for node, child in tree.children.items() if now - child.came_ns > 3 * self._wave_ns]
            for node in late:
                del tree.children[node]
            if root not in roots and not tree.children:
                del self._trees[root]
            elif now < tree.due_ns:
                continue
            elif root == self._me:
                effects += self._stamp(now, tree, is_open)
            else:
                to = next((node for node in tree.above if node not in lost), root)
                effects.append(Send(to, self._beat(now, root, tree, brief, is_open)))
        self._next(now)
        return effects

    def _next(self, now: int) -> None:
        self.due_ns = min((tree.due_ns for tree in self._trees.values()), default=now + self._wave_ns)

    def _tree(self, now: int, root: str) -> Tree:
        tree = self._trees.get(root)
        if tree is None:
            tree = self._trees[root] = Tree(*way_up(self._order, root, self._me, self._config.lease_fan), now)
            self.due_ns = now
        return tree

    def _stamp(self, now: int, tree: Tree, is_open: bool) -> list[Effect]:
        """The root begins a wave."""
        tree.ask_ns = self._config.next_round_ns(now - self._shift_ns, self._wave_ns) + self._shift_ns
        tree.stamp = now
        self._prove(now, tree, is_open)
        return self._grants(now, self._me, tree)

    def _beat(self, now: int, root: str, tree: Tree, brief: Brief, is_open: bool) -> Beat:
        if tree.stamp and not is_open:
            tree.add(((tree.stamp, self._mine),))
        asks = now >= tree.ask_ns
        if asks:
            tree.ask_ns = now + (tree.gap_ns if self._fresh(now, self.anchor_ns) else QUICK_NS)
            tree.gap_ns = min(2 * tree.gap_ns, 2 * self._wave_ns)
        tree.tell_ns = None
        return Beat(brief, root, now, tree.evidence(), asks)

    def on_beat(self, now: int, node: str, beat: Beat, is_open: bool) -> list[Effect]:
        """Somebody below: take in its evidence, answer if it asks; a first proof also answers those who had to wait."""
        if self._view is None or beat.brief.digest != self._digest or beat.root not in self._order:
            return []
        tree = self._tree(now, beat.root)
        echo = max((stamp for stamp, _ in beat.evidence), default=0)
        tree.children[node] = Child(beat.sent_ns, now, echo)
        news = tree.add((stamp, int.from_bytes(bits, "little")) for stamp, bits in beat.evidence)
        if beat.root == self._me:
            if self._prove(now, tree, is_open):
                return self._grants(now, beat.root, tree)
        elif news:
            tree.tell_soon(now)
            self._next(now)
        return [self._grant(now, beat.root, tree, node)] if beat.asks else []

    def on_grant(self, now: int, grant: Grant) -> list[Effect]:
        """Somebody above: what it tells goes on to those below."""
        tree = self._trees.get(grant.root)
        if grant.view != self._digest or tree is None or grant.root == self._me:
            return []
        first = grant.age_ns is not None and self._date(now, tree, grant.sent_ns - grant.age_ns)
        tree.gap_ns = 2 * self._wave_ns
        tree.ask_ns = now + (tree.gap_ns if self._fresh(now, self.anchor_ns) else QUICK_NS)
        is_new = grant.stamp > tree.stamp
        if is_new:
            tree.stamp = grant.stamp
            tree.tell_soon(now)
        self._next(now)
        return self._grants(now, grant.root, tree) if is_new or first else []

    def _grants(self, now: int, root: str, tree: Tree) -> list[Effect]:
        return [self._grant(now, root, tree, node) for node in tree.children]

    def _grant(self, now: int, root: str, tree: Tree, node: str) -> Effect:
        child = tree.children[node]
        lease_ns = self._config.lease_ns
        known = tree.proof_ns is not None and now - tree.proof_ns < lease_ns and now - child.came_ns < lease_ns
        age = child.came_ns - tree.proof_ns if known and tree.proof_ns is not None else None
        return Send(node, Grant(self._digest, root, child.sent_ns, tree.stamp, age))

    def _date(self, now: int, tree: Tree, proof_ns: int) -> bool:
        """The tree has this proof; whether those below wait for it."""
        had = self._fresh(now, tree.proof_ns)
        tree.proof_ns = proof_ns if tree.proof_ns is None else max(tree.proof_ns, proof_ns)
        self.anchor_ns = tree.proof_ns if self.anchor_ns is None else max(self.anchor_ns, tree.proof_ns)
        return not had and self._fresh(now, tree.proof_ns)

    def _prove(self, now: int, tree: Tree, is_open: bool) -> bool:
        """The root looks for the newest stamp with a quorum, itself seen now; whether those below wait for it."""
        view = self._view
        if view is None or not tree.stamp:
            return False
        if not is_open:
            tree.add(((tree.stamp, self._mine),))
        bits = 0
        for stamp in sorted(tree.seen, reverse=True):
            bits |= tree.seen[stamp]
            if 2 * bits.bit_count() >= len(view.members):
                nodes = {member.node for place, member in enumerate(view.members) if bits >> place & 1}
                if is_quorum(view, nodes, True):
                    return self._date(now, tree, stamp)
        return False
