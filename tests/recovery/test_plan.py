"""The plan never mixes steps, uses what there is, and says why when there is nothing."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hyperpodrun.recovery.plan import (
    STRIPE_BYTES,
    Contradiction,
    Fetch,
    Holding,
    Infeasible,
    Kind,
    Offer,
    Plan,
    feasible,
    longest,
    make,
    restart,
    valid,
)


def live(shard: str, step: int, nbytes: int = 100, kind: Kind = "live", layout: str = "a", content: str = "") -> Holding:
    return Holding(shard, step, kind, nbytes, layout, content)


def private(rank: int, *steps: int) -> tuple[Holding, ...]:
    return tuple(live(f"rank {rank}", step, 10) for step in steps)


def ddp(rank: int, step: int | None, node: str = "a", more: tuple[Holding, ...] = ()) -> Offer:
    """A rank of a data-parallel job that is whole after `step`, or has nothing."""
    own = () if step is None else (live("model", step), *private(rank, step))
    return Offer(rank, node, ("model", f"rank {rank}"), (*own, *more))


def test_nothing_is_fetched_when_all_are_whole() -> None:
    made = make([ddp(0, 7), ddp(1, 7)])
    assert isinstance(made, Plan)
    assert (made.step, made.fetches, made.waves) == (7, (), 1)


def test_a_lost_rank_gets_the_model_from_a_peer_and_its_own_state_from_its_buddy() -> None:
    made = make([ddp(0, 7, more=private(1, 7, 6)), ddp(1, None)])
    assert isinstance(made, Plan) and made.step == 7
    assert made.of(1) == (Fetch(1, "model", 0, "live", 0, 100), Fetch(1, "rank 1", 0, "live", 0, 10))
    assert made.from_rank(0) == made.of(1) and made.of(0) == ()


def test_the_step_before_is_taken_when_a_private_state_is_not_held_at_the_newest() -> None:
    offers = [ddp(0, 7, more=private(1, 6)), ddp(1, None), ddp(2, 6, more=private(0, 6))]
    made = make(offers)
    assert isinstance(made, Plan) and made.step == 6
    assert {(f.rank, f.shard, f.source) for f in made.fetches} == {
        (0, "model", 2), (0, "rank 0", 2), (1, "model", 2), (1, "rank 1", 0)}  # fmt: skip
    assert "step 7 is not whole" in made.why


def test_the_nearest_holder_is_asked() -> None:
    offers = [
        ddp(0, 3, "a"),
        ddp(1, 3, "b"),
        ddp(2, None, "b"),
        ddp(3, None, "a"),
    ]
    held = tuple(holding for rank in (2, 3) for holding in private(rank, 3))
    offers[0] = ddp(0, 3, "a", held)
    made = make(offers)
    assert isinstance(made, Plan)
    assert {(f.rank, f.source) for f in made.fetches if f.shard == "model"} == {(2, 1), (3, 0)}


def test_shared_memory_of_the_own_node_beats_a_peer_far_away() -> None:
    made = make([ddp(0, 3, "a"), ddp(1, None, "b", (live("model", 3, kind="shm"), live("rank 1", 3, 10, "shm")))])
    assert isinstance(made, Plan)
    assert {(f.source, f.kind) for f in made.fetches} == {(1, "shm")}


def test_large_shards_are_fetched_from_several_holders_in_ranges_that_cover_them_once() -> None:
    nbytes = 10 * STRIPE_BYTES + 13
    offers = [Offer(rank, "a", ("model",), (live("model", 1, nbytes),)) for rank in range(3)]
    made = make([*offers, Offer(3, "a", ("model",))])
    assert isinstance(made, Plan)
    ranges = sorted((f.start, f.stop) for f in made.of(3))
    assert [ranges[0][0], ranges[-1][1]] == [0, nbytes] and len(ranges) == 3
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_takers_are_spread_over_holders() -> None:
    offers = [Offer(rank, "a", ("model",), (live("model", 1),) if rank < 4 else ()) for rank in range(12)]
    made = make(offers)
    assert isinstance(made, Plan)
    assert sorted(sum(f.source == rank for f in made.fetches) for rank in range(4)) == [2, 2, 2, 2]


def test_the_last_holder_of_the_version_before_is_overwritten_last() -> None:
    held = tuple(h for rank in (1, 2) for h in private(rank, 7, 6)) + private(0, 6)
    made = make([ddp(0, 7, more=held), ddp(1, 6), ddp(2, 6)])
    assert isinstance(made, Plan) and made.step == 7 and made.waves == 2
    assert {(f.rank, f.wave) for f in made.fetches if f.shard == "model"} == {(1, 0), (2, 1)}


def test_a_newer_stored_checkpoint_wins() -> None:
    offers = [Offer(rank, "a", ("model",), (live("model", 3), live("model", 9, kind="tiered"))) for rank in range(2)]
    made = make(offers)
    assert isinstance(made, Plan) and made.step == 9
    assert made.fetches == (Fetch(0, "model", 0, "tiered", 0, 100), Fetch(1, "model", 1, "tiered", 0, 100))


def test_what_a_restart_went_back_behind_is_void() -> None:
    """Rank 2's node was away while the job went back to step 4 and on to 6; it still has step 7 of before."""
    history = (restart(4, 1),)
    newest = Holding("model", 6, "live", 100, lineage=1, since=history[0])
    now = [Offer(rank, "a", ("model",), (newest,), histories=(history,)) for rank in range(2)]
    away = Offer(2, "b", ("model",), (live("model", 7), live("model", 4, kind="shm")))
    made = make([*now, away])
    assert isinstance(made, Plan) and (made.step, made.history) == (6, history)
    made = make([Offer(0, "a", ("model",), histories=(history,)), away])
    assert isinstance(made, Plan) and made.step == 4


@pytest.mark.parametrize("back", [-1, 3])
def test_nodes_that_went_on_apart_are_not_mixed(back: int) -> None:
    """Each restarted to the same step by itself; both have step 5 now, one the model and one the other part of it."""
    here, there = (restart(back, mark) for mark in (1, 2))
    offers = [
        Offer(
            rank,
            node,
            ("model", "other"),
            tuple(Holding(name, 5, "live", 100, lineage=1, since=since) for name in names),
            histories=((since,),),
        )
        for rank, (node, since, names) in enumerate([("a", here, ["model"]), ("b", there, ["model", "other"])])
    ]
    both, one = make(offers), make(offers[:1])
    assert isinstance(one, Infeasible) and one.history == (here,)
    assert isinstance(both, Plan) and both.history == (there,)
    assert {fetch.source for fetch in both.fetches} == {1} and both.of(0)
    assert {fetch.rank for fetch in both.fetches if fetch.shard == "model"} == {0}


@pytest.mark.parametrize("marks", [(1, 2), (2, 1)])
@pytest.mark.parametrize("known", [False, True])
def test_of_equally_long_timelines_that_with_the_newest_whole_step_goes_on(marks: tuple[int, int], known: bool) -> None:
    """A node begins anew while the others are away, and step 5 of it is stored; they come back with step 3 in shared memory."""
    ahead, away = (restart(-1, mark) for mark in marks)
    stored = Holding("model", 5, "tiered", 100, lineage=1, since=ahead)
    kept = Holding("model", 3, "shm", 100, lineage=1, since=away)
    half = Holding("model", 9, "shm", 100, lineage=1, since=away)
    offers = [
        Offer(0, "a", ("model", "other"), (stored, replace(stored, shard="other")), histories=((ahead,),)),
        Offer(1, "b", ("model", "other"), (kept, half, replace(kept, shard="other")), histories=((away,),)),
    ]
    if known:  # all see the stored one
        offers = [replace(offer, histories=longest([(ahead,), (away,)])) for offer in offers]
    made = make(offers)
    assert isinstance(made, Plan) and (made.step, made.history) == (5, (ahead,))
    history, counted = valid(offers)
    assert history == (ahead,) and [len(offer.holdings) for offer in counted] == [2, 0]
    assert make(counted) == made


def world(size: int, old: int, step: int, samplers: str = "") -> list[Offer]:
    """`size` ranks, each holding the model and all private states of a world of `old`."""
    states = [Holding(f"rank {rank} of {old}", step, "live", 10, content=samplers[rank : rank + 1]) for rank in range(old)]
    return [Offer(rank, "a", ("model",), (live("model", step), *states), world=size) for rank in range(size)]


@pytest.mark.parametrize(("size", "old"), [(3, 4), (4, 3), (1, 2), (4, 4)])
def test_a_world_of_another_size_goes_on_with_the_old_ones_private_states(size: int, old: int) -> None:
    made = make(world(size, old, 5))
    assert isinstance(made, Plan) and (made.step, made.world) == (5, old)


def test_the_newest_step_wins_whatever_the_size_of_its_world() -> None:
    offers = [
        msgspec.structs.replace(offer, holdings=offer.holdings + old.holdings)
        for offer, old in zip(world(3, 3, 4), world(3, 4, 7), strict=True)
    ]
    made = make(offers)
    assert isinstance(made, Plan) and (made.step, made.world) == (7, 4)


def test_samplers_that_differ_cannot_change_worlds() -> None:
    assert isinstance(make(world(4, 4, 5, "abcd")), Plan)
    assert isinstance(make(world(3, 4, 5, "aaaa")), Plan)
    with pytest.raises(Contradiction, match=r"samplers' states after step 5 differ .*whole job"):
        make(world(3, 4, 5, "aaba"))


def pieces(step: int, *places: int, of: int = 4, common: bool = False) -> tuple[Holding, ...]:
    """Shards of a world of that many, all of one family."""
    shards = tuple(Holding(f"shard {place} of {of}", step, "live", 100, family=f"f{of}", members=of) for place in places)
    return (*shards, *(live(f"common shard {place} of {of}", step, 10) for place in places if common))


def cut(rank: int, *held: Holding, of: int = 3, common: bool = False) -> Offer:
    """A rank of a world in which the state is cut in other shards."""
    return Offer(rank, "a", (f"shard {rank} of {of}", *([f"common shard {rank} of {of}"] if common else [])), held)


def test_shards_of_another_world_are_made_of_a_whole_family() -> None:
    made = make([cut(0, *pieces(7, 0, 1)), cut(1, *pieces(7, 2)), cut(2, *pieces(7, 3))])
    assert isinstance(made, Plan) and (made.step, made.fetches) == (7, ())
    assert made.members == tuple(f"shard {place} of 4" for place in range(4))
    assert (
        made.why
        == "each rank makes its shard of the state after step 7 of all 4 shards of the earlier layout, from peers' memory"
    )


def test_the_step_at_which_all_members_are_held_is_taken() -> None:
    made = make([cut(0, *pieces(7, 0, 1), *pieces(6, 0, 1)), cut(1, *pieces(7, 2), *pieces(6, 2)), cut(2, *pieces(6, 3))])
    assert isinstance(made, Plan) and made.step == 6 and "step 7 is not whole" in made.why


def test_members_of_two_worlds_are_not_mixed() -> None:
    made = make([cut(0, *pieces(7, 0, 1, of=2), *pieces(6, 0)), cut(1, *pieces(6, 1, 2)), cut(2, *pieces(6, 3), *pieces(8, 0))])
    assert isinstance(made, Plan) and (made.step, made.members) == (7, ("shard 0 of 2", "shard 1 of 2"))


def test_a_common_state_comes_from_any_member() -> None:
    held = [*pieces(7, 0, 1, 2), *pieces(7, 3, common=True)]
    made = make([cut(0, *held, common=True), cut(1, common=True), cut(2, common=True)])
    assert isinstance(made, Plan) and made.common == "common shard 3 of 4"
    assert {(fetch.rank, fetch.shard) for fetch in made.fetches} == {(rank, made.common) for rank in (1, 2)}
    without = make([cut(0, *pieces(7, 0, 1, 2, 3), common=True), cut(1, common=True), cut(2, common=True)])
    assert (
        without.why
        == "the shards of the earlier layout are held after step 7, but not what else is needed (private or common states)"
    )


def test_what_is_needed_as_it_is_comes_before_what_could_be_made() -> None:
    held = [*pieces(7, 0, 1, 2, 3), *pieces(7, 0, 1, 2, of=3)]
    made = make([cut(rank, *held) for rank in range(3)])
    assert isinstance(made, Plan) and (made.step, made.members, made.fetches) == (7, (), ())


def test_members_that_differ_are_refused() -> None:
    other = msgspec.structs.replace(pieces(7, 0)[0], content="y")
    first = msgspec.structs.replace(other, content="x")
    with pytest.raises(Contradiction, match="replica_group"):
        make([cut(0, first, *pieces(7, 1, 2, 3)), cut(1, other)])


@pytest.mark.parametrize("other", [live("model", 3, layout="b"), live("model", 3, 99), live("model", 3, content="y")])
def test_ranks_that_are_no_replicas_are_refused(other: Holding) -> None:
    offers = [Offer(0, "a", ("model",), (live("model", 3, content="x"),)), Offer(1, "a", ("model",), (other,))]
    with pytest.raises(Contradiction, match=r"(?s)ranks 0 and 1 .*replica_group"):
        make(offers)


def test_it_says_what_is_missing() -> None:
    assert feasible([ddp(0, None), ddp(1, None)]) == (
        False, "no memory holds a state (the job is new, or all copies were lost at once)")  # fmt: skip
    assert feasible([ddp(0, 3), ddp(1, None)]) == (False, "no memory holds rank 1 any more: all its copies were lost at once")
    assert feasible([ddp(0, 3), ddp(1, None, more=private(1, 2))]) == (
        False, "each shard is held after some step, but no step has all of them (newest: step 3)")  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> list[Offer]:
    count = draw(st.integers(1, 6))
    shards = [f"shard {i}" for i in range(draw(st.integers(1, 3)))]
    offers = []
    for rank in range(count):
        needs = (draw(st.sampled_from(shards)), f"rank {rank}")
        keys = st.sampled_from([*shards, *(f"rank {other}" for other in range(count))])
        held = draw(
            st.lists(st.tuples(keys, st.integers(0, 2), st.sampled_from(["live", "copy", "shm"])), max_size=8, unique=True)
        )
        holdings = tuple(Holding(shard, step, kind, 1 << 27) for shard, step, kind in held)
        offers.append(Offer(rank, draw(st.sampled_from("abc")), needs, holdings))
    return offers


@given(worlds(), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_any_world(offers: list[Offer], chance: random.Random) -> None:
    made = make(offers)
    shuffled = offers[:]
    chance.shuffle(shuffled)
    assert make(shuffled) == made
    held = {(h.shard, h.step) for offer in offers for h in offer.holdings}
    needed = {shard for offer in offers for shard in offer.needs}
    whole = [step for step in range(3) if all((shard, step) in held for shard in needed)]
    if isinstance(made, Infeasible):
        assert not whole
        return
    assert made.step == max(whole)
    for offer in offers:
        mine = {(h.shard, h.step, h.kind) for h in offer.holdings}
        for shard in offer.needs:
            parts = sorted((f.start, f.stop) for f in made.of(offer.rank) if f.shard == shard)
            if (shard, made.step, "live") in mine:
                assert not parts
                continue
            assert parts[0][0] == 0 and parts[-1][1] == 1 << 27
            assert all(a[1] == b[0] for a, b in pairwise(parts))
    for fetch in made.fetches:
        source = next(offer for offer in offers if offer.rank == fetch.source)
        assert any((h.shard, h.step, h.kind) == (fetch.shard, made.step, fetch.kind) for h in source.holdings)
