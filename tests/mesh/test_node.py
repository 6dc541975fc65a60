"""The composed agent: doors, order of effects, starting over."""

import pytest

from hyperpodrun.agent.mesh.config import MeshConfig, S
from hyperpodrun.agent.mesh.effects import (
    Adopt,
    Effects,
    End,
    LeaveAsked,
    Permit,
    Persist,
    Send,
    StartWorkers,
    StopWorkers,
    WorkersFailed,
    WorkersGone,
)
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh.view import digest_of
from hyperpodrun.agent.wire.mesh import NOWHERE, ZERO, Ballot, Chain, Decided, Heartbeat, Member, Prepare, Pull, View, Vote
from hyperpodrun.agent.wire.rungs import Rules

ALONE = MeshConfig(slots=1, min_nodes=1, max_nodes=1, roster=("a",), first_contact="a")
PAIR = MeshConfig(slots=2, min_nodes=1, max_nodes=2, roster=("a", "b"), first_contact="a")


def run(node: Node, now: int, until: int) -> list[object]:
    """Tick it whenever it wants; everything it asked for."""
    effects: list[object] = []
    while node.next_deadline() <= until:
        now = max(now, node.next_deadline())
        effects += node.tick(now)
        node.validate()
    return effects


def kinds(effects: Effects | list[object]) -> list[type]:
    return [type(e) for e in effects if not isinstance(e, Send)]


def settled(view: View) -> Node:
    node = Node(PAIR, Member("a", 1), 7, 0)
    node.tick(0)
    node.receive(1, ("b", 2), Decided(view))
    return node


def view_of(number: int, parent: str, *members: Member, generation: int = 0) -> View:
    return View("c", 0, number, generation, parent, members, members[0].node, tuple(m.node for m in members), "run")


A, B = Member("a", 1, "active"), Member("b", 2, "active")


def test_alone_it_starts_at_once() -> None:
    node = Node(ALONE, Member("a", 1), 7, 0)
    effects = run(node, 0, 1 * S)
    assert [k for k in kinds(effects) if k in (Adopt, StartWorkers, Permit)] == [Adopt, StartWorkers, Permit]
    adopted = next(i for i, e in enumerate(effects) if isinstance(e, Adopt))
    assert isinstance(effects[adopted - 1], Persist)


def test_a_worker_failure_alone_restarts_and_the_budget_ends_the_job() -> None:
    node = Node(
        MeshConfig(slots=1, min_nodes=1, max_nodes=1, roster=("a",), first_contact="a", rules=Rules(max_restarts=1)),
        Member("a", 1),
        7,
        0,
    )
    run(node, 0, 1 * S)
    node.notify(1 * S, WorkersFailed(0, 3, "exit code 3"))
    effects = run(node, 1 * S, 2 * S)
    assert StopWorkers in kinds(effects)
    node.notify(2 * S, WorkersGone(0))
    run(node, 2 * S, 3 * S)
    assert node.view is not None and (node.view.generation, node.view.restarts, node.works.state) == (1, 1, "running")
    node.notify(3 * S, WorkersFailed(1, 3, "exit code 3"))
    (end,) = [e for e in run(node, 3 * S, 4 * S) if isinstance(e, End)]
    assert end.code == 3


def test_the_last_one_leaves_without_asking() -> None:
    node = Node(ALONE, Member("a", 1), 7, 0)
    run(node, 0, 1 * S)
    assert End in kinds(node.notify(1 * S, LeaveAsked()))


def test_a_view_that_does_not_follow_is_not_adopted_but_pulled() -> None:
    first = view_of(0, "", A, B)
    node = settled(first)
    later = view_of(2, "elsewhere", A, B)
    assert [e.message for e in node.receive(5, ("b", 2), Decided(later)) if isinstance(e, Send)] == [Pull("c", 0)]
    fork = view_of(1, "another parent", A, B)
    node.receive(6, ("b", 2), Decided(fork))
    assert node.view == first


def test_somebody_far_behind_jumps_and_assumes_a_fence() -> None:
    node = settled(view_of(0, "", A, B))
    node.receive(5, ("b", 2), Chain((view_of(9, "long ago", A, B, generation=4),)))
    assert node.view is not None and node.view.number == 9 and not node.works.fence_over(6)


def test_dropped_it_comes_back_under_another_incarnation() -> None:
    first = view_of(0, "", A, B)
    node = settled(first)
    effects = node.receive(5, ("b", 2), Decided(view_of(1, digest_of(first), B)))
    vote = next(e.vote for e in effects if isinstance(e, Persist))
    assert vote is not None and vote.view is None and vote.incarnation != 1 and node.view is None
    assert any("dropped" in text for _, _, text in node.story())


def test_restarted_with_its_file_it_is_who_it_was_and_tells_that_its_workers_are_gone() -> None:
    first = view_of(0, "", A, B)
    node = Node(PAIR, Member("a", 99), 7, 0, Vote(1, first))
    assert node.me().incarnation == 1 and node.view == first and node.agreement.spent
    assert [r.detail for r in node.reports.of("revived")] == ["the agent of a was restarted"]
    assert node.works.state == "none"


def test_a_stranger_s_roll_call_gets_no_vote() -> None:
    first = view_of(0, "", A, B)
    node = settled(first)
    effects = node.receive(5, ("b", 3), Prepare(NOWHERE, digest_of(first), Ballot(0, 1, "b", 3)))
    assert not any(isinstance(e, Persist) for e in effects) and node.agreement.promised == ZERO


def test_a_heartbeat_of_a_peer_at_the_same_place_costs_nothing() -> None:
    node = settled(view_of(0, "", A, B))
    assert node.receive(9, ("b", 2), Heartbeat(node.brief())) == ()


def test_without_a_quorum_it_says_whom_it_waits_for() -> None:
    """The host of the tiebreak is lost: people are told who must come back or be certified dead."""
    node = Node(PAIR, Member("b", 2), 7, 0)
    node.tick(0)
    node.receive(1, ("a", 1), Decided(view_of(0, "", A, B)))
    assert node.waits_for() == ()
    run(node, 1, 5 * S)
    assert node.waits_for() == ("a",)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_calls_give_the_same_effects(seed: int) -> None:
    one, other = (run(Node(ALONE, Member("a", 1), seed, 0), 0, 3 * S) for _ in range(2))
    assert one == other
