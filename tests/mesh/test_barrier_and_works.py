"""A8, A9: all stopped, then all started; the permit."""

import msgspec

from hyperpodrun.agent.mesh.barrier import Barrier
from hyperpodrun.agent.mesh.config import MeshConfig, S
from hyperpodrun.agent.mesh.effects import Permit, Send, StartWorkers, StopWorkers
from hyperpodrun.agent.mesh.works import Works
from hyperpodrun.agent.wire.mesh import Brief, Go, Member, Ready, View

CONFIG = MeshConfig(slots=3, min_nodes=1, max_nodes=3)
VIEW = View("c", 0, 1, 5, "p", tuple(Member(n, 1, "active") for n in "abc"), "a", ("a", "b", "c"), "run")
HERE = Brief("c", 0, 1, "d", True)


def barrier(node: str, workers_here: bool = False, view: View = VIEW, free_ns: int = 0) -> Barrier:
    made = Barrier(CONFIG, node)
    made.adopt(0, view, True, workers_here, free_ns)
    return made


def test_ready_is_said_when_the_old_workers_are_gone_and_again_until_go() -> None:
    follower = barrier("b", workers_here=True)
    assert follower.advance(0, HERE) == []
    follower.workers_gone(5)
    assert follower.advance(5, HERE) == [Send("a", Ready(HERE, 5))]
    assert follower.due_ns is not None and follower.advance(follower.due_ns, HERE) == [Send("a", Ready(HERE, 5))]
    follower.on_go(Go(HERE, 4))
    assert follower.state == "ready"
    follower.on_go(Go(HERE, 5))
    assert follower.state == "gone" and follower.due_ns is None


def test_go_needs_all_and_is_repeated_to_whoever_missed_it() -> None:
    leader = barrier("a")
    assert leader.advance(0, HERE) == []
    leader.on_ready(1, "b", Ready(HERE, 5), HERE)
    leader.on_ready(1, "c", Ready(HERE, 4), HERE)
    leader.on_ready(1, "x", Ready(HERE, 5), HERE)
    assert leader.advance(1, HERE) == [] and leader.missing() == ("c",)
    leader.on_ready(2, "c", Ready(HERE, 5), HERE)
    assert leader.advance(2, HERE) == [Send("b", Go(HERE, 5)), Send("c", Go(HERE, 5))]
    assert leader.on_ready(3, "c", Ready(HERE, 5), HERE) == [Send("c", Go(HERE, 5))]


def test_go_waits_for_a_ghost_with_which_the_world_shares_no_node() -> None:
    for ghost, waits in ((("x", "y"), True), (("x", "b"), False)):
        leader = barrier("a", view=msgspec.structs.replace(VIEW, ghosts=(ghost,)), free_ns=16 * S)
        for node in "bc":
            leader.on_ready(1, node, Ready(HERE, 5), HERE)
        assert (leader.advance(1, HERE) == []) is waits
        if waits:
            assert leader.due_ns == 16 * S and len(leader.advance(16 * S, HERE)) == 2


def test_the_leader_blames_who_is_missing_and_the_others_a_leader_that_does_nothing() -> None:
    leader, follower = barrier("a"), barrier("b")
    leader.on_ready(1, "b", Ready(HERE, 5), HERE)
    leader.advance(1, HERE)
    assert leader.late_ns() == CONFIG.barrier_ns and leader.overdue(CONFIG.barrier_ns) == ("c",)
    assert follower.late_ns() == 2 * CONFIG.barrier_ns and follower.overdue(2 * CONFIG.barrier_ns) == ("a",)
    assert follower.late_ns() == 4 * CONFIG.barrier_ns


def test_a_stand_by_has_no_part() -> None:
    assert barrier("z").state == "idle"


def test_a_view_of_the_same_generation_changes_nothing() -> None:
    leader = barrier("a")
    leader.on_ready(1, "b", Ready(HERE, 5), HERE)
    leader.adopt(2, msgspec.structs.replace(VIEW, number=2), False, False, 0)
    assert leader.missing() == ("a", "c")


def test_the_permit_waits_for_the_fence() -> None:
    works = Works(CONFIG)
    fenced = msgspec.structs.replace(VIEW, fence=("x",))
    works.adopt(0, fenced, False)
    assert works.start(fenced, "cause") == [StartWorkers(fenced, "cause")]
    assert works.permit(15 * S, fenced) == [] and works.permit_due() == 16 * S
    assert works.permit(16 * S, fenced) == [Permit("c", 5)] and works.permit(17 * S, fenced) == []


def test_what_stops_is_only_killed_again() -> None:
    works = Works(CONFIG)
    works.start(VIEW, "cause")
    assert works.stop(False, "why") == [StopWorkers(5, False, "why")]
    assert works.stop(False, "why") == [] and works.stop(True, "why") == [StopWorkers(5, True, "why")]
    assert not works.gone(4) and works.gone(5) and works.stop(True, "why") == []


def parked() -> Works:
    works = Works(CONFIG)
    works.start(VIEW, "cause")
    assert works.stop(False, "why", in_place=True) == [StopWorkers(5, False, "why", True)]
    assert not works.idle and works.gone(5, parked=True) and works.state == "parked" and works.idle
    return works


def test_parked_processes_stay_for_the_next_restart_in_place_and_end_with_any_other() -> None:
    works = parked()
    assert works.stop(False, "why", in_place=True) == [] and works.state == "parked"
    assert works.stop(False, "why") == [StopWorkers(5, False, "why")] and not works.idle
    assert works.gone(5) and works.state == "none"
    assert parked().stop(True, "why", in_place=True) == [StopWorkers(5, True, "why")]


def test_parked_processes_go_on_in_the_next_world() -> None:
    works = parked()
    works.start(msgspec.structs.replace(VIEW, generation=6), "cause")
    assert (works.state, works.generation) == ("running", 6)


def test_what_was_to_stay_is_ended_after_all_and_an_older_word_does_not_count() -> None:
    works = Works(CONFIG)
    works.start(VIEW, "cause")
    works.stop(False, "why", in_place=True)
    assert works.stop(False, "why") == [StopWorkers(5, False, "why")]
    assert works.stop(False, "why", in_place=True) == [], "what ends is not called back"
    assert not works.gone(5, parked=True) and works.state == "stopping"
    assert works.gone(5) and works.state == "none"


def test_where_nothing_can_stay_all_are_gone() -> None:
    works = Works(CONFIG)
    works.start(VIEW, "cause")
    works.stop(False, "why", in_place=True)
    assert works.gone(5) and works.state == "none"
