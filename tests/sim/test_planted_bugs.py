"""Small mistakes, one for each rule at least, that the simulator must catch: a test of the simulator itself.

Each is a patch of one function or value of the cores. `seed` is the first that caught it; `nodes` the sizes of its
jobs. When the cores change, another seed may be the first: a few more are tried.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hyperpodrun.agent.mesh import (
    barrier,
    bootstrap,
    convening,
    detector,
    inbox,
    lease,
    node,
    ranks,
    reports,
    standing,
    succession,
    voice,
    works,
)
from hyperpodrun.agent.mesh.agreement import Agreement
from hyperpodrun.agent.mesh.effects import Persist, Send
from hyperpodrun.agent.sim import world
from hyperpodrun.agent.sim.__main__ import run_one
from hyperpodrun.agent.sim.faults import random_schedule
from hyperpodrun.agent.sim.transcript import DASHES, play
from hyperpodrun.agent.wire.mesh import ZERO

Patch = Callable[[pytest.MonkeyPatch], None]


class Bug(msgspec.Struct, frozen=True):
    """`rule` is broken by `patch`."""

    name: str
    rule: str
    patch: Patch
    seed: int = 0
    nodes: tuple[int, int] = (3, 6)


def without(kind: type, method: str) -> Patch:
    """The same method, its effects of that kind left out."""

    def patch(mp: pytest.MonkeyPatch) -> None:
        original: Any = getattr(Agreement, method)
        mp.setattr(Agreement, method, lambda *a: [e for e in original(*a) if not isinstance(e, kind)])

    return patch


def lingers_in_a_closed_job(mp: pytest.MonkeyPatch) -> None:
    original = node.Node.__init__

    def born(self: node.Node, *args: Any, **kinds: Any) -> None:
        original(self, *args, **kinds)
        if self.ended:
            self.ended, self.first = False, []

    mp.setattr(node.Node, "__init__", born)


def never_reminds(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(voice, "remind", lambda *a: [])
    mp.setattr(voice, "take_back", lambda *a: [])


def returns(owner: object, name: str, value: object) -> Patch:
    """A function that always answers the same."""
    return lambda mp: mp.setattr(owner, name, lambda *_, **__: value)


def suspects_vote(mp: pytest.MonkeyPatch) -> None:
    original = node.Node.is_quorum

    def is_quorum(self: node.Node, nodes: Any, spent: Any) -> bool:
        return original(self, {*nodes, *self.alerts.suspects()}, spent)

    mp.setattr(node.Node, "is_quorum", is_quorum)


def free_choice(mp: pytest.MonkeyPatch) -> None:
    def roll(self: Agreement, now: int) -> Any:
        hidden = {name: msgspec.structs.replace(promise, accepted=None) for name, promise in self.promises.items()}
        kept, self.promises = self.promises, hidden
        try:
            return original(self, now)
        finally:
            self.promises = kept

    original = Agreement._roll
    mp.setattr(Agreement, "_roll", roll)


def accepts_anything(mp: pytest.MonkeyPatch) -> None:
    def on_accept(self: Agreement, now: int, source: Any, message: Any) -> Any:
        if message.ballot < self.promised:
            self.promised = message.ballot
        return original(self, now, source, message)

    original = Agreement.on_accept
    mp.setattr(Agreement, "on_accept", on_accept)


def promises_anything(mp: pytest.MonkeyPatch) -> None:
    def on_prepare(self: Agreement, now: int, source: Any, message: Any) -> Any:
        return [Send(source[0], self._promise(message.ballot))]

    mp.setattr(Agreement, "on_prepare", on_prepare)


def forgets_votes(mp: pytest.MonkeyPatch) -> None:
    def begin(self: Agreement, now: int, view: Any, digest: str, vote: Any = None) -> None:
        original(self, now, view, digest, vote)
        self.promised, self.accepted = ZERO, None

    original = Agreement.begin
    mp.setattr(Agreement, "begin", begin)


def old_name(mp: pytest.MonkeyPatch) -> None:
    def rejoin(agent: Any, now: int, why: str) -> Any:
        member = agent.member
        effects = original(agent, now, why)
        agent.member = member
        agent.agreement = Agreement(agent.config, member.source, agent, agent.rng)
        agent.agreement.begin(now, None, "")
        return [*effects, Persist(agent.agreement.vote())]

    original = standing.rejoin
    mp.setattr(standing, "rejoin", rejoin)


def half_is_enough(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(node, "is_quorum", lambda view, nodes, _: 2 * sum(m.node in nodes for m in view.members) >= len(view.members))


def any_vote(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(inbox, "votes", lambda agent, source, parent: not agent.ended and agent.view is not None)


def long_lease(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(
        lease.Lease, "valid", lambda self, now: self.anchor_ns is not None and now < self.anchor_ns + 4 * self._config.lease_ns
    )
    mp.setattr(
        lease.Lease, "until_ns", lambda self: None if self.anchor_ns is None else self.anchor_ns + 4 * self._config.lease_ns
    )


def lease_for_all(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(lease.Lease, "_prove", lambda self, now, tree, is_open: self._date(now, tree, max(tree.seen, default=now)))


def lone_lease(mp: pytest.MonkeyPatch) -> None:
    def tick(self: lease.Lease, now: int, *rest: Any) -> Any:
        self.anchor_ns = now
        return original(self, now, *rest)

    original = lease.Lease.tick
    mp.setattr(lease.Lease, "tick", tick)


def open_is_evidence(mp: pytest.MonkeyPatch) -> None:
    beat, prove = lease.Lease._beat, lease.Lease._prove
    mp.setattr(lease.Lease, "_beat", lambda self, now, root, tree, brief, is_open: beat(self, now, root, tree, brief, False))
    mp.setattr(lease.Lease, "_prove", lambda self, now, tree, is_open: prove(self, now, tree, False))


def parent_vouches(mp: pytest.MonkeyPatch) -> None:
    def on_beat(self: lease.Lease, now: int, name: str, beat: Any, is_open: bool) -> Any:
        tree = self._trees.get(beat.root)
        if tree is not None and tree.stamp and self._view is not None and beat.brief.digest == self._digest:
            tree.add([(tree.stamp, 1 << [member.node for member in self._view.members].index(name))])
        return original(self, now, name, beat, is_open)

    original = lease.Lease.on_beat
    mp.setattr(lease.Lease, "on_beat", on_beat)


def grants_without_age(mp: pytest.MonkeyPatch) -> None:
    def grant(*args: Any) -> Any:
        send = original(*args)
        age = None if send.message.age_ns is None else 0
        return msgspec.structs.replace(send, message=msgspec.structs.replace(send.message, age_ns=age))

    original = lease.Lease._grant
    mp.setattr(lease.Lease, "_grant", grant)


def dated_when_it_comes(mp: pytest.MonkeyPatch) -> None:
    original = lease.Lease.on_grant
    mp.setattr(lease.Lease, "on_grant", lambda self, now, grant: original(self, now, msgspec.structs.replace(grant, sent_ns=now)))


def never_stops(mp: pytest.MonkeyPatch) -> None:
    def stop(self: works.Works, kill: bool, cause: str, in_place: bool = False) -> Any:
        self.state = "none"
        return []

    mp.setattr(works.Works, "stop", stop)


def hasty_go(mp: pytest.MonkeyPatch) -> None:
    def advance(self: barrier.Barrier, now: int, brief: Any) -> Any:
        if self.leads and self._view is not None:
            self._ready.update(self._view.order)
        return original(self, now, brief)

    original = barrier.Barrier.advance
    mp.setattr(barrier.Barrier, "advance", advance)


def early_hello(mp: pytest.MonkeyPatch) -> None:
    def rejoin(agent: Any, now: int, why: str) -> Any:
        effects = original(agent, now, why)
        agent.works.state = "none"
        agent.works.reset()
        return effects

    original = standing.rejoin
    mp.setattr(standing, "rejoin", rejoin)


def drops_accused(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(
        succession, "keeps",
        lambda member, roll, reborn: member.node not in roll.accused
        and member.node not in (roll.leaving | reborn | roll.convicted),
    )  # fmt: skip


def drops_everyone_silent(mp: pytest.MonkeyPatch) -> None:
    def choose(agent: Any, now: int, promises: Any) -> Any:
        few = dict(list(promises.items())[:1])
        return original(agent, now, few if agent.view is not None else promises)

    original = convening.choose
    mp.setattr(succession, "keeps", lambda member, roll, reborn: member.node in roll.answered)
    mp.setattr(convening, "choose", choose)


def shuffles(mp: pytest.MonkeyPatch) -> None:
    def assign(*args: Any, **kw: Any) -> Any:
        order = original(*args, **kw)
        return order if order is None else tuple(sorted(order, reverse=True))

    original = ranks.assign
    mp.setattr(succession, "assign", assign)


def majority_recovers(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(node, "is_recovery_quorum", lambda config, slots, certified, nodes: 2 * len(set(nodes)) > config.slots)


def forms_at_will(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(bootstrap.Bootstrap, "_absent", lambda *_: True)
    mp.setattr(bootstrap.Bootstrap, "knows_view", lambda *_: False)


def anyone_forms(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(node, "is_genesis_quorum", lambda config, nodes: len(nodes) >= config.min_nodes)
    mp.setattr(
        bootstrap.Bootstrap, "form_at", lambda self, now: None if len(self.present(now)) + 1 < self._config.min_nodes else now
    )


def decides_in_silence(mp: pytest.MonkeyPatch) -> None:
    def take(agent: Any, now: int) -> Any:
        return [e for e in original(agent, now) if not (isinstance(e, Send) and type(e.message).__name__ == "Decided")]

    original = standing.take_decision
    mp.setattr(standing, "take_decision", take)
    mp.setattr(inbox, "compare", lambda *_: [])


def same_generation(mp: pytest.MonkeyPatch) -> None:
    def make(config: Any, view: Any, digest: str, roll: Any, decide: Any) -> Any:
        nxt = original(config, view, digest, roll, decide)
        return nxt if nxt is None else msgspec.structs.replace(nxt, generation=view.generation)

    original = succession.successor
    mp.setattr(convening, "successor", make)


def no_fence(mp: pytest.MonkeyPatch) -> None:
    def make(*args: Any) -> Any:
        nxt = original(*args)
        return nxt if nxt is None else msgspec.structs.replace(nxt, fence=())

    original = succession.successor
    mp.setattr(convening, "successor", make)


def deaf_to_joins(mp: pytest.MonkeyPatch) -> None:
    original = reports.Reports.apply
    mp.setattr(reports.Reports, "apply", lambda self, now, r: r.kind != "join" and original(self, now, r))


def mute_detector(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(detector.Detector, "_accuse", lambda *_: None)


def final_retried(mp: pytest.MonkeyPatch) -> None:
    def decide(situation: Any) -> Any:
        harmless = [replace(i, symptoms=replace(i.symptoms, final=False)) for i in situation.incidents]
        return original(replace(situation, incidents=tuple(harmless)))

    replace, original = msgspec.structs.replace, world.decide
    mp.setattr(world, "decide", decide)


def keeps_all_processes(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(standing, "stays_in_place", lambda agent, nxt, jumped: nxt.mode == "run" and agent.member.node in nxt.order)


def keeps_fresh(mp: pytest.MonkeyPatch) -> None:
    def stays(agent: Any, nxt: Any, jumped: bool) -> bool:
        return bool(original(agent, msgspec.structs.replace(nxt, fresh=()), jumped))

    original = standing.stays_in_place
    mp.setattr(standing, "stays_in_place", stays)


def forgets_the_parked(mp: pytest.MonkeyPatch) -> None:
    def stop(self: works.Works, kill: bool, cause: str, in_place: bool = False) -> Any:
        return [] if self.state == "parked" else original(self, kill, cause, in_place)

    original = works.Works.stop
    mp.setattr(works.Works, "stop", stop)


def prefers_offenders(mp: pytest.MonkeyPatch) -> None:
    def make(config: Any, view: Any, members: Any, grow: bool, held_back: Any) -> Any:
        return original(config, view, members, grow, ())

    original = succession._world
    mp.setattr(succession, "_world", make)


BUGS = (
    Bug("a promise is told before it is on disk", "A2", without(Persist, "on_prepare")),
    Bug("an acceptance is told before it is on disk", "A2", without(Persist, "on_accept")),
    Bug("a proposer does not put its own promise on disk", "A2", without(Persist, "propose"), seed=152),
    Bug("suspects count as votes", "A1", suspects_vote),
    Bug("half of the members are enough", "A1", half_is_enough, seed=1),
    Bug("the accepted value is not mandatory", "A5", free_choice, seed=7),
    Bug("a lower ballot is accepted", "A7", accepts_anything, seed=171),
    Bug("a lower ballot is promised", "A4", promises_anything),
    Bug("a restarted agent forgets its votes", "A2", forgets_votes, seed=127),
    Bug("a dropped agent comes back under its old incarnation", "M5", old_name),
    Bug("votes count whatever view they are about", "A7", any_vote, seed=1),
    Bug("the lease is longer than the fence", "A9", long_lease, seed=31),
    Bug("any beat proves a quorum", "A9", lease_for_all, seed=31),
    Bug("an agent gives itself a lease", "A9", lone_lease, seed=31),
    Bug("a member with something open is evidence", "A9", open_is_evidence, seed=80),
    Bug("a parent vouches for whoever beats to it", "A9", parent_vouches, seed=127),
    Bug("a grant does not tell the age of the proof", "A9", grants_without_age, seed=87),
    Bug("a grant is dated when it comes", "A9", dated_when_it_comes, seed=80),
    Bug("no fence after an unknown loss", "A9", no_fence, seed=31),
    Bug("old workers are not stopped", "A8", never_stops),
    Bug("GO before all are ready", "A8", hasty_go),
    Bug("a new incarnation joins while its old workers run", "A8", early_hello, seed=22),
    Bug("no world is a ghost", "A8", returns(succession, "_ghosts", ()), nodes=(4, 6), seed=68),
    Bug("the accused are dropped though they answer", "A5", drops_accused, seed=8),
    Bug("whoever answered late is dropped", "A4", drops_everyone_silent),
    Bug("survivors change their ranks", "A6", shuffles),
    Bug("view 0 is formed without evidence", "A10", forms_at_will, seed=33),
    Bug("a majority of the slots recovers", "A11", majority_recovers, nodes=(3, 8), seed=525),
    Bug("anybody forms view 0", "A10", anyone_forms),
    Bug("nobody hears of a decision", "M6", decides_in_silence),
    Bug("a restart keeps the generation", "A8", same_generation, seed=1),
    Bug("nobody is ever accused", "M2", mute_detector, seed=66),
    Bug("a restarted agent does not tell that its workers died", "M7", returns(voice, "say", []), seed=43),
    Bug("joins are not passed on", "M7", deaf_to_joins),
    Bug("a final failure is retried", "A5", final_retried, seed=102),
    Bug("processes stay that are to be replaced everywhere", "A8", keeps_all_processes),
    Bug("processes of a node stay that are to be replaced there", "A8", keeps_fresh),
    Bug("processes at the restart barrier are not ended", "A8", forgets_the_parked),
    Bug("an agent is started again in a closed job and stays", "A9", lingers_in_a_closed_job, nodes=(3, 16), seed=76618),
    Bug("what an agent said before it was started again keeps a node out", "M8", never_reminds, nodes=(3, 16), seed=69704),
    Bug("a repeat offender gets the place of a spare", "A6", prefers_offenders, seed=500),
)  # fmt: skip

MORE_SEEDS = 150


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_every_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mistake some seed breaks an invariant or gets stuck."""
    bug.patch(monkeypatch)
    for seed in range(bug.seed, bug.seed + MORE_SEEDS):
        if run_one(random_schedule(seed, *bug.nodes))[1] is not None:
            return
    pytest.fail(f"{bug.rule}: {bug.name}: not caught by {MORE_SEEDS} seeds from {bug.seed}")


def test_the_seeds_that_catch_bugs_are_clean_without_them() -> None:
    """A catch means the bug, not a seed that always fails."""
    for bug in BUGS:
        assert run_one(random_schedule(bug.seed, *bug.nodes))[1] is None, bug.name


def test_a_spent_tiebreak_that_counts_all_the_same_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A2. Only a certificate that is not true makes the difference, so this one has a scenario of its own."""
    scenario = Path(__file__).parent.parent / "scenarios" / "certified_dead_and_is_not.txt"
    head = scenario.read_text().partition(DASHES)[0]
    assert "VIOLATION" not in play(head)
    original = node.Node.is_quorum
    monkeypatch.setattr(node.Node, "is_quorum", lambda self, nodes, spent: original(self, nodes, ()))
    assert "VIOLATION" in play(head)


def test_a_launcher_that_is_taken_for_a_first_start_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10 b, open roster."""
    scenario = Path(__file__).parent.parent / "scenarios" / "first_contact_forgets_open.txt"
    head = scenario.read_text().partition(DASHES)[0]
    assert "VIOLATION" not in play(head)
    monkeypatch.setattr(bootstrap.Bootstrap, "_first_start", property(lambda _: True, lambda *_: None), raising=False)
    assert "VIOLATION" in play(head)


def test_a_door_that_is_never_barred_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """M8. No invariant is broken by coming and going for ever, but the job gets nowhere."""
    scenario = Path(__file__).parent.parent / "scenarios" / "one_way_between_two.txt"
    head = scenario.read_text().partition(DASHES)[0]
    assert play(head).count("n00  view") == 3
    monkeypatch.setattr(convening, "barred", lambda _: frozenset())
    assert play(head).count("n00  view") > 10
