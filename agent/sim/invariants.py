"""What must hold after every event, whatever goes wrong (MESH section 6). Sees everything, in true time.

I1 one digest for a place in a chain, but for views that only the dead knew of when all slots agreed to go on without
them (A11). I2 a view's parent is the view before it. I3 never two whole worlds at once; never two that may write
checkpoints (frozen hosts do neither: permits end with the lease, and the first thing after a thaw is to look at it);
the permit is given only when no worker of an older world, of this history or another, runs anywhere. I4 nothing is
decided without a quorum that accepted it, on disk. I5 only members vote, a promise never decreases over the life of a
vote file, no acceptance below it. I6 ranks are 0..n-1, each once, and the map is the one the oracle finds. I9 nobody
who answered the roll call is dropped with fewer than H alerts. I10 a lease says the truth: when it begins, no successor
of its holder's view had been decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperpodrun.agent.mesh.view import digest_of, ranks_of, validate
from hyperpodrun.agent.sim import oracle
from hyperpodrun.agent.wire.mesh import ZERO, AcceptedMsg, Ballot, Promise, Source, View, Vote

if TYPE_CHECKING:
    from hyperpodrun.agent.sim.hosts import Generation, Host
    from hyperpodrun.agent.sim.world import World

Place = tuple[str, int, int]


class Violation(AssertionError):
    """An invariant does not hold. The text names it."""


class Invariants:
    """Called by the world at each event that could break something."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._digests: dict[Place, str] = {}
        self.views: dict[str, View] = {}
        self.decided_at: dict[str, int] = {}
        self._accepted: dict[str, set[str]] = {}
        self._acceptors: dict[str, set[Source]] = {}
        self._votes: dict[tuple[Source, str], Ballot] = {}
        self._order: dict[Generation, tuple[str, ...]] = {}
        self._born: dict[Generation, int] = {}
        self._made: dict[Generation, str] = {}
        self._succeeded: dict[str, int] = {}
        self._started: dict[Generation, str] = {}
        self._known: dict[int, tuple[View, str, frozenset[Source]]] = {}

    def _of(self, view: View) -> tuple[View, str, frozenset[Source]]:
        """A view, its digest and members. Hosts share the object, so each is worked out once."""
        known = self._known.get(id(view))
        if known is None:
            members = frozenset(member.source for member in view.members)
            known = self._known[id(view)] = (view, digest_of(view), members)
        return known

    def persisted(self, host: Host, vote: Vote | None) -> None:
        """A vote file was written."""
        if vote is None:
            return
        source = (host.name, vote.incarnation)
        parent = ""
        if vote.view is not None:
            _, parent, members = self._of(vote.view)
            if source not in members:
                raise Violation(f"I5 {source} votes in view {vote.view.number}, of which it is no member")
        before = self._votes.get((source, parent), ZERO)
        if vote.promised < before:
            raise Violation(f"I5 {source} promised {before} and now {vote.promised}")
        self._votes[(source, parent)] = vote.promised
        if vote.view is not None:
            self.adopted(host, vote.view, parent)  # on disk: it stands there, even if it dies before it says so
        if vote.accepted is not None:
            if vote.accepted.ballot > vote.promised:
                raise Violation(f"I5 {source} accepted {vote.accepted.ballot} above its promise {vote.promised}")
            self._accepted.setdefault(self._of(vote.accepted.view)[1], set()).add(host.name)

    def sent(self, host: Host, message: Promise | AcceptedMsg) -> None:
        """A vote left a host: it must rest on its disk."""
        disk = host.disk
        if disk is None:
            raise Violation(f"I5 {host.name} votes without a vote file")
        parent = self._of(disk.view)[1] if disk.view is not None else ""
        if parent != message.parent and not (disk.view is None and message.ballot.epoch > 0):
            raise Violation(f"I5 {host.name} votes on a successor of {message.parent}, its file is about {parent}")
        if disk.promised < message.ballot:
            raise Violation(f"I5 {host.name} tells a promise of {message.ballot} that is not on disk ({disk.promised})")
        if isinstance(message, Promise) and message.accepted != disk.accepted:
            raise Violation(f"I5 {host.name} tells another acceptance than is on its disk")
        if isinstance(message, AcceptedMsg) and (disk.accepted is None or disk.accepted.ballot < message.ballot):
            raise Violation(f"I5 {host.name} tells an acceptance of {message.ballot} that is not on disk")

    def adopted(self, host: Host, view: View, digest: str) -> None:
        """A host stands at a view. The first to do so is where it was decided."""
        place = (view.chain, view.epoch, view.number)
        known = self._digests.setdefault(place, digest)
        if known != digest and self._lost(known) and self._everyone(self._accepted.get(digest, set())):
            known = self._digests[place] = digest
            self._order.pop((view.chain, view.generation), None)
            self._made.pop((view.chain, view.generation), None)
        if known != digest or digest != self._of(view)[1]:
            raise Violation(f"I1 two views {view.number} of chain {view.chain}")
        if digest in self.views:
            return
        self.views[digest] = view
        self.decided_at[digest] = self._world.now
        self._succeeded.setdefault(view.parent, self._world.now)
        try:
            validate(view)
        except ValueError as error:
            raise Violation(f"I6 view {view.number}: {error}") from error
        config = self._world.config
        accepted = self._accepted.get(digest, set())
        if view.number == 0:
            if not oracle.genesis_quorum(config, accepted):
                raise Violation(f"I4 view 0 formed by {sorted(accepted)}")
        else:
            parent = self.views.get(view.parent)
            if parent is None or (parent.chain, parent.number) != (view.chain, view.number - 1):
                raise Violation(f"I2 view {view.number} has no parent")
            recovered = view.epoch > parent.epoch and self._everyone(accepted)
            if not oracle.quorum(parent, accepted) and not recovered:
                raise Violation(f"I4 view {view.number} decided by {sorted(accepted)} of {[m.node for m in parent.members]}")
            self._map(parent, view)
        if view.mode == "run":
            if not config.min_nodes <= len(view.order) <= config.max_nodes:
                raise Violation(f"I6 a world of {len(view.order)} nodes")
            self._made.setdefault((view.chain, view.generation), digest)
            self._born.setdefault((view.chain, view.generation), self._world.now)
            old = self._order.setdefault((view.chain, view.generation), view.order)
            if old != view.order:
                raise Violation(f"I6 generation {view.generation} has two orders")

    def _lost(self, digest: str) -> bool:
        """Whether nobody who is there, or could come back with its vote file, stands at this view or beyond it."""
        view = self.views[digest]
        stand = [host.disk.view for host in self._world.hosts.values() if host.disk is not None and host.disk.view is not None]
        return not any((v.chain, v.epoch) == (view.chain, view.epoch) and self._descends(v, digest) for v in stand)

    def _descends(self, view: View, digest: str) -> bool:
        here: View | None = view
        while here is not None:
            if digest_of(here) == digest:
                return True
            here = self.views.get(here.parent)
        return False

    def _everyone(self, accepted: set[str]) -> bool:
        """A11: all slots but those certified dead have accepted."""
        hosts = self._world.hosts
        return len(hosts) == self._world.config.slots and all(n in accepted or n in self._world.certified for n in hosts)

    def _map(self, parent: View, view: View) -> None:
        table = oracle.ranks(view)
        for node, ranks in ranks_of(view).items() if view.mode == "run" else ():
            if any(table.get(rank) != node for rank in ranks):
                raise Violation(f"I6 the ranks of {node} are {ranks}, the oracle says {table}")
        if view.mode == "run" and parent.order:
            must = oracle.world_after(self._world.config, parent, view)
            if list(view.order[: len(must)]) != must:
                raise Violation(f"I6 the world is {view.order}, the oracle begins it with {must}")

    def proposed(self, host: Host, view: View, answered: set[Source], counts: dict[str, int], k: int) -> None:
        """A value chosen freely after a roll call (I9)."""
        node = host.node
        if node is None or node.view is None:
            return
        stay = {m.source for m in view.members}
        slots = {m.node: m for m in view.members}
        excused = node.reports.nodes("leaving") | node.reports.nodes("unready")
        excused |= {f.node for f in view.faults if f.rung == "replace" and f.rank != -1 and f.generation == node.view.generation}
        if view.mode != "closed" and any(report.symptoms.final for report in node.reports.of("failed")):
            raise Violation(f"A5 view {view.number} tries again what cannot help")
        for member in node.view.members:
            if member.source in stay or member.source not in answered or member.node in excused:
                continue
            if counts.get(member.node, 0) < (8 * k + 9) // 10 and member.node not in slots:
                raise Violation(f"I9 {member.node} answered the roll call and is dropped in view {view.number}")

    def leased(self, host: Host, until_ns: int) -> None:
        """A host's workers may run until then, by its clock (I10). Clocks that run apart cost a little of the fence's margin."""
        config = self._world.config
        followed = self._succeeded.get(host.node.digest) if host.node is not None else None
        begins = host.true(until_ns - config.lease_ns)
        if followed is not None and begins > followed + (config.fence_ns - config.lease_ns) // 20:
            raise Violation(
                f"I10 the lease of {host.name} begins {(begins - followed) // 1_000_000} ms after its view's successor"
            )

    def started(self, world: Generation, in_place_on: str = "") -> None:
        """Workers of a generation start somewhere: no generation ever means two worlds, not even of a lost view (A11).
        `in_place_on`: there, in processes of an earlier one."""
        made = self._made[world]
        if in_place_on and (self.views[made].restart != "inprocess" or in_place_on in self.views[made].fresh):
            raise Violation(f"A8 {in_place_on} goes on with processes that were to be replaced")
        if self._started.setdefault(world, made) != made:
            raise Violation(f"I3 generation {world[1]} is used a second time")
        self.works_changed()

    def works_changed(self, granted: Generation | None = None) -> None:
        """Workers started, or a permit was given (I3)."""
        running: dict[Generation, set[str]] = {}
        permits: set[Generation] = set()
        for host in self._world.hosts.values():
            if host.works is not None and not host.frozen:
                running.setdefault(host.works, set()).add(host.name)
                if host.permit:
                    permits.add(host.works)
        whole = [w for w, nodes in running.items() if nodes.issuperset(self._order[w])]
        if len(whole) > 1:
            raise Violation(f"I3 two whole worlds run: {whole}")
        if len(permits) > 1:
            raise Violation(f"I3 two worlds may write checkpoints: {sorted(permits)}")
        if granted is not None:
            born = self._born
            older = {w: sorted(nodes) for w, nodes in running.items() if w != granted and born[w] <= born[granted]}
            if older:
                raise Violation(f"I3 {granted} is given the permit while workers of {older} run")
