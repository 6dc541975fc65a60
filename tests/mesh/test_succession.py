"""A5, A8, A9: from a roll call to the next view."""

import msgspec
import pytest

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.succession import RollCall, genesis, successor
from hyperpodrun.agent.mesh.view import validate
from hyperpodrun.agent.wire.mesh import Member, Report, View

CONFIG = MeshConfig(slots=5, min_nodes=2, max_nodes=3, roster=tuple("abcde"), first_contact="a", max_restarts=2)
START = genesis(CONFIG, tuple(Member(n, 1) for n in "abcd"), "chain")
FAILED = Report("failed", ("b", 1), 0, 7, "exit code 7")


def after(view: View = START, config: MeshConfig = CONFIG, **roll: object) -> View | None:
    facts = {"answered": frozenset("abcd"), "started": True, "fence_over": True, "settled": True, **roll}
    nxt = successor(config, view, "digest", RollCall(**facts))  # type: ignore[arg-type]
    if nxt is not None:
        validate(nxt)
        assert nxt.parent == "digest" and nxt.number == view.number + 1
    return nxt


def changed(**roll: object) -> View:
    nxt = after(**roll)  # type: ignore[arg-type]
    assert nxt is not None
    return nxt


def test_nothing_changed_is_no_view() -> None:
    assert after() is None


def test_view_0_fences_the_slots_that_are_not_in_it() -> None:
    assert START.order == ("a", "b", "c") and START.fence == ("e",)
    assert genesis(CONFIG, tuple(Member(n, 1) for n in "abcde"), "chain").fence == ()


def test_silent_alone_or_accused_alone_stays_and_both_is_dropped() -> None:
    assert after(answered=frozenset("acd")) is None
    assert after(accused=frozenset("b")) is None
    nxt = changed(answered=frozenset("acd"), accused=frozenset("b"))
    assert nxt.order == ("a", "d", "c") and nxt.generation == 1 and nxt.fence == ("b",)


def test_one_way_links_drop_even_a_member_that_answers() -> None:
    assert changed(convicted=frozenset("b")).order == ("a", "d", "c")


def test_a_leaver_needs_no_fence_and_a_spare_no_restart() -> None:
    assert changed(leaving=frozenset("b")).fence == ()
    nxt = changed(answered=frozenset("abc"), accused=frozenset("d"))
    assert (nxt.generation, nxt.order, nxt.fence) == (0, START.order, ())


def test_a_slot_with_a_new_incarnation_confirms_that_the_old_workers_are_gone() -> None:
    nxt = changed(joiners=(Member("b", 2),))
    assert nxt.fence == () and nxt.order == ("a", "b", "c") and nxt.generation == 1


def test_the_fence_is_carried_until_it_is_over_or_the_slot_is_back() -> None:
    lost = changed(answered=frozenset("acd"), accused=frozenset("b"))
    kept = after(lost, fence_over=False, failures=(FAILED,))
    assert kept is not None and kept.fence == ("b",)
    over = after(lost, fence_over=True, failures=(FAILED,))
    assert over is not None and over.fence == ()
    back = after(lost, fence_over=False, joiners=(Member("b", 2),))
    assert back is not None and back.fence == ()


def test_a_world_of_which_nobody_is_known_to_have_stopped_is_a_ghost() -> None:
    assert changed(failures=(FAILED,)).ghosts == (("a", "b", "c"),)
    assert changed(leaving=frozenset("b")).ghosts == ()
    first = changed(failures=(FAILED,))
    second = after(first, answered=frozenset("acd"), accused=frozenset("b"), started=False, settled=False)
    assert second is not None and second.ghosts == (("a", "b", "c"),)
    started = after(second, failures=(FAILED,), started=True)
    assert started is not None and started.ghosts == (("a", "d", "c"),)


def test_too_few_hold_and_enough_run_again_in_a_new_generation() -> None:
    held = changed(answered=frozenset("a"), accused=frozenset("bcd"))
    assert (held.mode, held.generation, held.order) == ("hold", 0, ("a", "b", "c"))
    again = after(held, answered=frozenset("a"), joiners=(Member("b", 2),))
    assert again is not None and (again.mode, again.generation, again.order) == ("run", 1, ("a", "b"))


def test_a_failure_costs_one_restart_and_the_budget_ends_the_job() -> None:
    first = changed(failures=(FAILED, msgspec.structs.replace(FAILED, about=("c", 1))))
    assert (first.restarts, first.generation) == (1, 1)
    spent = msgspec.structs.replace(first, restarts=2)
    closed = after(spent, failures=(FAILED,))
    assert closed is not None and (closed.mode, closed.exit_code) == ("closed", 7)


def test_all_finished_closes_the_job_and_some_do_not() -> None:
    assert after(finished=frozenset("ab")) is None
    closed = changed(finished=frozenset("abc"))
    assert (closed.mode, closed.exit_code) == ("closed", 0)


@pytest.mark.parametrize(("now", "generation"), [(True, 1), (False, 0)])
def test_a_joiner_restarts_the_world_or_waits(now: bool, generation: int) -> None:
    config = msgspec.structs.replace(CONFIG, elastic_now=now)
    view = genesis(config, tuple(Member(n, 1) for n in "ab"), "chain")
    nxt = after(view, config, answered=frozenset("ab"), joiners=(Member("c", 1),))
    assert nxt is not None and nxt.generation == generation and len(nxt.members) == 3


def test_the_tiebreak_follows_the_first_rank() -> None:
    assert changed(leaving=frozenset("a")).tiebreak == changed(leaving=frozenset("a")).order[0]
