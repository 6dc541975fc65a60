"""The soak: its plan and its judgement by themselves, and a short one for real."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "soak"))

import plan
import soak

ENTRY = plan.Entry(0, 0, 100, 0, 6, 3, 150_000, 0, 50, 26, 1, 15_000)


def entries(generations: int, ranks: int = 4) -> list[plan.Entry]:
    return [
        dataclasses.replace(ENTRY, generation=generation, rank=rank, pid=100 + rank)
        for generation in range(generations)
        for rank in range(ranks)
    ]


def judged(found: list[plan.Entry], hit: list[plan.Order] | None = None, generations: int = 60) -> list[str]:
    reduced = {generation: {0, 1, 2, 3} for generation in range(generations)}
    return plan.complaints(found, reduced, hit or [], 4, generations - 1)


def test_the_plan_is_its_seeds() -> None:
    assert plan.plan(60, 4, 3) == plan.plan(60, 4, 3) != plan.plan(60, 4, 4)


def test_each_generation_has_a_fault_and_the_witness_keeps_its_process() -> None:
    for seed in range(8):
        orders = plan.plan(100, 4, seed)
        assert {order.generation for order in orders} == set(range(100))
        assert not [order for order in orders if order.rank == seed % 4 and order.costs_a_process]
        assert {order.kind for order in plan.plan(2000, 4, seed)} == {*plan.IN_PLACE, *plan.COSTS_A_PROCESS}


def test_nothing_is_said_where_all_holds() -> None:
    assert judged(entries(60)) == []


def test_a_process_may_go_only_when_it_was_struck() -> None:
    moved = [dataclasses.replace(e, pid=900) if e.rank == 2 and e.generation >= 30 else e for e in entries(60)]
    assert judged(moved) == ["rank 2 lost its process between generations 29 and 30"]
    assert judged(moved, [plan.Order(29, 2, "sigkill", "step=3")]) == []
    assert judged(moved, [plan.Order(29, 2, "exception", "phase=aborting")]) == []
    assert judged(moved, [plan.Order(29, 2, "exception", "step=3")]) != []
    assert judged(moved, [plan.Order(29, 1, "sigkill", "step=3"), plan.Order(30, 2, "sigkill", "step=3")]) != []


def test_nodes_are_struck_from_outside_but_never_the_witnesss() -> None:
    assert plan.strikes(100, 4, 1, seed=1) == []
    for seed in range(8):
        strikes = plan.strikes(100, 6, 3, seed)
        assert len(strikes) > 10 and {strike.kind for strike in strikes} == {"agent", "node"}
        assert all(strike.rank // 2 != seed % 6 // 2 for strike in strikes)
    moved = [dataclasses.replace(e, pid=900) if e.rank == 2 and e.generation >= 30 else e for e in entries(60)]
    assert judged(moved, [plan.Order(29, 2, "node-lost", "outside")]) == []


def test_a_generation_may_be_over_before_anybody_is_in() -> None:
    without = [entry for entry in entries(60) if entry.generation != 7]
    reduced = {generation: {0, 1, 2, 3} for generation in range(60) if generation != 7}
    assert plan.complaints(without, reduced, [], 4, 59, nodes=2) == []
    assert plan.complaints(without, reduced, [], 4, 59) == ["nobody entered the generations [7]"]
    at_the_door = plan.Order(7, 0, "exception", "phase=enter")
    assert plan.complaints(without, reduced, [at_the_door], 4, 59) == []


def test_a_rank_that_was_left_out_is_named() -> None:
    without = [entry for entry in entries(60) if (entry.generation, entry.rank) != (7, 3)]
    assert "ranks [3] are not in generation 7" in judged(without)[0]
    assert "nobody entered the generations [7]" in judged([entry for entry in entries(60) if entry.generation != 7])[-1]
    assert "twice" in judged([*entries(60), dataclasses.replace(ENTRY, generation=5)])[0]


@pytest.mark.parametrize("what, step", [("fds", 1), ("threads", 1), ("rss_kib", 1000), ("shm", 1), ("agent_fds", 1)])
def test_growth_is_told(what: str, step: int) -> None:
    grown = [dataclasses.replace(e, **{what: getattr(e, what) + step * e.generation}) if e.rank == 0 else e for e in entries(60)]
    (complaint,) = judged(grown)
    assert complaint.startswith(f"{what} of rank 0")


@pytest.mark.processes
@pytest.mark.torch
@pytest.mark.slow
def test_forty_faults_in_one_job(tmp_path: Path) -> None:
    outcome = soak.Soak(faults=40, seed=1).run(tmp_path)
    print(outcome["command"], (tmp_path / "output").read_text(), sep="\n")  # shown when it fails
    assert outcome["complaints"] == []
    assert outcome["faults struck"] >= 40
    assert len(set(outcome["by kind"])) >= 5
