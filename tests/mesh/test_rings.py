"""M1, M4: who watches whom."""

import pytest

from hyperpodrun.agent.mesh.rings import rings
from hyperpodrun.agent.mesh.view import candidates


def named(count: int) -> tuple[str, ...]:
    return tuple(f"n{i:04d}" for i in range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 11, 12, 40, 300])
def test_each_has_k_observers_and_k_subjects(count: int) -> None:
    made = rings(named(count), 10)
    assert made.k == min(10, count - 1)
    for node in named(count):
        assert sum(made.observers[node].values()) == sum(made.subjects[node].values()) == made.k
        assert node not in made.observers[node]


@pytest.mark.parametrize("count", [2, 6, 11])
def test_up_to_eleven_everyone_observes_everyone_once(count: int) -> None:
    made = rings(named(count), 10)
    assert all(made.observers[n] == {m: 1 for m in named(count) if m != n} for n in named(count))


@pytest.mark.parametrize(("count", "low", "high"), [(2, 1, 1), (3, 1, 2), (4, 1, 3), (5, 2, 4), (11, 3, 8), (1024, 3, 8)])
def test_the_marks_of_the_filter(count: int, low: int, high: int) -> None:
    made = rings(named(count), 10)
    assert (made.low, made.high) == (low, high)


def test_one_step_of_gossip_reaches_many_and_four_reach_all_of_a_thousand() -> None:
    """An expander: the rings are no lattice."""
    made = rings(named(1000), 10)
    reached = {"n0000"}
    for _ in range(4):
        reached |= {o for n in reached for o in made.observers[n]}
    assert len(reached) == 1000


def test_candidates_differ_from_view_to_view_and_agree_between_nodes() -> None:
    nodes = named(20)
    assert candidates("one", nodes) == candidates("one", nodes)
    assert sorted(candidates("one", nodes)) == list(nodes)
    assert len({candidates(f"view {i}", nodes)[0] for i in range(40)}) > 10
