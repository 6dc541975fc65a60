"""One agent's mesh: composes the cores; events and messages in, effects out.

Theory: MESH.md. Everything that happens comes through one of three doors (`receive`, `tick`, `notify`), each with the local time, and each
answers with effects to be carried out in order. Between calls only `next_deadline` passes. The same sequence of calls gives the same effects.

States: joining (no view), settled (has one), ended (the job is closed, or this agent has left).
Invariants (`validate`): those of the parts; a settled agent is a member of its view; workers run only of the view's generation, while stopping also
of earlier ones.
"""

import random
from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from hyperpodrun.agent.mesh.agreement import Agreement
from hyperpodrun.agent.mesh.alerts import Alerts
from hyperpodrun.agent.mesh.barrier import Barrier
from hyperpodrun.agent.mesh.bootstrap import Bootstrap
from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.detector import Detector
from hyperpodrun.agent.mesh.effects import (
    Adopt,
    Connected,
    ConnectionLost,
    Effect,
    Effects,
    End,
    Event,
    LeaveAsked,
    Persist,
    RestartAsked,
    Send,
    WorkersFailed,
    WorkersFinished,
    WorkersGone,
)
from hyperpodrun.agent.mesh.effects import Lease as LeaseEffect
from hyperpodrun.agent.mesh.gossip import Gossip
from hyperpodrun.agent.mesh.history import History, follows, holds, linked
from hyperpodrun.agent.mesh.lease import Lease
from hyperpodrun.agent.mesh.quorum import is_genesis_quorum, is_quorum
from hyperpodrun.agent.mesh.reports import Reports
from hyperpodrun.agent.mesh.rings import Rings, rings
from hyperpodrun.agent.mesh.succession import RollCall, genesis, successor
from hyperpodrun.agent.mesh.view import brief_of, candidates, digest_of, member_of
from hyperpodrun.agent.mesh.works import Works
from hyperpodrun.agent.wire.mesh import (
    NOWHERE,
    Accept,
    AcceptedMsg,
    Ack,
    Alert,
    Beat,
    Brief,
    Chain,
    Decided,
    Go,
    Grant,
    Heartbeat,
    Hello,
    Item,
    Member,
    Message,
    Nack,
    Prepare,
    Probe,
    Promise,
    Pull,
    Ready,
    Report,
    ReportKind,
    Reports as ReportsMsg,
    Source,
    View,
    Vote,
    Welcome,
)

DIRECT = 3
"""How many candidates are told directly (M7) and grant leases (A9)."""
NEVER = 1 << 62


class Node:
    """`me.incarnation` is replaced by the vote file's where there is one. `seed`: of this agent's own random numbers."""

    def __init__(self, config: MeshConfig, me: Member, seed: int, now: int, vote: Vote | None = None) -> None:
        self._config = config
        self._rng = random.Random(seed)
        incarnation = vote.incarnation if vote is not None else me.incarnation
        self._me = msgspec.structs.replace(me, incarnation=incarnation)
        self._history = History()
        self._story: deque[tuple[int, str, str]] = deque(maxlen=256)
        self._causes = 0
        self.view: View | None = None
        self.digest = ""
        self._sources: dict[str, int] = {}
        self._rings: Rings = rings((), config.rings)
        self._order: tuple[str, ...] = ()
        self._brief = NOWHERE
        self.ended = False
        self._leaving = False
        self._leave_by_ns: int | None = None
        self._heartbeat_ns = now
        self._repeat_ns = now
        self._repeat_gap_ns = config.hello_ns
        self._alert_seq = 0
        self._unanswered: dict[str, tuple[int, int]] = {}
        self._lagging: dict[str, int] = {}
        self._acked: dict[Source, int] = {}
        self._proposed_ns = now
        self._told_ns: dict[str, int] = {}
        self._pull_ns = 0
        self._knock = 0
        self._until_ns: int | None = None
        self._convene_ns: int | None = None
        self._due = now
        self.works = Works(config)
        self.detector = Detector(config)
        self.gossip = Gossip()
        self.alerts = Alerts("", self._rings)
        self.reports = Reports(config)
        self.lease = Lease(config, me.node)
        self.barrier = Barrier(config, me.node)
        self.bootstrap = Bootstrap(config, me.node, self._rng, now)
        self.agreement = Agreement(config, self._me.source, self, self._rng)
        self._first: list[Effect] = []
        if vote is not None and vote.view is not None:
            self._settle(now, vote.view, digest_of(vote.view), vote, True)
            if vote.view.mode == "run" and me.node in vote.view.order:
                self._say(now, "restart", f"the agent of {me.node} was restarted")
        else:
            self.agreement.begin(now, None, "", vote)
            self._first.append(Persist(self.agreement.vote()))

    # --- doors

    def next_deadline(self) -> int:
        """When `tick` is to be called at the latest."""
        return self._due

    def tick(self, now: int) -> Effects:
        """Time has passed."""
        effects, self._first = self._first, []
        if not self.ended or self.view is not None:
            effects += self._timers(now)
        return self._finish(now, effects)

    def receive(self, now: int, source: Source, message: Message) -> Effects:
        """A message of the agent that the transport knows as `source`."""
        node = source[0]
        if self._sources.get(node) == source[1]:
            back = self.detector.heard(now, node)
            if (
                type(message) is Heartbeat and message.brief.digest == self.digest and not message.items and not back
                and node not in self._lagging
            ):  # fmt: skip
                return ()
        effects: list[Effect] = []
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            effects += handler(self, now, source, message)
        return self._finish(now, effects)

    def notify(self, now: int, event: Event) -> Effects:
        """Something happened on this host."""
        return self._finish(now, self._event(now, event))

    # --- what the agreement asks (Council)

    def me(self) -> Member:
        """This agent's record."""
        return self._me

    def brief(self) -> Brief:
        """Where this agent stands."""
        return self._brief

    def is_quorum(self, nodes: Collection[str], spent: Collection[str]) -> bool:
        """A1, or A10 for view 0."""
        if self.view is None:
            return is_genesis_quorum(self._config, nodes)
        return is_quorum(self.view, nodes, self.view.tiebreak not in spent)

    def electorate(self) -> tuple[str, ...]:
        """All members, suspects too (A4); for view 0 everyone present."""
        if self.view is not None:
            return tuple(member.node for member in self.view.members)
        return tuple(member.node for member in self.bootstrap.present(self._proposed_ns))

    def awaited(self, answered: Collection[str]) -> bool:
        """Somebody who should answer has not."""
        suspects = self.alerts.suspects()
        if any(node not in answered and node not in suspects for node in self.electorate()):
            return True
        return any(j.source not in self._acked for j in self.reports.joiners(self._proposed_ns))

    def choose(self, now: int, promises: Mapping[str, Promise]) -> View | None:
        """A5."""
        view = self.view
        if view is None:
            members = tuple(promise.me for _, promise in sorted(promises.items()))
            return genesis(self._config, members, f"{self._rng.getrandbits(64):016x}")
        self.alerts.settle(now)
        reports = self.reports
        roll = RollCall(
            answered=frozenset(promises),
            accused=frozenset(self.alerts.suspects()),
            convicted=self.alerts.certain(now, self._config.one_way_ns) | self._mute(now, promises),
            unready=reports.nodes("unready"), leaving=reports.nodes("leaving"), finished=reports.nodes("finished"),
            joiners=tuple(j for j in reports.joiners(now) if j.source in self._acked),
            failures=reports.of("failed"), restarts=reports.of("restart"),
            started=self.barrier.state == "gone", fence_over=self.works.fence_over(now), settled=self.works.settled(now),
        )  # fmt: skip
        return successor(self._config, view, self.digest, roll)

    def _mute(self, now: int, promises: Mapping[str, Promise]) -> frozenset[str]:
        """Members that have answered none of this proposer's roll calls for long, though nobody accuses them."""
        for node in self.electorate():
            if node in promises:
                self._unanswered.pop(node, None)
                continue
            since, last = self._unanswered.get(node, (now, now))
            if now - last > 2 * self._config.backoff_cap_ns:
                since = now
            self._unanswered[node] = (since, now)
        long_ns = self._config.one_way_ns
        return frozenset(node for node, (since, _) in self._unanswered.items() if now - since >= long_ns)

    def testimony(self) -> tuple[Item, ...]:
        """My own alerts and all pending reports."""
        mine = (alert for alert in self.alerts.standing() if alert.observer == self._me.node)
        return (*mine, *self.reports.all())

    # --- time

    def _timers(self, now: int) -> list[Effect]:
        effects: list[Effect] = []
        view = self.view
        if view is None:
            if self.works.state == "none" and now >= self.bootstrap.due_ns:
                effects += self.bootstrap.hellos(now, self._brief, self._me)
        else:
            if now >= self._heartbeat_ns:
                effects += self._round(now)
            if (due := self.detector.loud_due()) is not None and now >= due:
                effects += self.detector.loud(now, Probe(self._brief))
            if now >= self.lease.beat_due_ns:
                effects += self.lease.beats(now, self._order_of_trust()[:DIRECT], self._brief, self.agreement.open)
            if now >= self._repeat_ns:
                self._repeat_ns = now + self._repeat_gap_ns
                self._repeat_gap_ns = min(2 * self._repeat_gap_ns, 5 * self._config.beat_ns)
                effects += self._tell(tuple(self.reports.mine.values()))
            if (late := self.barrier.late_ns()) is not None and now >= late:
                for node in self.barrier.missing():
                    self._accuse_unready(now, node)
            if self.works.state == "running" and not self.lease.valid(now):
                effects += self._fence(now)
            if self._leave_by_ns is not None and now >= self._leave_by_ns:
                effects += self._end(now, 0, "left without waiting for the others' word")
        return effects + self.agreement.tick(now)

    def _round(self, now: int) -> list[Effect]:
        """A heartbeat round: heartbeats to my observers, questions to the silent, a knock at a lost slot."""
        self._heartbeat_ns = now + self._config.heartbeat_ns
        self._brief = self._brief_now(now)
        beat = Heartbeat(self._brief, self.gossip.take())
        effects: list[Effect] = [Send(node, beat) for node in self._rings.observers.get(self._me.node, ())]
        effects += self.detector.round(now, Probe(self._brief))
        for node, since in sorted(self._lagging.items()):
            if now - since >= self._config.one_way_ns:
                self._lagging[node] = NEVER
                effects += self._raise(now, node, True, False)
        self._knock += 1
        if self._knock % 4 == 0:
            lost = [n for n in self.bootstrap.slots() if n not in self._sources]
            if lost:
                effects.append(Send(lost[self._knock // 4 % len(lost)], Hello(self._brief, self._me, True)))
        return effects

    def _brief_now(self, now: int) -> Brief:
        if self.view is None:
            return NOWHERE
        live = self.view.mode == "run" and self.works.state == "running" and self.lease.valid(now)
        return brief_of(self.view, self.digest, live)

    def _finish(self, now: int, effects: list[Effect]) -> Effects:
        """What follows from whatever was just done; at the end of every door."""
        for subject, down, loud in self.detector.verdicts():
            effects += self._raise(now, subject, down, loud)
        if self.view is not None or not self.ended:
            effects += self._convene(now)
        if self.agreement.decision is not None:
            effects += self._decided(now)
        view = self.view
        if view is not None and not self.ended:
            effects += self.barrier.advance(now, self._brief)
            if (
                self.barrier.state == "gone" and self.works.state == "none" and self.works.generation < view.generation
                and self.lease.valid(now) and not self._leaving
            ):  # fmt: skip
                effects += self.works.start(view, self._cause(now, f"start generation {view.generation}"))
            effects += self.works.permit(now, view)
            until = self.lease.until_ns()
            if until is not None and until != self._until_ns and self.works.state == "running":
                self._until_ns = until
                effects.append(LeaseEffect(until))
        self._due = self._next(now)
        return tuple(effects)

    def _next(self, now: int) -> int:
        view = self.view
        dues: list[int | None] = [self.agreement.due_ns(), self._convene_ns]
        if self._first:
            return now
        if view is None:
            if self.works.state == "none" and not self.ended:
                dues.append(self.bootstrap.due_ns)
        else:
            dues += (
                self._heartbeat_ns, self.detector.loud_due(), self.lease.beat_due_ns, self._repeat_ns, self.barrier.due_ns,
                self.barrier.late_ns(), self.works.permit_due(), self._leave_by_ns,
            )  # fmt: skip
            if self.works.state == "running":
                dues.append(self.lease.until_ns())
        return min((due for due in dues if due is not None), default=NEVER)

    # --- calling a roll call (A3)

    def _convene(self, now: int) -> list[Effect]:
        """Propose when it is time and this agent's turn."""
        self._convene_ns = None
        if self.agreement.phase != "idle" or self.agreement.decision is not None or self.ended:
            return []
        at = self._turn_at(now)
        if at is None:
            return []
        at = max(at, self.agreement.not_before_ns)
        if at > now:
            self._convene_ns = at
            return []
        self._proposed_ns = now
        self._acked.clear()
        effects: list[Effect] = []
        if self.view is not None:
            effects += (Send(j.node, Probe(self._brief)) for j in self.reports.joiners(now))
        return effects + self.agreement.propose(now)

    def _turn_at(self, now: int) -> int | None:
        if self.view is None:
            return self.bootstrap.form_at(now) if self.works.state == "none" else None
        config = self._config
        self.alerts.settle(now)
        ats = [self.reports.convene_at(now)]
        if self.alerts.first_ns is not None:
            ats.append(min(self.alerts.first_ns + config.quiet_cap_ns, self.alerts.last_ns + config.quiet_ns))
        if self.agreement.open:
            ats.append(self.agreement.accepted_ns + config.open_ns)
        ready = [at for at in ats if at is not None]
        if not ready or self.view.mode == "closed":
            return None
        order = self._order_of_trust()
        turn = order.index(self._me.node) if self._me.node in order else len(order)
        return min(ready) + turn * config.stagger_ns

    def _order_of_trust(self) -> tuple[str, ...]:
        """Candidates nobody suspects, in this view's order."""
        out = {*self.alerts.suspects(), *self.detector.down, *self.reports.nodes("leaving")}
        return tuple(node for node in self._order if node not in out) if out else self._order

    # --- alerts and reports

    def _raise(self, now: int, subject: str, down: bool, loud: bool) -> list[Effect]:
        """Accuse a member, or take it back."""
        self._alert_seq = max(self._alert_seq + 1, now // 1_000_000)
        alert = Alert(self.digest, self._me.node, subject, self._alert_seq, down, loud)
        self._note(now, f"{'accuses' if down else 'hears'} {subject} {'again' if not down else 'loudly' if loud else ''}")
        if not self.alerts.apply(now, alert):
            return []
        return self._tell((alert,))

    def _say(self, now: int, kind: ReportKind, detail: str, code: int = 0) -> list[Effect]:
        """Make a report of this agent's own, to be repeated until dealt with."""
        if self.view is None:
            return []
        report = Report(kind, self._me.source, self.view.generation, code, detail)
        self.reports.mine[kind] = report
        self._repeat_gap_ns = self._config.hello_ns
        self._repeat_ns = now + self._repeat_gap_ns
        self.reports.apply(now, report)
        self._note(now, f"{kind}: {detail}")
        return self._tell((report,))

    def _accuse_unready(self, now: int, node: str) -> None:
        if self.view is not None and (member := member_of(self.view, node)) is not None:
            self.reports.apply(now, Report("unready", member.source, self.view.generation, 0, "not at the barrier in time"))

    def _tell(self, items: tuple[Item, ...]) -> list[Effect]:
        """To the first candidates directly, to all by and by (M7)."""
        if not items:
            return []
        for item in items:
            self.gossip.put(item)
        message = ReportsMsg(self._brief, items)
        return [Send(node, message) for node in self._order_of_trust()[:DIRECT] if node != self._me.node]

    def _items(self, now: int, items: tuple[Item, ...]) -> list[Effect]:
        effects: list[Effect] = []
        for item in items:
            if isinstance(item, Alert):
                if self.alerts.apply(now, item):
                    self.gossip.put(item)
                    if item.down and item.subject == self._me.node:
                        self.detector.refuted()
                        effects.append(Send(item.observer, Ack(self._brief)))
            elif self.reports.apply(now, item) and item.kind != "join":
                self.gossip.put(item)
        return effects

    # --- messages

    def _compare(self, now: int, source: Source, brief: Brief) -> list[Effect]:
        """Who is behind: I pull, or they are told (M6)."""
        view = self.view
        node = source[0]
        if view is None:
            if brief.chain:
                self.bootstrap.overheard(now, node)
            return []
        if brief.chain != view.chain:
            return self._other_chain(now, node, brief) if brief.chain else []
        if brief.number == view.number:
            return self._raise(now, node, False, False) if self._lagging.pop(node, 0) == NEVER else []
        if brief.number > view.number:
            if now < self._pull_ns:
                return []
            self._pull_ns = now + self._config.resend_ns // 2
            return [Send(node, Pull(view.chain, view.number))]
        if self._sources.get(node) == source[1]:
            self._lagging.setdefault(node, now)
        return self._tell_behind(now, node, brief.number)

    def _tell_behind(self, now: int, node: str, number: int) -> list[Effect]:
        if now < self._told_ns.get(node, 0):
            return []
        self._told_ns[node] = now + self._config.resend_ns
        return [Send(node, Chain(self._history.after(number)))]

    def _other_chain(self, now: int, node: str, theirs: Brief) -> list[Effect]:
        """Two histories of one job met: somebody forgot (A10). The one whose world does not run gives way."""
        view = self.view
        if view is None or self._brief_now(now).live or view.mode == "closed":
            if now < self._told_ns.get(node, 0):
                return []
            self._told_ns[node] = now + self._config.resend_ns
            return [Send(node, Ack(self._brief))]
        if theirs.live or (view.mode == "hold" and theirs.chain < view.chain):
            return self._rejoin(now, f"the job runs in another history ({theirs.chain})")
        return []

    def _on_heartbeat(self, now: int, source: Source, message: Heartbeat) -> list[Effect]:
        return self._compare(now, source, message.brief) + self._items(now, message.items)

    def _on_probe(self, now: int, source: Source, message: Probe) -> list[Effect]:
        return [Send(source[0], Ack(self._brief)), *self._compare(now, source, message.brief)]

    def _on_ack(self, now: int, source: Source, message: Ack) -> list[Effect]:
        self._acked[source] = now
        return self._compare(now, source, message.brief)

    def _on_reports(self, now: int, source: Source, message: ReportsMsg) -> list[Effect]:
        return self._compare(now, source, message.brief) + self._items(now, message.items)

    def _votes(self, source: Source, parent: str) -> bool:
        """Whether a message of the agreement concerns the decision this agent takes part in, from somebody who does too."""
        if parent != self.agreement.parent or self.ended:
            return False
        return self.view is None or self._sources.get(source[0]) == source[1]

    def _on_prepare(self, now: int, source: Source, message: Prepare) -> list[Effect]:
        if self._votes(source, message.parent):
            if self.view is None and (self.works.state != "none" or self.bootstrap.knows_view(now)):
                return []
            return self.agreement.on_prepare(now, source, message)
        if self.view is not None and not message.parent:
            return self._tell_behind(now, source[0], -1)
        return self._compare(now, source, message.brief)

    def _on_promise(self, now: int, source: Source, message: Promise) -> list[Effect]:
        if not self._votes(source, message.parent):
            return []
        return self._items(now, message.items) + self.agreement.on_promise(now, source, message)

    def _on_nack(self, now: int, source: Source, message: Nack) -> list[Effect]:
        return self.agreement.on_nack(now, message) if self._votes(source, message.parent) else []

    def _on_accept(self, now: int, source: Source, message: Accept) -> list[Effect]:
        return self.agreement.on_accept(now, source, message) if self._votes(source, message.parent) else []

    def _on_accepted(self, now: int, source: Source, message: AcceptedMsg) -> list[Effect]:
        if self._votes(source, message.parent):
            self.agreement.on_accepted(source, message)
        return []

    def _on_decided(self, now: int, source: Source, message: Decided) -> list[Effect]:
        return self._learn(now, source, (message.view,), False)

    def _on_chain(self, now: int, source: Source, message: Chain) -> list[Effect]:
        return self._learn(now, source, message.views, True)

    def _on_pull(self, now: int, source: Source, message: Pull) -> list[Effect]:
        if self.view is None or message.chain != self.view.chain:
            return []
        views = self._history.after(message.number)
        return [Send(source[0], Chain(views))] if views else []

    def _on_beat(self, now: int, source: Source, message: Beat) -> list[Effect]:
        effects = self._compare(now, source, message.brief)
        if self._sources.get(source[0]) == source[1]:
            effects += self.lease.on_beat(now, source[0], message, self.agreement.open)
        return effects

    def _on_grant(self, now: int, source: Source, message: Grant) -> list[Effect]:
        if self._sources.get(source[0]) == source[1] and self.lease.on_grant(now, source[0], message):
            return self.lease.beats(now, source[:1], self._brief, self.agreement.open)
        return []

    def _on_ready(self, now: int, source: Source, message: Ready) -> list[Effect]:
        effects = self._compare(now, source, message.brief)
        if self._sources.get(source[0]) == source[1]:
            effects += self.barrier.on_ready(now, source[0], message, self._brief)
        return effects

    def _on_go(self, now: int, source: Source, message: Go) -> list[Effect]:
        if self._sources.get(source[0]) == source[1]:
            self.barrier.on_go(message)
        return self._compare(now, source, message.brief)

    def _on_hello(self, now: int, source: Source, message: Hello) -> list[Effect]:
        view, node = self.view, source[0]
        if view is None:
            self.bootstrap.met(now, message.member, message.settled, message.knows, ())
            if message.settled:
                return [Send(node, Hello(self._brief, self._me, False))] if self.works.state == "none" else []
            return [self._welcome(now, node)]
        if message.settled:
            return [self._welcome(now, node), *self._compare(now, source, message.brief)]
        if holds(view, source):
            return self._tell_behind(now, node, -1)
        effects: list[Effect] = [self._welcome(now, node)]
        if view.mode == "closed":
            return effects + self._tell_behind(now, node, -1)
        if node in self._sources:
            self.detector.gone(node)
        join = Report("join", source, member=message.member)
        self.reports.apply(now, join)
        direct = self._order_of_trust()[:DIRECT]
        if self._me.node not in direct:
            effects += (Send(to, ReportsMsg(self._brief, (join,))) for to in direct)
        return effects

    def _welcome(self, now: int, to: str) -> Effect:
        order = self._order_of_trust()[:DIRECT] if self.view is not None else ()
        knows = self.view.members[:32] if self.view is not None else self.bootstrap.recent(now)
        return Send(to, Welcome(self._brief, self._me, knows, order))

    def _on_welcome(self, now: int, source: Source, message: Welcome) -> list[Effect]:
        if self.view is None:
            self.bootstrap.met(now, message.member, bool(message.brief.chain), message.knows, message.candidates)
            return []
        return self._compare(now, source, message.brief)

    # --- views

    def _decided(self, now: int) -> list[Effect]:
        """This agent's own proposal was accepted by a quorum: adopt it, tell old, new and dropped members (A7)."""
        nxt = self.agreement.decision
        self.agreement.decision = None
        if nxt is None:
            return []
        told = {member.node for member in nxt.members}
        if self.view is not None:
            told |= {member.node for member in self.view.members}
        effects: list[Effect] = list(self._adopt(now, nxt, False))
        effects += (Send(node, Decided(nxt)) for node in sorted(told) if node != self._me.node)
        return effects

    def _learn(self, now: int, source: Source, views: tuple[View, ...], may_jump: bool) -> list[Effect]:
        """Decided views from somebody: adopt what follows ours; ask for what is missing (A7)."""
        if not views or not linked(views) or self.ended:
            return []
        effects: list[Effect] = []
        if self.view is None:
            if self.works.state != "none":
                return []
            mine = next((i for i, view in enumerate(views) if holds(view, self._me.source)), None)
            if mine is None:
                closed = views[-1].mode == "closed"
                return self._end(now, views[-1].exit_code, views[-1].reason) if closed else []
            effects += self._adopt(now, views[mine], True)
            views = views[mine + 1 :]
        for nxt in views:
            view = self.view
            if view is None or nxt.chain != view.chain or nxt.number <= view.number:
                continue
            if follows(view, self.digest, nxt):
                effects += self._adopt(now, nxt, False)
            elif nxt.number == view.number + 1:
                self._note(now, f"view {nxt.number} of {source[0]} does not follow ours")
                return effects
            elif may_jump:
                effects += self._adopt(now, views[-1], True)
                return effects
            else:
                return [*effects, Send(source[0], Pull(view.chain, view.number))]
        return effects

    def _adopt(self, now: int, nxt: View, jumped: bool) -> list[Effect]:
        """A8."""
        digest = digest_of(nxt)
        cause = self._cause(now, f"view {nxt.number} generation {nxt.generation} {nxt.mode}: {nxt.reason}")
        if not holds(nxt, self._me.source):
            if self._leaving:
                return self._end(now, 0, "left")
            return self._rejoin(now, f"dropped in view {nxt.number}: {nxt.reason}")
        before = self.view
        joined = before is None
        effects: list[Effect] = []
        self._settle(now, nxt, digest, None, jumped and not joined)
        if jumped or joined:
            self._history.views.clear()
            self._history.add(nxt, True)
        effects += (Persist(self.agreement.vote()), Adopt(nxt, digest, cause))
        if nxt.mode != "run" or nxt.generation != self.works.generation:
            effects += self.works.stop(False, cause)
        fresh = before is None or before.generation != nxt.generation or before.mode != nxt.mode
        self.barrier.adopt(now, nxt, fresh, self.works.state != "none", now + self._config.fence_ns if nxt.ghosts else now)
        if nxt.mode == "closed":
            effects += self._end(now, nxt.exit_code, nxt.reason)
        return effects

    def _settle(self, now: int, view: View, digest: str, vote: Vote | None, careful: bool) -> None:
        """Everything that is per view starts anew."""
        self.view, self.digest = view, digest
        nodes = tuple(member.node for member in view.members)
        self._sources = {member.node: member.incarnation for member in view.members}
        self._rings = rings(nodes, self._config.rings)
        self._order = candidates(digest, nodes)
        self._history.add(view, not self._history.views)
        self._unanswered.clear()
        self._lagging.clear()
        self._told_ns.clear()
        self._heartbeat_ns = self._repeat_ns = now
        self.alerts = Alerts(digest, self._rings)
        self.detector.adopt(now, tuple(self._rings.subjects.get(self._me.node, ())))
        self.gossip.adopt(len(nodes))
        self.reports.adopt(view)
        self.lease.adopt(now, view, digest)
        self.works.adopt(now, view, careful)
        self.agreement.begin(now, view, digest, vote)
        self.bootstrap.settle(nodes)
        self._brief = self._brief_now(now)

    def _rejoin(self, now: int, why: str) -> list[Effect]:
        """This incarnation is over: kill its workers, come back as another (A8)."""
        cause = self._cause(now, why)
        effects: list[Effect] = list(self.works.stop(True, cause))
        self._me = msgspec.structs.replace(self._me, incarnation=self._rng.getrandbits(63), role="standby")
        self.view, self.digest, self._sources = None, "", {}
        self._brief = NOWHERE
        self._rings, self._order = rings((), self._config.rings), ()
        self._history.views.clear()
        self.lease.reset()
        self.barrier.reset()
        self.detector.adopt(now, ())
        self.reports = Reports(self._config)
        self.agreement = Agreement(self._config, self._me.source, self, self._rng)
        self.agreement.begin(now, None, "")
        self.bootstrap.start(now)
        self.works.reset()
        effects.append(Persist(self.agreement.vote()))
        return effects

    def _fence(self, now: int) -> list[Effect]:
        """No quorum has been seen for a whole lease: nobody may train here (A9)."""
        return self.works.stop(True, self._cause(now, "no quorum seen for a lease: workers are killed"))

    def _end(self, now: int, code: int, reason: str) -> list[Effect]:
        self.ended = True
        self._leave_by_ns = None
        cause = self._cause(now, f"ends with code {code}: {reason}")
        return [*self.works.stop(False, cause), Persist(None), End(code, reason, cause)]

    # --- this host

    def _event(self, now: int, event: Event) -> list[Effect]:
        match event:
            case ConnectionLost(node):
                self.detector.lost(now, node)
            case Connected(node, outcome):
                self.detector.connected(now, node, outcome == "refused")
                if self.view is None:
                    self.bootstrap.connected(now, node, outcome == "refused")
            case WorkersGone(generation):
                return self._gone(now, generation)
            case WorkersFailed(generation, code, detail):
                if self._of_ours(generation):
                    return self._say(now, "failed", detail, code)
            case WorkersFinished(generation):
                if self._of_ours(generation):
                    return self._say(now, "finished", "")
            case RestartAsked(detail):
                return self._say(now, "restart", detail)
            case LeaveAsked():
                return self._leave(now)
        return []

    def _of_ours(self, generation: int) -> bool:
        view = self.view
        return view is not None and view.mode == "run" and view.generation == generation and self.works.state == "running"

    def _gone(self, now: int, generation: int) -> list[Effect]:
        if not self.works.gone(generation) or self.ended:
            return []
        view = self.view
        if view is None:
            self.works.reset()
            self.bootstrap.due_ns = now
            return []
        if self._leaving:
            return self._say(now, "leaving", "asked to leave")
        if view.mode == "run" and generation == view.generation and self._me.node in view.order:
            return self._say(now, "restart", f"{self._me.node} was fenced: it had seen no quorum for a lease")
        self.barrier.workers_gone(now)
        return []

    def _leave(self, now: int) -> list[Effect]:
        if self._leaving or self.ended:
            return []
        self._leaving = True
        cause = self._cause(now, "asked to leave")
        if self.view is None or len(self.view.members) == 1:
            return self._end(now, 0, "left")
        self._leave_by_ns = now + self._config.leave_ns
        effects = self.works.stop(False, cause)
        return effects if self.works.state != "none" else self._say(now, "leaving", "asked to leave")

    # --- for people and tests

    def _note(self, now: int, text: str) -> None:
        self._story.append((now, "", text))

    def _cause(self, now: int, text: str) -> str:
        self._causes += 1
        cause = f"{self._me.node}#{self._causes}"
        self._story.append((now, cause, text))
        return cause

    def story(self) -> tuple[tuple[int, str, str], ...]:
        """(time, cause id or "", what happened), oldest first."""
        return tuple(self._story)

    def validate(self) -> None:
        """Raise ValueError when an invariant is broken."""
        self.agreement.validate()
        self.detector.validate()
        if self.view is not None and not self.ended and not holds(self.view, self._me.source):
            raise ValueError("settled in a view that does not hold this agent")
        if self.works.state == "running" and (self.view is None or self.works.generation != self.view.generation):
            raise ValueError("workers of another generation run")


_HANDLERS = {
    Heartbeat: Node._on_heartbeat, Probe: Node._on_probe, Ack: Node._on_ack, ReportsMsg: Node._on_reports,
    Prepare: Node._on_prepare, Promise: Node._on_promise, Nack: Node._on_nack, Accept: Node._on_accept,
    AcceptedMsg: Node._on_accepted, Decided: Node._on_decided, Pull: Node._on_pull, Chain: Node._on_chain, Beat: Node._on_beat,
    Grant: Node._on_grant, Ready: Node._on_ready, Go: Node._on_go, Hello: Node._on_hello, Welcome: Node._on_welcome,
}  # fmt: skip
