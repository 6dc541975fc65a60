"""What people are told about the mesh."""

import math

import msgspec
import pytest

from hyperpodrun.agent import mesh_words
from hyperpodrun.agent.wire.mesh import Member, View

A, B, C = (Member(node, 1) for node in "abc")
RUN = View("x", 0, 0, 0, "", (A, B), "a", ("a", "b"), "run", reason="the job starts")


def then(**changes: object) -> View:
    return msgspec.structs.replace(RUN, number=1, **changes)


def told(view: View, before: View | None, me: str = "a") -> str | None:
    return mesh_words.adopted(view, before, me, min_nodes=2, max_restarts=3, slots="abc")


def test_first_world() -> None:
    assert told(RUN, None) == "view 0: world 0 on 2 nodes, rank 0 on a, restart 0 of 3: the job starts"


def test_restarts_and_who_stands_by() -> None:
    view = then(generation=1, restart="process", restarts=1, reason="rank 3 fell", members=(A, B, C), order=("b", "a"))
    line = "view 1: world 1 on 2 of 3 nodes, rank 0 on b, restart 1 of 3: rank 3 fell"
    assert told(view, RUN) == line
    assert told(view, None, "c") == f"{line}; this node is standing by"


@pytest.mark.parametrize(
    ("view", "before"),
    [(then(members=(A, B, C)), RUN), (RUN, RUN), (then(mode="closed", exit_code=3), RUN)],
    ids=["a spare came", "an agent came back", "the end has a line of its own"],
)
def test_nothing_to_tell(view: View, before: View) -> None:
    assert told(view, before) is None


def test_who_is_relieved_is_told() -> None:
    assert told(then(order=("a",)), RUN, "b") == "view 1: this node is standing by"
    assert told(then(members=(A, B, C)), RUN, "c") is None, "told already"


def test_hold_says_for_whom() -> None:
    line = told(then(mode="hold", members=(A,), reason="b lost"), RUN)
    assert line == "view 1: training is held: 1 of at least 2 nodes are here (a); waiting for b, c (b lost)"


def test_no_majority_says_for_whom_and_what_happens() -> None:
    assert "UNSAFE" in mesh_words.no_majority(RUN, {"a"}, 15.0, 30.0)
    line = mesh_words.no_majority(RUN, {"a"}, 15.0, math.inf)
    assert "UNSAFE" not in line
    assert "only b of the 2 nodes" in line and "waiting for a" in line and "within 15 s" in line


def test_many_nodes_are_cut() -> None:
    text = mesh_words.named({f"node{number:02}" for number in range(20)})
    assert text.startswith("node00, node01") and text.endswith("and 12 others") and text.count("node") == mesh_words.MOST_NAMED


def test_who_was_missing_at_the_start() -> None:
    assert "not reached: c" in mesh_words.never_met({"a", "b"}, {"c"}, 3, 5)
    assert "--peers" in mesh_words.never_met({"a", "b"}, set(), 3, 5)
    assert "only this one is here; too few" in mesh_words.never_met(set(), set(), 3, 5)
    assert "2 to 3 are needed" in mesh_words.looking({"b"}, 2, 3, 5)


def test_same_wish_is_told_alike_on_both_sides() -> None:
    assert mesh_words.same_wish("a", "b", 1) == mesh_words.same_wish("b", "a", 1)
    wish = msgspec.structs.replace(A, wish=1), msgspec.structs.replace(B, wish=1)
    assert mesh_words.insist_on_one_rank(*wish)
    for one, other in ((A, B), (wish[0], B), (A, wish[1]), (wish[0], wish[0]), (wish[0], msgspec.structs.replace(B, wish=2))):
        assert not mesh_words.insist_on_one_rank(one, other)
