"""A1, A10: who may decide."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.quorum import is_genesis_quorum, is_quorum
from hyperpodrun.agent.sim import oracle
from hyperpodrun.agent.wire.mesh import Member, View


def view_of(nodes: str, tiebreak: str) -> View:
    return View("c", 0, 1, 0, "p", tuple(Member(node, 1) for node in nodes), tiebreak, tuple(nodes), "run")


@pytest.mark.parametrize(
    ("members", "tiebreak", "votes", "decides"),
    [
        ("a", "a", "a", True), ("a", "a", "", False), ("ab", "a", "a", True), ("ab", "a", "b", False), ("ab", "a", "ab", True),
        ("abc", "a", "a", False), ("abc", "a", "bc", True), ("abcd", "a", "ab", True), ("abcd", "a", "cd", False),
        ("abcd", "a", "bcd", True), ("abc", "a", "axyz", False), ("abcde", "e", "abc", True), ("abcde", "e", "de", False),
    ],
)  # fmt: skip
def test_majority_or_half_with_the_tiebreak(members: str, tiebreak: str, votes: str, decides: bool) -> None:
    assert is_quorum(view_of(members, tiebreak), set(votes), True) is decides


def test_a_spent_tiebreak_is_one_vote() -> None:
    assert not is_quorum(view_of("ab", "a"), {"a"}, False)
    assert is_quorum(view_of("ab", "a"), {"a", "b"}, False)


@pytest.mark.parametrize("nodes", ["a", "ab", "abc", "abcd", "abcde", "abcdef"])
def test_any_two_quorums_share_a_member(nodes: str) -> None:
    """Over all subsets, with and without the tiebreak."""
    view = view_of(nodes, nodes[0])
    subsets = [set(s) for size in range(len(nodes) + 1) for s in combinations(nodes, size)]
    quorums = [s for s in subsets if is_quorum(view, s, True)]
    assert quorums and all(a & b for a in quorums for b in quorums)
    assert all(s in quorums for s in subsets if is_quorum(view, s, False))


@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.sets(st.sampled_from("abcdefghxy")), st.data())
def test_agrees_with_the_oracle(members: set[str], votes: set[str], data: st.DataObject) -> None:
    view = view_of("".join(sorted(members)), data.draw(st.sampled_from(sorted(members))))
    assert is_quorum(view, votes, True) == oracle.quorum(view, votes)


@given(
    st.integers(1, 6), st.integers(0, 5), st.booleans(), st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"))
)
def test_two_groups_that_may_form_view_0_share_a_slot(
    least: int, more: int, closed: bool, one: set[str], other: set[str]
) -> None:
    slots = min(6, least + more)
    names = "abcdef"[:slots]
    config = MeshConfig(slots=slots, min_nodes=least, max_nodes=slots, roster=tuple(names) if closed else (), first_contact="a")
    one, other = one & set(names), other & set(names)
    assert is_genesis_quorum(config, one) == oracle.genesis_quorum(config, one)
    if is_genesis_quorum(config, one) and is_genesis_quorum(config, other):
        assert one & other
