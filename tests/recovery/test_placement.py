"""Copies lie where a lost node does not take them along; versions come no more often than they may cost."""

from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.recovery.exchange import Exchange
from hyperpodrun.recovery.pace import BUDGET, Pace
from hyperpodrun.recovery.placement import Place, of_private, place
from hyperpodrun.recovery.plan import Offer


def sharded(nodes: str) -> list[Offer]:
    """A rank for each letter, on that node, each with a shard of its own."""
    return [Offer(rank, node, (f"shard {rank}",)) for rank, node in enumerate(nodes)]


def test_each_shard_has_a_buddy_on_another_node() -> None:
    assert place(sharded("aabb"), 2) == (
        Place("shard 0", 0, 2), Place("shard 1", 1, 3), Place("shard 2", 2, 0), Place("shard 3", 3, 1))  # fmt: skip


def test_what_lives_on_enough_nodes_is_not_copied() -> None:
    replicated = [Offer(rank, node, ("model",)) for rank, node in enumerate("aabb")]
    assert place(replicated, 2) == ()
    assert place([*replicated, Offer(4, "c", ("model",))], 3) == ()
    assert place([*replicated, Offer(4, "c", ("other",))], 3)[0] == Place("model", 0, 4)


def test_on_one_node_the_shared_memory_is_enough_unless_it_is_too_small() -> None:
    assert place(sharded("aaa"), 2) == ()
    assert {(p.owner, p.buddy) for p in place(sharded("aaa"), 2, {"a"})} == {(0, 1), (1, 2), (2, 0)}


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_no_two_copies_on_a_node(nodes: list[str], copies: int, shards: int) -> None:
    offers = [Offer(rank, node, (f"shard {rank % shards}",)) for rank, node in enumerate(nodes)]
    places = place(offers, copies)
    for shard in {offer.needs[0] for offer in offers}:
        live = {offer.node for offer in offers if shard in offer.needs}
        kept = [nodes[p.buddy] for p in places if p.shard == shard]
        assert len({*kept}) == len(kept) and not live & {*kept}
        wanted = min(max(0, copies - len(live)), len({*nodes} - live))
        assert len(kept) == wanted


@given(st.floats(0.001, 10), st.floats(0.0001, 10))
def test_versions_cost_less_than_the_budget(step_s: float, cost_s: float) -> None:
    pace = Pace()
    for step in range(50):
        pace.stepped(step * step_s)
    pace.cost(cost_s)
    every = pace.every()
    assert cost_s <= BUDGET * step_s * every * 1.02 + 2e-6 * every or every == 10_000
    assert every == 1 or cost_s > BUDGET * step_s * (every - 1) * 0.95 - 2e-6 * every


def test_no_version_is_begun_while_one_is_waited_for() -> None:
    pace = Pace()
    pace.begin(4)
    assert [pace.due(step, 3, waits=step == 8) for step in range(5, 12)] == [True, False, False, False, True, False, False]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.integers(2, 4))
def test_a_private_state_is_written_once_a_node_on_as_many_as_there_shall_be(nodes: list[str], copies: int) -> None:
    places = of_private(sharded("".join(nodes)), copies, Exchange(0, len(nodes), copies).keepers)
    for rank, node in enumerate(nodes):
        on = [node, *(nodes[one.buddy] for one in places if one.owner == rank)]
        assert len(on) == len(set(on)) == min(copies, len(set(nodes)))
    assert all(one.shard == f"rank {one.owner} of {len(nodes)}" for one in places)
