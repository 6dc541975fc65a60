"""A6: who holds which ranks."""

from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.ranks import assign, first_world
from hyperpodrun.agent.mesh.view import ranks_of
from hyperpodrun.agent.sim import oracle
from hyperpodrun.agent.wire.mesh import Member, View


def members(text: str) -> tuple[Member, ...]:
    """'a1 b2': nodes a and b of groups 1 and 2."""
    return tuple(Member(word[0], 1, group=word[1:]) for word in text.split())


def test_survivors_keep_their_places_and_a_spare_of_the_same_group_fills_the_hole() -> None:
    lost = {"b": Member("b", 1, group="2")}
    assert assign(("a", "b", "c"), lost, members("a1 c1 x1 y2"), 3, 3, False) == ("a", "y", "c")


def test_a_spare_of_another_group_is_better_than_none() -> None:
    assert assign(("a", "b"), {"b": Member("b", 1, group="2")}, members("a1 x9"), 2, 2, False) == ("a", "x")


def test_a_node_that_is_back_gets_its_own_place() -> None:
    assert assign(("a", "b", "c"), {"b": Member("b", 1)}, members("a b c x"), 3, 3, False) == ("a", "b", "c")


def test_a_hole_that_nobody_fills_closes_if_enough_are_left() -> None:
    assert assign(("a", "b", "c"), {}, members("a c"), 2, 3, False) == ("a", "c")
    assert assign(("a", "b", "c"), {}, members("a c"), 3, 3, False) is None


def test_the_world_grows_at_its_end_and_only_when_it_may() -> None:
    assert assign(("a",), {}, members("a b c"), 1, 2, True) == ("a", "b")
    assert assign(("a",), {}, members("a b c"), 1, 2, False) == ("a",)


def test_a_spare_with_another_number_of_workers_does_not_fill_a_hole() -> None:
    here = (Member("a", 1, nproc=8), Member("x", 1, nproc=4))
    assert assign(("a", "b"), {"b": Member("b", 1, nproc=8)}, here, 1, 2, False) == ("a",)


def test_wishes_are_places_in_the_first_world() -> None:
    found = first_world((Member("a", 1), Member("b", 1, wish=0), Member("c", 1, wish=0), Member("d", 1, wish=9)), 4)
    assert found == ("b", "a", "c", "d")


def test_ranks_of_a_node_are_consecutive() -> None:
    world = (Member("a", 1, "active", 2), Member("b", 1, "active", 3))
    view = View("c", 0, 0, 0, "", world, "a", ("b", "a"), "run")
    assert ranks_of(view) == {"b": range(3), "a": range(3, 5)}
    assert oracle.ranks(view) == {0: "b", 1: "b", 2: "b", 3: "a", 4: "a"}


NODES = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(NODES.filter(bool), NODES, st.lists(st.sampled_from("12"), min_size=8, max_size=8), st.integers(1, 4), st.booleans())
def test_agrees_with_the_oracle(order: list[str], here: list[str], groups: list[str], least: int, grow: bool) -> None:
    group = dict(zip("abcdefgh", groups, strict=True))
    old = tuple(Member(n, 1, group=group[n]) for n in sorted(order))
    new = tuple(Member(n, 1, group=group[n]) for n in sorted(here))
    most = max(least, len(order))
    world = assign(tuple(order), {m.node: m for m in old}, new, least, most, grow)
    if world is None:
        assert len(here) < least
        return
    before = View("c", 0, 0, 0, "", old, order[0], tuple(order), "run")
    after = View("c", 0, 1, 1, "", new, here[0], world, "run")
    must = oracle.world_after(MeshConfig(slots=8, min_nodes=least, max_nodes=most), before, after)
    assert list(world[: len(must)]) == must and len(set(world)) == len(world) and set(world) <= set(here)
