"""Decided views, in order: what to adopt next, and what to tell those who are behind (A7).

Theory: the views of one chain are linked by their parents' digests, so a reader can check that nothing is missing.
Somebody who is so far behind that nobody keeps the missing ones any more may jump: a decided view is decided whether
or not its ancestors are known.

States: none. Invariants: `views` are consecutive and linked.
"""

import itertools
from collections import deque

from hyperpodrun.agent.mesh.view import digest_of
from hyperpodrun.agent.wire.mesh import Source, View

KEPT = 32


class History:
    """The newest views of the chain this agent is in."""

    def __init__(self) -> None:
        self.views: deque[View] = deque(maxlen=KEPT)

    def after(self, number: int) -> tuple[View, ...]:
        """Decided views with a greater number, as far back as they are kept."""
        return tuple(view for view in self.views if view.number > number)

    def add(self, view: View, jumped: bool) -> None:
        """This one was adopted."""
        if jumped:
            self.views.clear()
        self.views.append(view)


def follows(view: View, digest: str, nxt: View) -> bool:
    """Whether `nxt` is the decided successor of `view` (whose digest is given)."""
    return nxt.chain == view.chain and nxt.number == view.number + 1 and nxt.parent == digest


def linked(views: tuple[View, ...]) -> bool:
    """Whether these are consecutive views of one chain."""
    return all(follows(a, digest_of(a), b) for a, b in itertools.pairwise(views))


def holds(view: View, source: Source) -> bool:
    """Whether this incarnation is a member."""
    node, incarnation = source
    return any(member.node == node and member.incarnation == incarnation for member in view.members)
