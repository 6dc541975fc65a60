"""A5, A8, A9: from a roll call to the next view."""

import msgspec
import pytest

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.succession import RollCall, genesis, plain, successor
from hyperpodrun.agent.mesh.view import validate
from hyperpodrun.agent.policy.escalation import decide
from hyperpodrun.agent.wire.mesh import Member, Report, View
from hyperpodrun.agent.wire.rungs import Decide, Decision, Fault, Rules, Situation, Symptoms

CONFIG = MeshConfig(slots=5, min_nodes=2, max_nodes=3, roster=tuple("abcde"), first_contact="a", rules=Rules(max_restarts=2))
START = genesis(CONFIG, tuple(Member(n, 1) for n in "abcd"), "chain")
FAILED = Report("failed", ("b", 1), 0, 7, "exit code 7")


def after(view: View = START, config: MeshConfig = CONFIG, by: Decide = plain, **roll: object) -> View | None:
    facts = {"answered": frozenset("abcd"), "started": True, "fence_over": True, "settled": True, **roll}
    nxt = successor(config, view, "digest", RollCall(**facts), by)  # type: ignore[arg-type]
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


# --- rungs

INPROCESS = msgspec.structs.replace(CONFIG, rules=Rules(inprocess=True))


def healed(view: View, *symptoms: tuple[str, Symptoms], config: MeshConfig = INPROCESS, **roll: object) -> View:
    """The view after these nodes' workers failed."""
    failures = tuple(Report("failed", (node, 1), view.generation, 7, "boom", None, how) for node, how in symptoms)
    nxt = after(view, config, decide, failures=failures, **roll)
    assert nxt is not None
    return nxt


HERE = Symptoms(rank=0, in_place=True)


def test_a_fault_is_healed_in_place_and_remembered() -> None:
    nxt = healed(START, ("b", HERE), now_s=50)
    assert (nxt.restart, nxt.fresh, nxt.restarts, nxt.order) == ("inprocess", (), 1, START.order)
    assert nxt.faults == (Fault(0, "b", 0, "inplace", True, 50),)
    assert "restart in place" in nxt.reason


def test_a_node_that_cannot_gets_new_processes_while_the_others_stay() -> None:
    nxt = healed(START, ("b", HERE), ("c", Symptoms(rank=0)))
    assert (nxt.restart, nxt.fresh) == ("inprocess", ("c",))
    everywhere = healed(START, ("b", msgspec.structs.replace(HERE, rung="all")), ("c", Symptoms(rank=0)))
    assert (everywhere.restart, everywhere.fresh) == ("process", ())


def test_what_cannot_be_healed_closes_the_job_with_its_code() -> None:
    closed = healed(START, ("b", Symptoms(final=True)))
    assert (closed.mode, closed.exit_code) == ("closed", 7) and closed.reason.startswith("workers of b failed: boom (")
    assert changed(failures=(msgspec.structs.replace(FAILED, symptoms=Symptoms(final=True)),)).mode == "closed", "plain"


REPLACE = msgspec.structs.replace(HERE, rung="replace")


def test_a_spare_takes_the_place_of_a_node_that_is_to_go_and_the_others_stay_in_process() -> None:
    nxt = healed(START, ("b", REPLACE))
    assert (nxt.order, nxt.restart, [m.node for m in nxt.members]) == (("a", "d", "c"), "inprocess", list("acd"))
    assert nxt.fence == ("b",) and "b is replaced" in nxt.reason and "lost" not in nxt.reason


def test_the_node_that_had_to_go_comes_back_as_the_last_choice() -> None:
    gone = healed(START, ("b", REPLACE))
    back = after(gone, INPROCESS, decide, joiners=(Member("b", 2),), answered=frozenset("acd"))
    assert back is not None and back.order == gone.order
    lost = after(back, INPROCESS, decide, answered=frozenset("acb"), accused=frozenset("d"))
    assert lost is not None and lost.order == ("a", "c"), "rather smaller than with an offender"
    needed = after(lost, INPROCESS, decide, answered=frozenset("ab"), accused=frozenset("c"))
    assert needed is not None and needed.order == ("a", "b"), "rather with an offender than not at all"


def test_without_anybody_to_take_its_place_the_world_gets_smaller_or_all_processes_are_replaced() -> None:
    three = genesis(INPROCESS, tuple(Member(n, 1) for n in "abc"), "chain")
    smaller = healed(three, ("b", REPLACE), answered=frozenset("abc"))
    assert (smaller.order, smaller.restart) == (("a", "c"), "inprocess")
    all_new = healed(smaller, ("a", REPLACE), answered=frozenset("ac"))
    assert (all_new.order, all_new.restart) == (("a", "c"), "process")


def test_a_spare_that_does_not_fit_takes_nobodys_place() -> None:
    odd = genesis(
        msgspec.structs.replace(INPROCESS, min_nodes=3), (*(Member(n, 1) for n in "abc"), Member("d", 1, nproc=8)), "chain"
    )
    config = msgspec.structs.replace(INPROCESS, min_nodes=3)
    nxt = after(odd, config, lambda s: Decision(rung="replace", dropped=("b",), in_place=True) if s.incidents else Decision(),
                failures=(FAILED,))  # fmt: skip
    assert nxt is not None and nxt.order == ("a", "c", "d")
    config = msgspec.structs.replace(config, max_nodes=3, min_nodes=3)
    alone = genesis(config, tuple(Member(n, 1) for n in "abc"), "chain")
    stays = after(alone, config, lambda s: Decision(rung="replace", dropped=("b",), in_place=True), answered=frozenset("abc"),
                  failures=(FAILED,))  # fmt: skip
    assert stays is not None and (stays.order, stays.restart) == (("a", "b", "c"), "process")


def test_nodes_lost_more_often_than_allowed_end_the_job() -> None:
    config = msgspec.structs.replace(CONFIG, rules=Rules(max_node_failures=1, window_s=100))
    first = after(START, config, decide, answered=frozenset("acd"), accused=frozenset("b"), now_s=10)
    assert first is not None and first.mode == "run"
    soon = after(first, config, decide, answered=frozenset("ad"), accused=frozenset("c"), now_s=50)
    assert soon is not None and (soon.mode, soon.exit_code) == ("closed", 69)
    later = after(first, config, decide, answered=frozenset("ad"), accused=frozenset("c"), now_s=200)
    assert later is not None and later.mode == "run"
    left = after(first, config, decide, leaving=frozenset("c"), now_s=50)
    assert left is not None and left.mode == "run", "who leaves has not failed"


def test_the_policy_is_asked_for_what_the_roll_call_knows() -> None:
    asked: list[Situation] = []

    def watch(situation: Situation) -> Decision:
        asked.append(situation)
        return Decision()

    after(START, CONFIG, watch, answered=frozenset("acd"), accused=frozenset("b"), failures=(FAILED,), now_s=9,
          restarts=(Report("revived", ("c", 1), 0),))  # fmt: skip
    (situation,) = asked
    assert [(i.kind, i.node) for i in situation.incidents] == [("lost", "b"), ("failed", "b"), ("revived", "c")]
    assert (situation.spares, situation.shrink, situation.now_s) == (1, 0, 9)


def test_a_held_job_has_no_faults() -> None:
    held = changed(answered=frozenset("a"), accused=frozenset("bcd"))
    again = after(held, INPROCESS, decide, answered=frozenset("a"), joiners=(Member("b", 2),), failures=(FAILED,))
    assert again is not None and (again.restart, again.restarts) == ("process", 0)
