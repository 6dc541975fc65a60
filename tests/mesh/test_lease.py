"""A9: the right to run workers is a fact about the past."""

from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.effects import Send
from hyperpodrun.agent.mesh.lease import Lease
from hyperpodrun.agent.wire.mesh import Beat, Brief, Grant, Member, View

CONFIG = MeshConfig(slots=3, min_nodes=1, max_nodes=3)
VIEW = View("c", 0, 1, 0, "p", tuple(Member(n, 1, "active") for n in "abc"), "a", ("a", "b", "c"), "run")
HERE = Brief("c", 0, 1, "d", True)


def lease(node: str, view: View = VIEW) -> Lease:
    made = Lease(CONFIG, node)
    made.adopt(0, view, "d")
    return made


def ask(holder: Lease, granter: Lease, name: str, to: str, now_h: int, now_g: int, is_open: bool = False) -> list[Grant]:
    """One beat, delivered at once; the grants that it brings about."""
    beats = [e.message for e in holder.beats(now_h, (to,), HERE, is_open) if isinstance(e, Send)]
    grants: list[Grant] = []
    for beat in beats:
        assert isinstance(beat, Beat)
        grants += [e.message for e in granter.on_beat(now_g, name, beat, False) if isinstance(e.message, Grant)]  # type: ignore[union-attr]
    return grants


def test_alone_one_is_a_quorum() -> None:
    alone = lease("a", View("c", 0, 1, 0, "p", (Member("a", 1),), "a", ("a",), "run"))
    assert not alone.valid(0)
    alone.beats(5, (), HERE, False)
    assert alone.valid(5) and not alone.valid(5 + CONFIG.lease_ns)


def test_a_first_beat_proves_nothing_and_its_answer_is_echoed() -> None:
    a, b = lease("a"), lease("b")
    (first,) = ask(b, a, "b", "a", 1000, 7 * S)
    assert first.age_ns is None and b.on_grant(1000, "a", first) and not b.valid(1000)
    (second,) = ask(b, a, "b", "a", 2 * S, 8 * S)
    assert second.age_ns == 1 * S  # seen to have accepted nothing at 7 s of a's clock
    b.on_grant(2 * S, "a", second)
    assert b.anchor_ns == 1 * S


def test_a_beat_that_is_open_is_no_evidence() -> None:
    a, b = lease("a"), lease("b")
    (first,) = ask(b, a, "b", "a", 0, 7 * S)
    b.on_grant(1, "a", first)
    (second,) = ask(b, a, "b", "a", 2 * S, 8 * S, is_open=True)
    assert second.age_ns is None


def test_a_beat_that_was_under_way_for_long_is_dated_by_its_echo() -> None:
    """A candidate that stood still finds old beats in its inbox: they say nothing about now."""
    a, b = lease("a"), lease("b")
    (first,) = ask(b, a, "b", "a", 0, 7 * S)
    b.on_grant(1, "a", first)
    (late,) = ask(b, a, "b", "a", 1 * S, 60 * S)
    assert late.age_ns == 53 * S
    b.on_grant(54 * S, "a", late)
    assert not b.valid(54 * S)


def test_whoever_waits_is_answered_when_the_quorum_is_there() -> None:
    a, b, c = lease("a"), lease("b"), lease("c")
    (nothing,) = ask(c, a, "c", "a", 3, 3)
    assert nothing.age_ns is None
    (first,) = ask(b, a, "b", "a", 4, 4)
    b.on_grant(5, "a", first)
    granted = ask(b, a, "b", "a", 5 * MS, 5 * MS)
    assert [grant.sent_ns for grant in granted] == [5 * MS, 3]
    assert all(grant.age_ns is not None for grant in granted)


def test_a_lease_never_goes_back_and_outlives_a_view_change() -> None:
    b = lease("b")
    b.on_grant(9 * S, "a", Grant("d", 8 * S, 1, 0))
    b.on_grant(9 * S, "a", Grant("d", 7 * S, 1, 0))
    b.adopt(9 * S, VIEW, "e")
    assert b.anchor_ns == 8 * S
    b.on_grant(9 * S, "a", Grant("d", 9 * S, 1, 0))  # of the view before
    assert b.anchor_ns == 8 * S
