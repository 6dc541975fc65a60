"""One agent's mesh: composes the cores; events and messages in, effects out.

Theory: MESH.md. Everything that happens comes through one of three doors (`receive`, `tick`, `notify`), each with the
local time, and each answers with effects to be carried out in order. Between calls only `next_deadline` passes. The
same sequence of calls gives the same effects. `inbox`, `standing`, `convening` and `voice` hold what a node does, by
subject; state is here and in the cores.

States: joining (no view), settled (has one), ended (the job is closed, or this agent has left).
Invariants (`validate`): those of the parts; a settled agent is a member of its view; workers run only of the view's
generation, while stopping also of earlier ones.
"""

import random
from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from hyperpodrun.agent.mesh import convening, inbox, standing, voice
from hyperpodrun.agent.mesh.agreement import Agreement
from hyperpodrun.agent.mesh.alerts import Alerts
from hyperpodrun.agent.mesh.barrier import Barrier
from hyperpodrun.agent.mesh.bootstrap import Bootstrap
from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.detector import Detector
from hyperpodrun.agent.mesh.effects import (
    CertifyDead,
    Connected,
    ConnectionLost,
    Effect,
    Effects,
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
from hyperpodrun.agent.mesh.history import History, holds
from hyperpodrun.agent.mesh.inbox import NEVER
from hyperpodrun.agent.mesh.lease import Lease
from hyperpodrun.agent.mesh.quorum import is_genesis_quorum, is_quorum, is_recovery_quorum
from hyperpodrun.agent.mesh.reports import Reports
from hyperpodrun.agent.mesh.rings import Rings, rings
from hyperpodrun.agent.mesh.succession import plain
from hyperpodrun.agent.mesh.view import brief_of, digest_of
from hyperpodrun.agent.mesh.works import Works
from hyperpodrun.agent.wire.mesh import (
    NOWHERE,
    Brief,
    Heartbeat,
    Hello,
    Item,
    Member,
    Message,
    Probe,
    Promise,
    Source,
    View,
    Vote,
)
from hyperpodrun.agent.wire.rungs import Decide, Symptoms


class Node:
    """`me.incarnation` is replaced by the vote file's where there is one. `seed`: of this agent's own random numbers.
    `first_start`: false when the driver knows, or cannot exclude, that this slot's launcher ran in this job before (A10).
    `decide`: which rung follows a fault; the same function for all agents of a job."""

    def __init__(
        self,
        config: MeshConfig,
        me: Member,
        seed: int,
        now: int,
        vote: Vote | None = None,
        first_start: bool = True,
        decide: Decide = plain,
    ) -> None:
        self.config = config
        self.decide = decide
        self.rng = random.Random(seed)
        incarnation = vote.incarnation if vote is not None else me.incarnation
        self.member = msgspec.structs.replace(me, incarnation=incarnation)
        self.history = History()
        self.told: deque[tuple[int, str, str]] = deque(maxlen=256)
        self.causes = 0
        self.view: View | None = None
        self.digest = ""
        self.sources: Mapping[str, int] = {}
        self.vacant: tuple[str, ...] = ()
        """Slots without a member in the view."""
        self.rings: Rings = rings((), config.rings)
        self.order: tuple[str, ...] = ()
        self.here = NOWHERE
        self.ended = False
        self.is_leaving = False
        self.leave_by_ns: int | None = None
        self.heartbeat_ns = now
        self.repeat_ns = now
        self.repeat_gap_ns = config.hello_ns
        self.alert_seq = 0
        self.unanswered: dict[str, tuple[int, int]] = {}
        self.lagging: dict[str, int] = {}
        self.unheard: set[str] = set()
        """Dropped while this agent did not hear them, and not heard since (M8)."""
        self.acked: dict[Source, int] = {}
        self.proposed_ns = now
        self.told_ns: dict[str, int] = {}
        self.pull_ns = 0
        self.knock = 0
        self.until_ns: int | None = None
        self.convene_ns: int | None = None
        self.due = now
        self.works = Works(config)
        self.detector = Detector(config)
        self.gossip = Gossip()
        self.alerts = Alerts("", self.rings)
        self.reports = Reports(config)
        self.lease = Lease(config, me.node)
        self.barrier = Barrier(config, me.node)
        self.bootstrap = Bootstrap(config, me.node, self.rng, now, first_start)
        self.agreement = Agreement(config, self.member.source, self, self.rng)
        self.first: list[Effect] = []
        if vote is not None and vote.view is not None:
            standing.settle(self, now, vote.view, digest_of(vote.view), vote, True)
            if vote.view.mode == "run" and me.node in vote.view.order:
                voice.say(self, now, "revived", f"the agent of {me.node} was restarted")
            elif vote.view.mode == "closed":  # the agent before this one died between knowing it and ending
                self.first += standing.end(self, now, vote.view.exit_code, vote.view.reason)
        else:
            self.agreement.begin(now, None, "", vote)
            self.first.append(Persist(self.agreement.vote()))

    def next_deadline(self) -> int:
        """When `tick` is to be called at the latest."""
        return self.due

    def tick(self, now: int) -> Effects:
        """Time has passed."""
        effects, self.first = self.first, []
        if not self.ended:
            effects += self._timers(now)
        elif self._lingers and now >= self.heartbeat_ns:
            effects += self._round(now)
        return self._finish(now, effects)

    def receive(self, now: int, source: Source, message: Message) -> Effects:
        """A message of the agent that the transport knows as `source`."""
        node = source[0]
        if self.sources.get(node) == source[1]:
            back = self.detector.heard(now, node)
            if (
                type(message) is Heartbeat and message.brief.digest == self.digest and not message.items and not back
                and node not in self.lagging
            ):  # fmt: skip
                return ()
        if self.ended and not self._lingers:
            return ()
        effects: list[Effect] = []
        if node in self.unheard:
            self.unheard.discard(node)
            effects += voice.accuse(self, now, node, False, False)
        handler = inbox.HANDLERS.get(type(message))
        if handler is not None:
            effects += handler(self, now, source, message)
        return self._finish(now, effects)

    def notify(self, now: int, event: Event) -> Effects:
        """Something happened on this host."""
        return self._finish(now, self._event(now, event))

    def me(self) -> Member:
        """This agent's record."""
        return self.member

    def brief(self) -> Brief:
        """Where this agent stands."""
        return self.here

    def is_quorum(self, nodes: Collection[str], spent: Collection[str]) -> bool:
        """A1, or A10 for view 0."""
        if self.agreement.recovering:
            return is_recovery_quorum(self.config, self.slots(), self.reports.nodes("dead"), nodes)
        if self.view is None:
            return is_genesis_quorum(self.config, nodes)
        return is_quorum(self.view, nodes, self.view.tiebreak not in spent)

    def electorate(self) -> Collection[str]:
        """All members, suspects too (A4); in a recovery every slot; for view 0 everyone present."""
        if self.agreement.recovering:
            return self.slots()
        if self.view is not None:
            return self.sources.keys()
        return tuple(member.node for member in self.bootstrap.present(self.proposed_ns))

    def slots(self) -> tuple[str, ...]:
        """Every slot of the job whose name is known here."""
        return tuple(sorted((self.member.node, *self.bootstrap.slots())))

    @property
    def _lingers(self) -> bool:
        """Ended with the job, not by leaving: still tells others that it is closed, until the driver ends the process."""
        return self.ended and self.view is not None and self.view.mode == "closed"

    def _timers(self, now: int) -> list[Effect]:
        effects: list[Effect] = []
        view = self.view
        if view is None:
            if self.works.state == "none" and now >= self.bootstrap.due_ns:
                effects += self.bootstrap.hellos(now, self.here, self.member)
        else:
            if self.works.state == "running" and not self.lease.valid(now):
                effects += self._fence(now)
            if now >= self.heartbeat_ns:
                effects += self._round(now)
            if (due := self.detector.loud_due()) is not None and now >= due:
                effects += self.detector.loud(now, Probe(self.here))
            effects += standing.lease(self, now)
            if now >= self.repeat_ns:
                self.repeat_ns = now + self.repeat_gap_ns
                self.repeat_gap_ns = min(2 * self.repeat_gap_ns, 5 * self.config.beat_ns)
                effects += voice.tell(self, tuple(self.reports.mine.values()))
            if (late := self.barrier.late_ns()) is not None and now >= late:
                for node in self.barrier.overdue(now):
                    effects += voice.accuse_unready(self, now, node)
            if self.leave_by_ns is not None and now >= self.leave_by_ns:
                effects += standing.end(self, now, 0, "left without waiting for the others' word")
        return effects + self.agreement.tick(now)

    def _round(self, now: int) -> list[Effect]:
        """A heartbeat round: heartbeats to my observers, questions to the silent, a knock at a lost slot."""
        self.heartbeat_ns = self.config.next_round_ns(now, self.config.heartbeat_ns)
        self.here = self.brief_now(now)
        beat = Heartbeat(self.here, self.gossip.take())
        effects: list[Effect] = [Send(node, beat) for node in self.rings.observers.get(self.member.node, ())]
        effects += self.detector.round(now, Probe(self.here))
        for node, since in sorted(self.lagging.items()):
            if now - since >= self.config.one_way_ns:
                self.lagging[node] = NEVER
                effects += voice.accuse(self, now, node, True, False)
        self.knock += 1
        if self.knock % 4 == 0:
            # Those whom this agent keeps out (M8) first: every other knock is theirs.
            barred = sorted(self.unheard) if self.knock % 8 else []
            lost = barred or self.vacant
            if lost:
                effects.append(Send(lost[self.knock // 4 % len(lost)], Hello(self.here, self.member, True)))
            effects += voice.remind(self, now)
        return effects

    def brief_now(self, now: int) -> Brief:
        """Where this agent stands at this moment."""
        if self.view is None:
            return NOWHERE
        live = self.view.mode == "run" and self.works.state == "running" and self.lease.valid(now)
        return brief_of(self.view, self.digest, live)

    def _finish(self, now: int, effects: list[Effect]) -> Effects:
        """What follows from whatever was just done; at the end of every door."""
        for subject, down, loud in self.detector.verdicts():
            effects += voice.accuse(self, now, subject, down, loud)
        if not self.ended:
            effects += convening.convene(self, now)
        if self.agreement.decision is not None:
            effects += standing.take_decision(self, now)
        view = self.view
        if view is not None and not self.ended:
            works = self.works
            if self.barrier.state != "gone":
                effects += self.barrier.advance(now, self.here)
            if (
                self.barrier.state == "gone" and works.idle and works.generation < view.generation
                and self.lease.valid(now) and not self.is_leaving
            ):  # fmt: skip
                effects += works.start(view, self.cause(now, f"start generation {view.generation}"))
            if works.state == "running":
                effects += works.permit(now, view)
                until = self.lease.until_ns()
                if until is not None and until != self.until_ns:
                    self.until_ns = until
                    effects.append(LeaseEffect(until))
        self.due = self._next(now)
        return tuple(effects)

    def _next(self, now: int) -> int:
        if self.first:
            return now
        if self.ended:
            return self.heartbeat_ns if self._lingers else NEVER
        if self.view is None:
            joining = self.works.state == "none"
            dues = (self.agreement.due_ns(), self.convene_ns, self.bootstrap.due_ns if joining else None)
            return min([due for due in dues if due is not None], default=NEVER)
        earliest = min(self.heartbeat_ns, self.lease.due_ns, self.repeat_ns)
        running = self.works.state == "running"
        for due in (
            self.convene_ns, self.agreement.due_ns(), self.detector.loud_due(), self.barrier.due_ns, self.barrier.late_ns(),
            self.leave_by_ns, self.works.permit_due() if running else None, self.lease.until_ns() if running else None,
        ):  # fmt: skip
            if due is not None and due < earliest:
                earliest = due
        return earliest

    def _fence(self, now: int) -> list[Effect]:
        """No quorum has been seen for a whole lease: nobody may train here (A9)."""
        return self.works.stop(True, self.cause(now, "no quorum seen for a lease: workers are killed"))

    def _event(self, now: int, event: Event) -> list[Effect]:
        match event:
            case ConnectionLost(node):
                self.detector.lost(now, node)
            case Connected(node, outcome):
                self.detector.connected(now, node, outcome == "refused")
                if self.view is None:
                    self.bootstrap.connected(now, node, outcome == "refused")
            case WorkersGone(generation, parked):
                return self._gone(now, generation, parked)
            case WorkersFailed(generation, code, detail, symptoms):
                if self._of_ours(generation) or self._on_its_way(generation):
                    return voice.say(self, now, "failed", detail, code, symptoms)
            case WorkersFinished(generation):
                if self._of_ours(generation):
                    return voice.say(self, now, "finished", "")
            case RestartAsked(detail, rung):
                return voice.say(self, now, "restart", detail, symptoms=Symptoms(rung=rung))
            case CertifyDead(node):
                return voice.certify(self, now, node)
            case LeaveAsked():
                return self._leave(now)
        return []

    def _of_ours(self, generation: int) -> bool:
        view = self.view
        return view is not None and view.mode == "run" and view.generation == generation and self.works.state == "running"

    def _on_its_way(self, generation: int) -> bool:
        """Whether this generation is decided and has not begun here."""
        view = self.view
        return view is not None and view.generation == generation and self.barrier.state in ("stopping", "ready")

    def _gone(self, now: int, generation: int, parked: bool) -> list[Effect]:
        if not self.works.gone(generation, parked) or self.ended:
            return []
        view = self.view
        if view is None:
            self.works.reset()
            self.bootstrap.due_ns = now
            return []
        if self.is_leaving:
            return voice.say(self, now, "leaving", "asked to leave")
        if view.mode == "run" and generation == view.generation and self.member.node in view.order:
            return voice.say(self, now, "restart", f"{self.member.node} was fenced: it had seen no quorum for a lease")
        self.barrier.workers_gone(now)
        return []

    def _leave(self, now: int) -> list[Effect]:
        if self.is_leaving or self.ended:
            return []
        self.is_leaving = True
        cause = self.cause(now, "asked to leave")
        if self.view is None or len(self.view.members) == 1:
            return standing.end(self, now, 0, "left")
        self.leave_by_ns = now + self.config.leave_ns
        effects = self.works.stop(False, cause)
        return effects if self.works.state != "none" else voice.say(self, now, "leaving", "asked to leave")

    def note(self, now: int, text: str) -> None:
        """Into the story, without a cause."""
        self.told.append((now, "", text))

    def cause(self, now: int, text: str) -> str:
        """Into the story; the id by which effects name it."""
        self.causes += 1
        cause = f"{self.member.node}#{self.causes}"
        self.told.append((now, cause, text))
        return cause

    def story(self) -> tuple[tuple[int, str, str], ...]:
        """(time, cause id or "", what happened), oldest first."""
        return tuple(self.told)

    def validate(self) -> None:
        """Raise ValueError when an invariant is broken."""
        self.agreement.validate()
        self.detector.validate()
        if self.view is not None and not self.ended and not holds(self.view, self.member.source):
            raise ValueError("settled in a view that does not hold this agent")
        if self.works.state == "running" and (self.view is None or self.works.generation != self.view.generation):
            raise ValueError("workers of another generation run")

    # --- what convening answers for the agreement

    def awaited(self, answered: Collection[str]) -> bool:
        """Somebody who should answer has not."""
        return convening.awaited(self, answered)

    def choose(self, now: int, promises: Mapping[str, Promise]) -> View | None:
        """A5."""
        return convening.choose(self, now, promises)

    def waits_for(self) -> tuple[str, ...]:
        """Without a quorum: whom this agent waits for (`hyperpodctl certify-dead`, A11). () while it can go on."""
        return convening.waits_for(self)

    def testimony(self) -> tuple[Item, ...]:
        """My own alerts and all pending reports."""
        return convening.testimony(self)
