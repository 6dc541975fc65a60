"""A2, A4, A5, A7: one decision."""

import random
from collections.abc import Collection, Mapping

from hyperpodrun.agent.mesh.agreement import Agreement
from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.effects import Effect, Persist, Send
from hyperpodrun.agent.mesh.quorum import is_quorum
from hyperpodrun.agent.wire.mesh import (
    NOWHERE,
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
    View,
    Vote,
)

CONFIG = MeshConfig(slots=3, min_nodes=1, max_nodes=3)
VIEW = View("c", 0, 1, 0, "p", tuple(Member(n, 1, "active") for n in "abc"), "a", ("a", "b", "c"), "run")
NEXT = View("c", 0, 2, 1, "d", VIEW.members, "a", VIEW.order, "run")
OTHER = View("c", 0, 2, 0, "d", VIEW.members, "a", VIEW.order, "hold")


class Voters:
    """The council of a test: `value` is what it chooses, `slow` whom it waits for."""

    def __init__(self, node: str) -> None:
        self.node, self.value, self.slow = node, NEXT, ""

    def me(self) -> Member:
        return Member(self.node, 1)

    def brief(self) -> Brief:
        return NOWHERE

    def is_quorum(self, nodes: Collection[str], spent: Collection[str]) -> bool:
        return is_quorum(VIEW, nodes, VIEW.tiebreak not in spent)

    def electorate(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def awaited(self, answered: Collection[str]) -> bool:
        return any(node not in answered for node in self.slow)

    def choose(self, now: int, promises: Mapping[str, Promise]) -> View | None:
        return self.value

    def testimony(self) -> tuple[Item, ...]:
        return ()


def agreement(node: str, vote: Vote | None = None) -> Agreement:
    made = Agreement(CONFIG, (node, 1), Voters(node), random.Random(1))
    made.begin(0, VIEW, "d", vote)
    return made


def sent(effects: list[Effect], kind: type) -> list[object]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def promise(ballot: Ballot, accepted: Accepted | None = None) -> Promise:
    return Promise("d", ballot, accepted, False, Member("b", 1))


def test_a_promise_is_on_disk_before_it_is_told() -> None:
    effects = agreement("b").on_prepare(5, ("a", 1), Prepare(NOWHERE, "d", Ballot(0, 1, "a", 1)))
    assert [type(e) for e in effects] == [Persist, Send]
    assert effects[0].vote.promised == Ballot(0, 1, "a", 1)  # type: ignore[union-attr]


def test_a_lower_ballot_gets_a_nack_and_nothing_is_written() -> None:
    voter = agreement("b")
    voter.on_prepare(5, ("a", 1), Prepare(NOWHERE, "d", Ballot(0, 7, "a", 1)))
    low = Ballot(0, 6, "c", 1)
    for effects in (
        voter.on_prepare(6, ("c", 1), Prepare(NOWHERE, "d", low)),
        voter.on_accept(6, ("c", 1), Accept("d", low, NEXT)),
    ):
        assert [type(e.message) for e in effects if isinstance(e, Send)] == [Nack] and len(effects) == 1


def test_a_free_choice_needs_a_quorum_of_promises() -> None:
    proposer = agreement("a")
    ballot = proposer.propose(0)[1].message.ballot  # type: ignore[union-attr]
    assert proposer.phase == "roll"
    effects = proposer.on_promise(1, ("b", 1), promise(ballot))
    assert isinstance(effects[0], Persist) and [m.view for m in sent(effects, Accept)] == [NEXT, NEXT]  # type: ignore[attr-defined]
    proposer.on_accepted(("b", 1), AcceptedMsg("d", ballot, False))
    assert proposer.decision == NEXT


def test_the_accepted_value_of_the_highest_ballot_is_mandatory() -> None:
    proposer = agreement("a")
    ballot = proposer.propose(0)[1].message.ballot  # type: ignore[union-attr]
    effects = proposer.on_promise(1, ("b", 1), promise(ballot, Accepted(Ballot(0, 0, "b", 1), OTHER)))
    assert {m.view for m in sent(effects, Accept)} == {OTHER}  # type: ignore[attr-defined]


def test_what_a_quorum_is_seen_to_have_accepted_is_decided() -> None:
    """b accepted what c proposed, and c had accepted it itself: that is a quorum, though c told nobody."""
    proposer = agreement("a")
    ballot = proposer.propose(0)[1].message.ballot  # type: ignore[union-attr]
    proposer.on_promise(1, ("b", 1), promise(ballot, Accepted(Ballot(0, 0, "c", 1), OTHER)))
    assert proposer.decision == OTHER and proposer.phase == "idle"


def test_the_roll_call_waits_for_the_unsuspected_but_not_for_ever() -> None:
    proposer = agreement("a")
    proposer._council.slow = "c"  # type: ignore[attr-defined]
    ballot = proposer.propose(0)[1].message.ballot  # type: ignore[union-attr]
    assert proposer.on_promise(1, ("b", 1), promise(ballot)) == []
    assert proposer.due_ns() == 100 * MS and sent(proposer.tick(100 * MS), Prepare) != []
    assert sent(proposer.tick(1 + CONFIG.roll_ns), Accept) != []


def test_without_a_quorum_the_ballot_is_given_up_and_backed_off() -> None:
    proposer = agreement("a")
    proposer.propose(0)
    proposer.tick(1 * S)
    assert proposer.phase == "idle" and proposer.not_before_ns > 1 * S and proposer.tries == 1


def test_a_spent_tiebreak_alone_is_no_quorum() -> None:
    two = View("c", 0, 1, 0, "p", VIEW.members[:2], "a", ("a", "b"), "run")
    proposer = agreement("a", Vote(1, two))
    proposer._council.is_quorum = lambda nodes, spent: is_quorum(two, nodes, "a" not in spent)  # type: ignore[method-assign]
    assert proposer.spent and sent(proposer.propose(0), Accept) == [] and proposer.phase == "roll"


FOUR = View("c", 0, 1, 0, "p", tuple(Member(n, 1, "active") for n in "abcd"), "a", ("a", "b", "c", "d"), "run")


def half(spent: bool = False) -> tuple[Agreement, list[Effect]]:
    """b proposes among four, and of the others only a answers, whose tiebreak makes a quorum of the two."""
    proposer = agreement("b")
    proposer._council.is_quorum = lambda nodes, spent: is_quorum(FOUR, nodes, "a" not in spent)  # type: ignore[method-assign]
    ballot = proposer.propose(0)[1].message.ballot  # type: ignore[union-attr]
    return proposer, proposer.on_promise(1, ("a", 1), Promise("d", ballot, None, spent, Member("a", 1)))


def test_a_voter_that_has_spent_its_tiebreak_makes_no_half_a_quorum() -> None:
    proposer, effects = half()
    ballot = sent(effects, Accept)[0].ballot  # type: ignore[attr-defined]
    proposer.on_accepted(("a", 1), AcceptedMsg("d", ballot, True))
    assert proposer.decision is None
    proposer.on_accepted(("c", 1), AcceptedMsg("d", ballot, False))
    assert proposer.decision == NEXT
    assert sent(half(spent=True)[1], Accept) == []


def test_who_counted_a_half_may_have_spent_the_tiebreak_since() -> None:
    """a proposed and d accepted it: whether a's tiebreak counted then nobody can say, so it is no decision; c's word makes it one."""
    proposer = agreement("b")
    proposer._council.is_quorum = lambda nodes, spent: is_quorum(FOUR, nodes, "a" not in spent)  # type: ignore[method-assign]
    ballot = proposer.propose(0)[1].message.ballot  # type: ignore[union-attr]
    value = Accepted(Ballot(0, 0, "a", 1), OTHER)
    proposer.on_promise(1, ("d", 1), Promise("d", ballot, value, False, Member("d", 1)))
    assert proposer.decision is None and proposer.phase == "roll"
    proposer.on_promise(2, ("c", 1), Promise("d", ballot, value, False, Member("c", 1)))
    assert proposer.decision == OTHER


def test_a_restarted_proposer_never_uses_its_ballot_again() -> None:
    proposer = agreement("a")
    effects = proposer.propose(0)
    again = agreement("a", effects[0].vote)  # type: ignore[union-attr]
    assert again.propose(1)[1].message.ballot > effects[1].message.ballot  # type: ignore[union-attr]


def test_a_candidate_steps_back_while_another_is_at_it() -> None:
    """Two that interrupt each other would never decide when nobody answers at once."""
    one = agreement("b")
    ask = Prepare(NOWHERE, "d", Ballot(0, 9, "c", 1))
    for at in (0, 100 * MS, 200 * MS):
        one.on_prepare(at, ("c", 1), ask)
        assert one.not_before_ns == at + CONFIG.yield_ns


def test_a_higher_ballot_ends_a_roll_call() -> None:
    proposer = agreement("a")
    proposer.propose(0)
    proposer.on_prepare(1, ("c", 1), Prepare(NOWHERE, "d", Ballot(0, 9, "c", 1)))
    assert proposer.phase == "idle"
    proposer.validate()


def test_a_recovery_opens_a_new_epoch() -> None:
    effects = agreement("a").propose(0, recover=True)
    assert effects[1].message.ballot.epoch == VIEW.epoch + 1  # type: ignore[union-attr]
