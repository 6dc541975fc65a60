"""A10: who may form view 0, and when."""

import random

from hyperpodrun.agent.mesh.bootstrap import Bootstrap
from hyperpodrun.agent.mesh.config import MeshConfig, S
from hyperpodrun.agent.mesh.effects import Connect, Send
from hyperpodrun.agent.wire.mesh import NOWHERE, Member

ROSTER = ("a", "b", "c")
ANY = MeshConfig(slots=3, min_nodes=2, max_nodes=3, roster=ROSTER, first_contact="a")
FIRST = MeshConfig(slots=3, min_nodes=1, max_nodes=3, roster=ROSTER, first_contact="a")
OPEN = MeshConfig(slots=3, min_nodes=1, max_nodes=3, first_contact="a")


def boot(config: MeshConfig, me: str = "a") -> Bootstrap:
    return Bootstrap(config, me, random.Random(1), 0)


def meet(made: Bootstrap, now: int, *nodes: str, has_view: bool = False) -> None:
    for node in nodes:
        made.met(now, Member(node, 1), has_view, (), ())


def test_all_here_form_at_once_and_enough_after_the_window() -> None:
    made = boot(ANY)
    assert made.form_at(0) is None
    meet(made, 5, "b")
    assert made.form_at(5) == 5 + ANY.join_window_ns
    meet(made, 6, "c")
    assert made.form_at(6) == 5


def test_the_next_name_waits_a_little_longer() -> None:
    made = boot(ANY, "b")
    meet(made, 5, "a", "c")
    assert made.form_at(5) == 5 + ANY.stagger_ns


def test_a_name_that_is_not_on_the_roster_forms_nothing() -> None:
    made = boot(ANY, "z")
    meet(made, 5, "a", "b", "c")
    assert made.form_at(5) is None


def test_only_the_first_contact_forms_a_small_world() -> None:
    made = boot(FIRST, "b")
    meet(made, 5, "a", "c")
    assert made.form_at(5) is None


def test_silence_of_a_slot_is_no_evidence_and_a_refusal_that_lasts_is() -> None:
    made = boot(FIRST)
    meet(made, 0, "b")
    assert made.form_at(1 * S) is None
    made.connected(1 * S, "c", True)
    meet(made, 2 * S, "b")
    made.connected(2 * S, "c", True)
    assert made.form_at(2 * S) is None
    made.connected(3 * S, "c", True)
    assert made.form_at(3 * S) == 3 * S
    made.connected(3 * S, "c", False)  # somebody takes connections there after all
    assert made.form_at(3 * S) is None


def test_the_first_contact_asks_whoever_does_not_answer() -> None:
    made = boot(FIRST)
    meet(made, 0, "b")
    effects = made.hellos(1, NOWHERE, Member("a", 1))
    assert Connect("c") in effects and Connect("b") not in effects
    assert [e.to for e in effects if isinstance(e, Send)] == ["b", "c"]


def test_with_an_open_roster_the_first_contact_listens_first() -> None:
    made = boot(OPEN)
    assert made.form_at(0) == OPEN.absent_ns
    made.settle(("a", "b"))  # it was in a view with b: b's word is needed
    assert made.form_at(5 * S) is None


def test_with_an_open_roster_only_a_first_start_forms_a_small_world() -> None:
    """A launcher that ran before may have forgotten a job that goes on without it, and there is nobody to ask."""
    again = Bootstrap(OPEN, "a", random.Random(1), 0, first_start=False)
    meet(again, 5 * S, "b")
    assert again.form_at(5 * S) is None
    meet(again, 5 * S, "c")
    assert again.form_at(5 * S) == 5 * S


def test_nobody_forms_a_world_who_heard_of_one() -> None:
    made = boot(ANY)
    meet(made, 5, "b", has_view=True)
    meet(made, 5, "c")
    assert made.form_at(5) is None
    made.overheard(3 * S, "c")
    assert made.knows_view(3 * S)


def test_few_are_greeted_when_there_are_many() -> None:
    config = MeshConfig(slots=100, min_nodes=60, max_nodes=100, roster=tuple(f"n{i:02}" for i in range(100)), first_contact="n00")
    assert len(boot(config, "n50").hellos(0, NOWHERE, Member("n50", 1))) == 9


def test_slots_are_those_of_the_launch_and_all_ever_met_in_a_view_but_ones_own() -> None:
    made = boot(FIRST, "b")
    made.settle(("b", "c", "x"))
    made.settle(("b", "y"))
    assert made.slots() == ("a", "c", "x", "y")
