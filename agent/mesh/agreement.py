"""One decision: what follows a view (A1, A2, A4, A7). Single-decree Paxos among the members of that view.

Theory: Lamport's synod. Phase 1 (roll call): a proposer picks a ballot above all it has seen; a voter that has
promised nothing higher promises it and reports what it last accepted. With promises of a quorum the proposer must
propose the accepted value of the highest ballot reported, and only if there is none may choose freely. Phase 2: it
asks all to accept; what a quorum has accepted under one ballot is decided, for ever. Promises and acceptances are on
disk before they are told. View 0 is decided the same way by slots (A10), parent "".

Both parts of an agent are here: the voter (promised, accepted) and the proposer. What is chosen freely, who is still
waited for and what a quorum is, the composing node says (`Council`).

States of the proposer: idle, roll (phase 1 open), accept (phase 2 open).
Invariants: `promised` never decreases within one view; accepted.ballot <= promised; a proposer never uses one ballot
for two values; it has itself promised its ballot, on disk, before anyone hears of it, so a restarted agent never uses
it again.
"""

import random
from collections.abc import Collection, Mapping
from typing import Literal, Protocol

from hyperpodrun.agent.mesh.config import MS, MeshConfig
from hyperpodrun.agent.mesh.effects import Effect, Persist, Send
from hyperpodrun.agent.wire.mesh import (
    ZERO,
    Accept,
    Accepted,
    AcceptedMsg,
    Ballot,
    Brief,
    Item,
    Member,
    Nack,
    Prepare,
    Promise,
    Source,
    View,
    Vote,
)

Phase = Literal["idle", "roll", "accept"]
TABLE: dict[tuple[Phase, str], Phase] = {
    ("idle", "something asks for a view and it is my turn"): "roll",
    ("roll", "a quorum has promised and nobody is waited for: a value"): "accept",
    ("roll", "nothing to change, no quorum in time, or a higher ballot"): "idle",
    ("accept", "a quorum has accepted: decided"): "idle",
    ("accept", "no quorum in time, or a higher ballot"): "idle",
}
"""(phase of the proposer, what happens) -> phase."""


class Council(Protocol):
    """What the agreement asks of the node that composes it."""

    def me(self) -> Member:
        """This agent's record."""

    def brief(self) -> Brief:
        """Where it stands."""

    def is_quorum(self, nodes: Collection[str], spent: Collection[str]) -> bool:
        """Whether these voters may decide; those in `spent` may not use the tiebreak."""

    def electorate(self) -> Collection[str]:
        """Everyone to be asked."""

    def awaited(self, answered: Collection[str]) -> bool:
        """Whether somebody unsuspected has not answered the roll call yet."""

    def choose(self, now: int, promises: Mapping[str, Promise]) -> View | None:
        """The value to propose freely; None: nothing to change."""

    def testimony(self) -> tuple[Item, ...]:
        """What a proposer should hear with this voter's promise."""


class Agreement:
    """Times: nanoseconds of the local clock. A decision is left in `decision` for the node to take."""

    def __init__(self, config: MeshConfig, me: Source, council: Council, rng: random.Random) -> None:
        self._config = config
        self._me = me
        self._council = council
        self._rng = rng
        self.view: View | None = None
        self.parent = ""
        self.promised = ZERO
        self.accepted: Accepted | None = None
        self.spent = False
        self.accepted_ns = 0
        self.phase: Phase = "idle"
        self.not_before_ns = 0
        self.decision: View | None = None
        self.promises: dict[str, Promise] = {}
        self._reported = False
        self._votes: set[str] = set()
        self._spent: set[str] = set()
        """Of those who answered in this phase."""
        self._ballot = ZERO
        self._value: View | None = None
        self._highest = ZERO
        self.floor = 0
        """See `Vote`."""
        self.tries = 0
        self.failures = 0
        """Roll calls of this agent that found no quorum."""
        self.recovering = False
        self._quorum_ns: int | None = None
        self._close_ns = 0
        self._resend_ns = 0
        self._asks = 0

    def begin(self, now: int, view: View | None, digest: str, vote: Vote | None = None) -> None:
        """Vote on what follows `view` (None: on view 0). `vote`: the file of an earlier life of this agent."""
        self.view, self.parent = view, digest
        self.promised = self._highest = vote.promised if vote else ZERO
        self.accepted = vote.accepted if vote else None
        self.floor = vote.floor if vote else self.floor
        self.spent = vote is not None
        self.accepted_ns = now
        self.phase = "idle"
        self.not_before_ns = now
        self.decision = None
        self.tries = self.failures = 0

    def enlist(self, parent: str) -> None:
        """Without a view: vote on the successor of somebody else's (A11). What was accepted for another parent was never
        decided: it
        needed this vote and that of whoever asks now, who is further on."""
        self.parent = parent
        if self.accepted is not None and self.accepted.view.parent != parent:
            self.accepted = None

    def hurry(self, now: int) -> None:
        """What was in the way is gone: ask again now, the closed roster if there is no quorum."""
        self.phase = "idle"
        self.failures = 1
        self.not_before_ns = now

    @property
    def epoch(self) -> int:
        """That of this agent's own ballot: a view it proposes has it."""
        return self._ballot.epoch

    @property
    def open(self) -> bool:
        """Something is accepted here and not known to be decided."""
        return self.accepted is not None

    def vote(self) -> Vote:
        """What belongs on disk."""
        return Vote(self._me[1], self.view, self.promised, self.accepted, self.floor)

    # --- the voter

    def on_prepare(self, now: int, source: Source, message: Prepare) -> list[Effect]:
        """A roll call for this decision: promise, or say why not."""
        ballot = message.ballot
        self._saw(now, ballot)
        if ballot < self.promised:
            return [Send(source[0], Nack(self.parent, ballot, self.promised))]
        effects: list[Effect] = []
        if ballot > self.promised:
            self.promised = ballot
            effects.append(Persist(self.vote()))
        return [*effects, Send(source[0], self._promise(ballot))]

    def _promise(self, ballot: Ballot) -> Promise:
        return Promise(self.parent, ballot, self.accepted, self.spent, self._council.me(), self._council.testimony())

    def on_accept(self, now: int, source: Source, message: Accept) -> list[Effect]:
        """Phase 2: accept unless something higher was promised."""
        ballot = message.ballot
        self._saw(now, ballot)
        if ballot < self.promised:
            return [Send(source[0], Nack(self.parent, ballot, self.promised))]
        effects: list[Effect] = []
        if self.accepted is None or self.accepted.ballot != ballot:
            if self.accepted is None:
                self.accepted_ns = now
            self.promised = ballot
            self.accepted = Accepted(ballot, message.view)
            effects.append(Persist(self.vote()))
        return [*effects, Send(source[0], AcceptedMsg(self.parent, ballot, self.spent))]

    def _saw(self, now: int, ballot: Ballot) -> None:
        """Somebody else proposes: step back while it is ahead and at it (A3). Its repeated asking counts, or two candidates would
        interrupt each other for ever when neither is answered at once."""
        if ballot < self._highest:
            return
        self._highest = ballot
        if (ballot.node, ballot.incarnation) != self._me:
            self.not_before_ns = max(self.not_before_ns, now + self._config.yield_ns)
        if self.phase != "idle" and ballot > self._ballot:
            self.phase = "idle"
            self.failures += self._quorum_ns is None

    # --- the proposer

    def propose(self, now: int, recover: bool = False) -> list[Effect]:
        """Open a roll call with a new ballot. `recover`: of the closed roster, in a new epoch (A11)."""
        highest = max(self._highest, self.promised)
        own = self.view.epoch if self.view is not None else 0
        self.recovering = recover
        self._ballot = Ballot(max(highest.epoch, own + recover), highest.round + 1, *self._me)
        self._highest = self.promised = self._ballot
        self.phase = "roll"
        self._quorum_ns = None
        self._asks = 0
        self._close_ns = now + self._config.ballot_ns
        self._resend_ns = now + self._config.resend_ns
        effects: list[Effect] = [Persist(self.vote())]
        self.promises = {self._me[0]: self._promise(self._ballot)}
        self._spent = {self._me[0]} if self.spent else set()
        self._reported = self.accepted is not None
        prepare = Prepare(self._council.brief(), self.parent, self._ballot)
        effects += (Send(node, prepare) for node in self._council.electorate() if node != self._me[0])
        return effects + self._roll(now)

    def on_promise(self, now: int, source: Source, message: Promise) -> list[Effect]:
        """A voter is there."""
        if message.ballot != self._ballot or self.phase != "roll":
            return []
        self.promises[source[0]] = message
        self._heard(source[0], message.spent)
        self._reported = self._reported or message.accepted is not None
        return self._roll(now)

    def on_nack(self, now: int, message: Nack) -> list[Effect]:
        """A voter has promised more to somebody else."""
        self._saw(now, message.promised)
        return []

    def _heard(self, node: str, spent: bool) -> None:
        if spent:
            self._spent.add(node)
        else:
            self._spent.discard(node)

    def _roll(self, now: int) -> list[Effect]:
        """Close the roll call when it may be closed (A4)."""
        if (decided := self._decided_already()) is not None:
            self.phase = "idle"
            self.decision = decided
            return []
        if self._waits(now):  # in a large job that is what most promises come to: no vote is counted
            return []
        if not self._council.is_quorum(self.promises, self._spent):
            return []
        if self._quorum_ns is None:
            self._quorum_ns = now
            if self._waits(now):
                return []
        reported = [promise.accepted for promise in self.promises.values() if promise.accepted is not None]
        if reported:
            value: View | None = max(reported, key=lambda accepted: accepted.ballot).view
        else:
            value = self._council.choose(now, self.promises)
        if value is None:
            self._rest(now)
            return []
        return self._ask(now, value)

    def _waits(self, now: int) -> bool:
        """There was a quorum, and the time for the rest is not over."""
        waits = self._quorum_ns is not None and now < self._quorum_ns + self._config.roll_ns
        return waits and self._council.awaited(self.promises)

    def _decided_already(self) -> View | None:
        """A value that a quorum is now known to have accepted under one ballot is decided, even if whoever counted it is
        gone. Its proposer
        had accepted it before it asked anybody; whether that one could use its tiebreak nobody can say any more."""
        if not self._reported:
            return None
        under: dict[Ballot, set[str]] = {}
        views: dict[Ballot, View] = {}
        for node, promise in self.promises.items():
            if promise.accepted is not None:
                ballot = promise.accepted.ballot
                under.setdefault(ballot, {ballot.node}).add(node)
                views[ballot] = promise.accepted.view
        for ballot, known in under.items():
            if not self.recovering and self._council.is_quorum(known, {ballot.node, *self._spent}):
                return views[ballot]
        return None

    def _rest(self, now: int) -> None:
        """Nothing to change: do not ask again at once."""
        self.phase = "idle"
        self.tries += 1
        self.not_before_ns = max(self.not_before_ns, now + self._backoff_ns())

    def _backoff_ns(self) -> int:
        most = min(self._config.backoff_cap_ns, 200 * MS << min(self.tries, 8))
        return most // 2 + self._rng.randrange(most)

    def _ask(self, now: int, value: View) -> list[Effect]:
        self.phase = "accept"
        self._value = value
        self._close_ns = now + self._config.ballot_ns
        self._resend_ns = now + self._config.resend_ns
        if self.accepted is None:
            self.accepted_ns = now
        self.accepted = Accepted(self._ballot, value)
        effects: list[Effect] = [Persist(self.vote())]
        self._votes = {self._me[0]}
        self._spent = {self._me[0]} if self.spent else set()
        accept = Accept(self.parent, self._ballot, value)
        effects += (Send(node, accept) for node in self._council.electorate() if node != self._me[0])
        self._count()
        return effects

    def on_accepted(self, source: Source, message: AcceptedMsg) -> None:
        """A voter has accepted."""
        if message.ballot == self._ballot and self.phase == "accept":
            self._votes.add(source[0])
            self._heard(source[0], message.spent)
            self._count()

    def _count(self) -> None:
        if self._council.is_quorum(self._votes, self._spent):
            self.phase = "idle"
            self.decision = self._value

    def due_ns(self) -> int | None:
        """When `tick` has something to do."""
        if self.phase == "idle":
            return None
        due = min(self._resend_ns, self._close_ns)
        if self.phase == "roll" and self._quorum_ns is not None:
            due = min(due, self._quorum_ns + self._config.roll_ns)
        return due

    def tick(self, now: int) -> list[Effect]:
        """Ask again, close the roll call, or give the ballot up."""
        if self.phase == "idle":
            return []
        if self.phase == "roll":
            effects = self._roll(now)
            if self.phase != "roll":
                return effects
        if now >= self._close_ns:
            self.failures += self._quorum_ns is None
            self._rest(now)
            return []
        if now < self._resend_ns:
            return []
        self._resend_ns = now + self._config.resend_ns
        self._asks += 1
        # Now and then everybody: whoever has answered yields only while it hears that this proposer is still at it.
        answered: Collection[str] = () if self._asks % 3 == 0 else self.promises if self.phase == "roll" else self._votes
        ask: Prepare | Accept
        if self.phase == "accept" and self._value is not None:
            ask = Accept(self.parent, self._ballot, self._value)
        else:
            ask = Prepare(self._council.brief(), self.parent, self._ballot)
        return [Send(node, ask) for node in self._council.electorate() if node not in answered and node != self._me[0]]

    def validate(self) -> None:
        """Raise ValueError when an invariant is broken."""
        if self.accepted is not None and self.accepted.ballot > self.promised:
            raise ValueError("accepted above what was promised")
        if self.phase != "idle" and self._ballot > self.promised:
            raise ValueError("proposing a ballot this voter has not promised")
