"""Through whom leases travel (A9): for each candidate that collects them, a tree over the view's members with it at the root.

Theory: a k-ary heap over a list of all members; who sits at place i has the one at (i - 1) // k above. The list begins
with the root; the other members follow in the order of the candidates, turned for each root by as many places as a
tree has inner nodes, so that whoever has children in one tree has none in the next; the first candidates, roots of
their own trees, come last. Up to k + 1 members every tree is a star.

States: none; a pure function of the view's order of candidates.
Invariants: everyone but the root has one way up, which ends at the root; nobody has more than k children.
"""

from collections.abc import Sequence

TREES = 3
"""How many candidates collect leases: two may be lost, with all below them, before the next view is decided."""


def way_up(order: Sequence[str], root: str, node: str, fan: int) -> tuple[tuple[str, ...], int]:
    """(whom `node` has above itself in the tree of `root`, its parent first, the root last; how many levels are below it).

    `order`: all members as candidates (A3); `root` and `node` are among them.
    """
    others = [other for other in order[TREES:] if other != root]
    inner = (len(order) - 2) // fan + 1
    turn = order.index(root) * inner % max(1, len(others))
    last = [other for other in order[:TREES] if other != root]
    seats = [root, *others[turn:], *others[:turn], *last]
    above = _above(seats.index(node), fan)
    return tuple(seats[seat] for seat in above), len(_above(len(seats) - 1, fan)) - len(above)


def _above(seat: int, fan: int) -> list[int]:
    seats = []
    while seat:
        seat = (seat - 1) // fan
        seats.append(seat)
    return seats
