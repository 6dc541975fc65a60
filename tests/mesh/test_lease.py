"""A9: the right to run workers is a fact about the past, and travels in trees."""

from collections.abc import Sequence

import msgspec
import pytest

from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.mesh.lease import GATHER_NS, QUICK_NS, STAMPS, Lease
from hyperpodrun.agent.mesh.trees import TREES, way_up
from hyperpodrun.agent.wire.mesh import Beat, Brief, Grant, Member, View

CONFIG = MeshConfig(slots=3, min_nodes=1, max_nodes=3)
CHAIN = MeshConfig(slots=3, min_nodes=1, max_nodes=3, lease_fan=1)
NAMES = ("a", "b", "c")
HERE = Brief("c", 0, 1, "d", True)
ROOT = ("a",)
"""Only a collects, so that one tree can be looked at."""


def view_of(nodes: Sequence[str]) -> View:
    return View("c", 0, 1, 0, "p", tuple(Member(n, 1, "active") for n in nodes), nodes[0], tuple(nodes), "run")


def lease(node: str, config: MeshConfig = CONFIG, nodes: Sequence[str] = NAMES) -> Lease:
    made = Lease(config, node)
    made.adopt(1, view_of(nodes), "d", tuple(nodes))
    return made


def said(effects: Sequence[Effect]) -> list[tuple[str, Beat | Grant]]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Beat | Grant)]


def beat(holder: Lease, now: int, is_open: bool = False, trusted: Sequence[str] = ROOT) -> Beat:
    """The one beat that is due."""
    ((_, message),) = said(holder.tick(now, tuple(trusted), HERE, is_open))
    assert isinstance(message, Beat)
    return message


def ask(holder: Lease, granter: Lease, name: str, now_h: int, now_g: int, is_open: bool = False) -> list[Grant]:
    """One beat of `name`, delivered at once; the grants that it brings about."""
    answers = said(granter.on_beat(now_g, name, beat(holder, now_h, is_open), False))
    return [message for _, message in answers if isinstance(message, Grant)]


def root() -> Lease:
    """a, whose first stamp is 7 s."""
    a = lease("a")
    a.tick(7 * S, ROOT, HERE, False)
    return a


def test_alone_one_is_a_quorum() -> None:
    alone = lease("a", nodes="a")
    assert not alone.valid(1)
    alone.tick(5, ROOT, HERE, False)
    assert alone.valid(5) and not alone.valid(5 + CONFIG.lease_ns)


def test_alone_and_open_one_proves_nothing() -> None:
    alone = lease("a", nodes="a")
    alone.tick(5, ROOT, HERE, True)
    assert not alone.valid(5)


def test_a_first_beat_proves_nothing_and_its_answer_is_echoed() -> None:
    a, b = root(), lease("b")
    (first,) = ask(b, a, "b", 1000, 8 * S)
    assert first.age_ns is None and not b.on_grant(1000, first) and not b.valid(1000)
    assert b.due_ns == 1000
    (second,) = ask(b, a, "b", 2 * S, 9 * S)
    assert second.age_ns == 2 * S  # seen to have accepted nothing at 7 s of a's clock
    b.on_grant(2 * S, second)
    assert b.anchor_ns == 0


def test_a_member_with_something_open_is_no_evidence() -> None:
    a, b = root(), lease("b")
    (first,) = ask(b, a, "b", 1, 7 * S)
    b.on_grant(2, first)
    (second,) = ask(b, a, "b", 2 * S, 8 * S, is_open=True)
    assert second.age_ns is None


def test_a_root_with_something_open_is_no_evidence() -> None:
    a, b = lease("a"), lease("b")
    a.tick(7 * S, ROOT, HERE, True)
    ((_, grant),) = said(a.on_beat(7 * S, "b", beat(b, 1), True))
    assert isinstance(grant, Grant)
    b.on_grant(2, grant)
    assert said(a.on_beat(8 * S, "b", beat(b, 2), True)) == []
    assert not a.valid(8 * S)


def test_a_beat_of_another_view_is_no_evidence() -> None:
    a, b = root(), lease("b")
    b.on_grant(2, *ask(b, a, "b", 1, 7 * S))
    theirs = msgspec.structs.replace(beat(b, 2), brief=msgspec.structs.replace(HERE, digest="e"))
    assert a.on_beat(8 * S, "b", theirs, False) == [] and not a.valid(8 * S)


def test_evidence_is_not_carried_over_to_another_view() -> None:
    a, b = root(), lease("b")
    b.on_grant(2, *ask(b, a, "b", 1, 7 * S))
    nodes = ("a", "b", "d")
    b.adopt(3, view_of(nodes), "e", nodes)
    assert beat(b, 3).evidence == ()


def test_a_beat_that_was_under_way_for_long_is_dated_by_its_echo() -> None:
    """A candidate that stood still finds old beats in its inbox: they say nothing about now."""
    a, b = root(), lease("b")
    b.on_grant(2, *ask(b, a, "b", 1, 7 * S))
    (late,) = ask(b, a, "b", 1 * S, 21 * S)
    assert late.age_ns == 14 * S
    b.on_grant(21 * S, late)
    assert not b.valid(21 * S)


def test_a_proof_as_old_as_a_lease_is_not_granted() -> None:
    a, b = root(), lease("b")
    b.on_grant(2, *ask(b, a, "b", 1, 7 * S))
    (late,) = ask(b, a, "b", 1 * S, 22 * S)
    assert late.age_ns is None


def test_a_grant_dates_the_proof_by_the_beat_it_answers() -> None:
    """The next wave tells of a proof that came after the beat: its age is negative, and no time on the way is lost."""
    a, b, c = root(), lease("b"), lease("c")
    b.on_grant(2, *ask(b, a, "b", 1, 7 * S))
    a.on_beat(8 * S, "b", beat(b, 1 * S), False)
    ask(c, a, "c", 1, 8 * S)
    second = dict(said(a.tick(9 * S, ROOT, HERE, False)))["c"]
    assert isinstance(second, Grant) and second.stamp == 9 * S
    c.on_grant(2, second)
    a.on_beat(9 * S + 5, "c", beat(c, 2), False)
    third = dict(said(a.tick(10 * S, ROOT, HERE, False)))["b"]
    assert isinstance(third, Grant) and third.age_ns == -1 * S  # 9 s of a's clock; b's beat of its 1 s came at 8 s
    b.on_grant(4 * S, third)
    assert b.anchor_ns == 2 * S


def test_whoever_waits_is_answered_when_the_quorum_is_there() -> None:
    a, b, c = root(), lease("b"), lease("c")
    (nothing,) = ask(c, a, "c", 3, 7 * S)
    assert nothing.age_ns is None
    (first,) = ask(b, a, "b", 4, 7 * S)
    b.on_grant(5, first)
    granted = ask(b, a, "b", 5 * MS, 7 * S + 5 * MS)
    assert sorted(grant.sent_ns for grant in granted) == [3, 5 * MS]
    assert all(grant.age_ns is not None for grant in granted)


def test_evidence_for_a_newer_stamp_also_counts_for_an_older_one() -> None:
    """Three of five: a itself, b for 7 s, c for 9 s."""
    five = ("a", "b", "c", "d", "e")
    a, b, c = (lease(node, nodes=five) for node in "abc")
    a.tick(7 * S, ROOT, HERE, False)
    b.on_grant(2, *ask(b, a, "b", 1, 7 * S))
    ask(c, a, "c", 1, 7 * S)
    a.on_beat(8 * S, "b", beat(b, 2), False)
    assert not a.valid(8 * S)
    news = dict(said(a.tick(9 * S, ROOT, HERE, False)))["c"]
    assert isinstance(news, Grant)
    c.on_grant(2, news)
    a.on_beat(9 * S, "c", beat(c, 2), False)
    assert a.anchor_ns == 7 * S


def test_a_root_forgets_children_that_are_silent_for_three_waves() -> None:
    a, b = root(), lease("b")
    ask(b, a, "b", 1, 7 * S)
    assert said(a.tick(10 * S, ROOT, HERE, False))
    assert said(a.tick(11 * S, ROOT, HERE, False)) == []


@pytest.mark.parametrize(("members", "wave_s"), [(2, 1), (9, 1), (10, 3), (1024, 3)])
def test_a_wave_takes_longer_where_a_root_has_many_children(members: int, wave_s: int) -> None:
    a = lease("n0000", nodes=[f"n{i:04d}" for i in range(members)])
    a.tick(30 * S, ("n0000",), HERE, False)
    assert a.due_ns == (30 + wave_s) * S


def test_the_roots_take_turns() -> None:
    dues = []
    for node in NAMES:
        one = lease(node)
        one.tick(7 * S, (node,), HERE, False)
        dues.append(one.due_ns % S)
    assert sorted(dues) == [0, 250 * MS, 500 * MS]


def test_a_lease_never_goes_back_and_outlives_a_view_change() -> None:
    b = lease("b")
    b.tick(1, ROOT, HERE, False)
    b.on_grant(9 * S, Grant("d", "a", 8 * S, 1, 0))
    b.on_grant(9 * S, Grant("d", "a", 7 * S, 1, 0))
    b.adopt(9 * S, view_of(NAMES), "e", NAMES)
    assert b.anchor_ns == 8 * S
    b.tick(9 * S, ROOT, HERE, False)
    b.on_grant(9 * S, Grant("d", "a", 9 * S, 1, 0))  # of the view before
    assert b.anchor_ns == 8 * S


def test_a_beat_without_an_answer_is_repeated_and_an_idle_child_asks_for_nothing() -> None:
    a, b = root(), lease("b")
    assert beat(b, 5).asks and b.due_ns == 5 + QUICK_NS
    b.on_grant(6 + QUICK_NS, *ask(b, a, "b", 5 + QUICK_NS, 7 * S))
    assert not beat(b, 6 + QUICK_NS).asks
    b.on_grant(1 * S, Grant("d", "a", 1 * S, 7 * S, 0))
    assert b.due_ns == 3 * S
    b.on_grant(2 * S, Grant("d", "a", 1 * S, 8 * S, 0))
    assert not beat(b, 2 * S).asks and b.due_ns == 4 * S


# --- more than one level: a above b above c


def chain() -> tuple[Lease, Lease, Lease]:
    """All have asked, and know a's stamp of 7 s; nobody has echoed it."""
    a, b, c = lease("a", CHAIN), lease("b", CHAIN), lease("c", CHAIN)
    a.tick(7 * S, ROOT, HERE, False)
    b.on_beat(10 * S, "c", beat(c, 90 * S), False)
    ((_, grant),) = said(a.on_beat(8 * S, "b", beat(b, 10 * S), False))
    assert isinstance(grant, Grant)
    ((to, passed),) = said(b.on_grant(10 * S, grant))
    assert to == "c" and isinstance(passed, Grant) and passed.stamp == 7 * S and passed.age_ns is None
    assert c.on_grant(90 * S, passed) == []
    return a, b, c


def test_evidence_goes_up_together_once_the_children_have_echoed() -> None:
    a, b, c = chain()
    assert b.due_ns == 10 * S + GATHER_NS
    b.on_beat(10 * S + 5, "c", beat(c, 90 * S + 5), False)
    assert b.due_ns == 10 * S + 5
    told = beat(b, 10 * S + 5)
    assert told.evidence == ((7 * S, b"\x06"),) and not told.asks
    assert a.on_beat(8 * S + 5, "b", told, False) and a.anchor_ns == 7 * S


def test_a_parent_does_not_wait_for_a_silent_child_and_passes_on_what_comes_late() -> None:
    _, b, c = chain()
    assert b.tick(10 * S + GATHER_NS - 1, ROOT, HERE, False) == []
    assert beat(b, 10 * S + GATHER_NS).evidence == ((7 * S, b"\x02"),)
    late = 10 * S + GATHER_NS + 5
    b.on_beat(late, "c", beat(c, 90 * S + 5), False)
    assert b.due_ns == late
    assert beat(b, late).evidence == ((7 * S, b"\x06"),)


def test_a_parent_with_something_open_passes_on_its_children_but_not_itself() -> None:
    _, b, c = chain()
    b.on_beat(10 * S + 5, "c", beat(c, 90 * S + 5), True)
    assert beat(b, 10 * S + 5, is_open=True).evidence == ((7 * S, b"\x04"),)


def test_a_parent_does_not_vouch_for_a_child_with_something_open() -> None:
    _, b, c = chain()
    b.on_beat(10 * S + 5, "c", beat(c, 90 * S + 5, is_open=True), False)
    assert beat(b, 10 * S + GATHER_NS).evidence == ((7 * S, b"\x02"),)


def test_whoever_had_nothing_open_after_one_stamp_is_no_evidence_for_the_next() -> None:
    _, b, c = chain()
    b.on_beat(10 * S + 5, "c", beat(c, 90 * S + 5), False)
    b.on_grant(13 * S, Grant("d", "a", 10 * S, 10 * S, None))
    assert beat(b, 13 * S + GATHER_NS).evidence == ((10 * S, b"\x02"), (7 * S, b"\x04"))
    c.on_grant(93 * S, Grant("d", "a", 93 * S, 10 * S, None))
    b.on_beat(14 * S, "c", beat(c, 93 * S), False)
    assert beat(b, 14 * S).evidence == ((10 * S, b"\x06"),)


def test_evidence_for_old_stamps_is_given_up() -> None:
    _, b, c = chain()
    for stamp_s in range(10, 20):
        c.on_grant(90 * S, Grant("d", "a", 90 * S, stamp_s * S, None))
        b.on_beat(stamp_s * S, "c", beat(c, 90 * S), False)
    assert [stamp for stamp, _ in beat(b, 20 * S, is_open=True).evidence] == [19 * S]
    assert len(b._trees["a"].seen) == STAMPS


def test_a_child_not_heard_for_a_lease_is_told_no_age() -> None:
    """Its clock and its parent's may have drifted apart; a parent that stood still finds such grants in its inbox."""
    _, b, _ = chain()
    ((_, passed),) = said(b.on_grant(26 * S, Grant("d", "a", 26 * S, 20 * S, 0)))
    assert isinstance(passed, Grant) and passed.stamp == 20 * S and passed.age_ns is None and b.valid(26 * S)


def test_a_parent_serves_the_trees_of_its_children_also_when_it_trusts_other_roots() -> None:
    _, b, c = chain()
    b.on_beat(10 * S + 5, "c", beat(c, 90 * S + 5), False)
    told = dict(said(b.tick(10 * S + 5, ("c", "b"), HERE, False)))
    assert isinstance(told["a"], Beat) and told["a"].root == "a"


def test_a_proof_is_dated_anew_at_each_level() -> None:
    a, b, c = chain()
    b.on_beat(10 * S + 5, "c", beat(c, 90 * S + 5), False)
    ((_, grant),) = said(a.on_beat(9 * S, "b", beat(b, 10 * S + 10), False))
    assert isinstance(grant, Grant) and grant.age_ns == 2 * S  # 7 s of a's clock
    ((to, passed),) = said(b.on_grant(10 * S + 20, grant))
    assert b.anchor_ns == 8 * S + 10
    assert to == "c" and isinstance(passed, Grant)
    c.on_grant(90 * S + 20, passed)
    assert c.anchor_ns == 88 * S + 10


def test_a_suspected_parent_is_passed_over() -> None:
    c = lease("c", CHAIN)
    assert [to for to, _ in said(c.tick(1, ("a", "b", "c"), HERE, False)) if to == "b"] == ["b"]
    assert [to for to, _ in said(c.tick(1 + QUICK_NS, ("a", "c"), HERE, False))] == ["a"]


# --- the trees


@pytest.mark.parametrize(("count", "fan"), [(1, 16), (2, 16), (4, 2), (9, 3), (17, 16), (18, 16), (64, 16), (1024, 16), (50, 1)])
def test_everyone_is_below_the_root_and_nobody_has_more_children_than_the_fan(count: int, fan: int) -> None:
    order = tuple(f"n{i:04d}" for i in range(count))
    inner: list[set[str]] = []
    for root_ in order[:TREES]:
        ways = {node: way_up(order, root_, node, fan) for node in order}
        children: dict[str, list[str]] = {}
        for node, (above, levels) in ways.items():
            assert (above == ()) == (node == root_) and (not above or above[-1] == root_) and levels >= 0
            if above:
                children.setdefault(above[0], []).append(node)
                assert above[1:] == ways[above[0]][0] and levels == ways[above[0]][1] - 1
        assert max((len(below) for below in children.values()), default=0) <= fan
        inner.append(set(children))
        if count <= fan + 1:
            assert all(len(above) <= 1 for above, _ in ways.values())
    if TREES * len(inner[0]) <= count - TREES:
        assert not inner[0] & inner[1] and not inner[0] & inner[-1] and not inner[1] & inner[-1]
