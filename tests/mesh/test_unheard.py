"""M8: who lost a member and has not heard it since keeps it out, and says so."""

import pytest

from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.convening import barred
from hyperpodrun.agent.mesh.effects import Send
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.mesh.view import digest_of
from hyperpodrun.agent.wire.mesh import (
    NOWHERE,
    Alert,
    Ballot,
    Brief,
    Decided,
    Heartbeat,
    Hello,
    Member,
    Prepare,
    Promise,
    Reports,
    View,
)

TRIO = MeshConfig(slots=3, min_nodes=2, max_nodes=3, roster=("a", "b", "c"), first_contact="a")
A, B, C = (Member(node, index, "active") for index, node in enumerate("abc", 1))
FIRST = View("c", 0, 0, 0, "", (A, B, C), "a", ("a", "b", "c"), "run")
SECOND = View("c", 0, 1, 1, digest_of(FIRST), (A, B), "a", ("a", "b"), "run")
HERE = Brief("c", 0, 1, digest_of(SECOND), True)
BACK = Member("c", 9)


def without_c(silent_s: float) -> tuple[Node, int]:
    """`a`, in a view that dropped `c`, which it had not heard for so long; and the time."""
    node = Node(TRIO, Member("a", 1), 7, 0)
    node.tick(0)
    node.receive(1, B.source, Decided(FIRST))
    now = 1
    while now < silent_s * S:
        now = max(now + 1, min(node.next_deadline(), now + 50 * MS))
        node.receive(now, B.source, Heartbeat(node.brief()))
        node.tick(now)
    node.receive(now, B.source, Decided(SECOND))
    return node, now


def promise(node: Node, now: int, ballot: int) -> Promise:
    """Its answer to a roll call of `b`."""
    effects = node.receive(now, B.source, Prepare(HERE, digest_of(SECOND), Ballot(0, ballot, "b", 2)))
    return next(e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Promise))


def test_the_promise_names_whom_it_has_not_heard() -> None:
    node, now = without_c(silent_s=2)
    assert Alert(digest_of(SECOND), "a", "c", 0, True) in promise(node, now, 1).items
    assert barred(node) == {"c"}


def test_whoever_was_heard_until_the_end_is_not_kept_out() -> None:
    """It left, or was dropped by others."""
    node, now = without_c(silent_s=0.3)
    assert promise(node, now, 1).items == () and barred(node) == frozenset()


def test_the_door_opens_when_it_is_heard_again() -> None:
    node, now = without_c(silent_s=2)
    effects = node.receive(now + 1, BACK.source, Hello(NOWHERE, BACK, False))
    told = [item for e in effects if isinstance(e, Send) and isinstance(e.message, Reports) for item in e.message.items]
    assert any(isinstance(item, Alert) and item.subject == "c" and not item.down for item in told)
    assert barred(node) == frozenset()
    assert not any(isinstance(item, Alert) for item in promise(node, now + 2, 1).items)


@pytest.mark.parametrize("heard", [False, True])
def test_a_joiner_asks_for_a_view_only_when_everybody_hears_it(heard: bool) -> None:
    """`b` has not heard it: `a`, which has, waits until `b` takes that back."""
    node, now = without_c(silent_s=0.3)
    node.receive(now, B.source, Reports(HERE, (Alert(digest_of(SECOND), "b", "c", 0, True),)))
    node.receive(now, BACK.source, Hello(NOWHERE, BACK, False))
    if heard:
        node.receive(now, B.source, Reports(HERE, (Alert(digest_of(SECOND), "b", "c", 1, False),)))
    assert (node.reports.convene_at(now, barred(node)) is not None) == heard
