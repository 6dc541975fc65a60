"""What the next view should take into account (M7): failures, ends, leavers, joiners.

Theory: unlike an alert a report is a fact that only its subject can know, so one is enough. It travels to the first
candidates directly and to all by gossip, and whoever made it repeats it until a view has dealt with it.

States of a report: pending, dealt with (its generation is over, its subject gone, its joiner taken in) and then
forgotten.
Invariants: nothing about generations other than the current one stays; a join not repeated for `join_fresh_ns` is
forgotten.
"""

from collections.abc import Collection, Mapping

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.wire.mesh import Member, Report, ReportKind, Source, View


class Reports:
    """Times: nanoseconds of the local clock. Order of arrival is kept: the first failure is the one told."""

    def __init__(self, config: MeshConfig) -> None:
        self._config = config
        self._table: dict[tuple[ReportKind, Source], tuple[Report, int]] = {}
        self._joins: dict[str, tuple[Member, int, int]] = {}
        self._view: View | None = None
        self._sources: Mapping[str, int] = {}
        self.mine: dict[ReportKind, Report] = {}
        """What this agent has to say and repeat."""

    def adopt(self, view: View, sources: Mapping[str, int]) -> None:
        """Forget what this view has dealt with. `sources`: its members' incarnations."""
        self._view = view
        self._sources = sources
        self._table = {key: entry for key, entry in self._table.items() if self._matters(entry[0])}
        self.mine = {kind: report for kind, report in self.mine.items() if self._matters(report)}
        self._joins = {node: entry for node, entry in self._joins.items() if not self._is_in(entry[0].source)}

    def _is_in(self, source: Source) -> bool:
        node, incarnation = source
        return self._sources.get(node) == incarnation

    def _matters(self, report: Report) -> bool:
        view = self._view
        if view is None or view.mode == "closed":
            return False
        if report.kind == "dead":
            return self._is_in(report.about) or report.about[0] not in self._sources
        if not self._is_in(report.about):
            return False
        if report.kind == "leaving":
            return True
        return report.generation == view.generation and view.mode == "run"

    def apply(self, now: int, report: Report) -> bool:
        """Take in a report; True when it was news."""
        if report.kind == "join":
            member = report.member
            if member is None or self._is_in(member.source):
                return False
            old = self._joins.get(member.node)
            same = old is not None and old[0] == member and now - old[2] <= self.join_fresh_ns
            self._joins[member.node] = (member, old[1] if same and old is not None else now, now)
            return not same
        key = (report.kind, report.about)
        if key in self._table or not self._matters(report):
            return False
        self._table[key] = (report, now)
        return True

    @property
    def join_fresh_ns(self) -> int:
        """A joiner says Hello each hello_ns; 4 of them may be lost."""
        return 5 * self._config.hello_ns

    def of(self, kind: ReportKind) -> tuple[Report, ...]:
        """Pending reports of a kind, in order of arrival."""
        return tuple(report for (k, _), (report, _) in self._table.items() if k == kind)

    def nodes(self, kind: ReportKind) -> frozenset[str]:
        """Whom reports of a kind are about."""
        return frozenset(about[0] for (k, about) in self._table if k == kind)

    def all(self) -> tuple[Report, ...]:
        """Every pending report but joins."""
        return tuple(report for report, _ in self._table.values())

    def joiners(self, now: int, barred: Collection[str] = ()) -> tuple[Member, ...]:
        """Those who ask to be taken in, did so lately and may be (M8), by node."""
        return tuple(
            m for node, (m, _, last) in sorted(self._joins.items()) if now - last <= self.join_fresh_ns and node not in barred
        )

    @property
    def is_empty(self) -> bool:
        """Nothing is pending."""
        return not self._table and not self._joins

    def convene_at(self, now: int, barred: Collection[str] = ()) -> int | None:
        """When pending reports ask for a roll call: facts almost at once, joins after their window."""
        view = self._view
        if view is None or view.mode == "closed":
            return None
        firsts = [first for report, first in self._table.values() if report.kind not in ("finished", "dead")]
        firsts += (first for report, first in self._table.values() if report.kind == "dead" and self._is_in(report.about))
        if view.mode == "run" and view.order and self.nodes("finished").issuperset(view.order):
            firsts.append(max(first for report, first in self._table.values() if report.kind == "finished"))
        at = min(firsts) + self._config.report_quiet_ns if firsts else None
        joiners = self.joiners(now, barred)
        if joiners:
            here = {member.node for member in view.members} | {member.node for member in joiners}
            reborn = any(joiner.node == member.node for joiner in joiners for member in view.members)
            wait = self._config.join_window_ns
            if len(here) >= self._config.slots or view.mode == "hold" or reborn:
                wait = self._config.report_quiet_ns
            join_at = min(self._joins[joiner.node][1] for joiner in joiners) + wait
            at = join_at if at is None else min(at, join_at)
        return at
