"""To whom an agent keeps a connection open while a view stands. Pure.

Theory. Every node is watched by its observers in the rings (M1), and a watcher must hear at once when the connection closes (M2): the
neighbours in the rings are at most 2 K, however large the job is. The first candidates of the view (A3) are told of every fault and
grant leases. Two nodes have something to say to everybody in one moment: the first candidate, who calls the next roll (A4), and the
node of rank 0, who opens the barrier (A8). These two keep a connection to all. Whoever else has a word for somebody far away makes
a connection for it.

So a job of N nodes has about (2 K + 4) N connections instead of N squared.
"""

from collections.abc import Sequence

from hyperpodrun.agent.mesh.convening import DIRECT
from hyperpodrun.agent.mesh.rings import Rings
from hyperpodrun.agent.wire.mesh import View


def near(me: str, view: View, rings: Rings, candidates: Sequence[str]) -> set[str]:
    """The nodes to which `me` keeps a connection. `candidates`: the view's, in order."""
    leaders = {*candidates[:1], *view.order[:1]}
    if me in leaders:
        return {member.node for member in view.members} - {me}
    neighbours = {*rings.observers.get(me, ()), *rings.subjects.get(me, ())}
    return (neighbours | leaders | set(candidates[:DIRECT])) - {me}
