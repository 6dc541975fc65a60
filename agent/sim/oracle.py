"""The same answers as the mesh gives, found in a deliberately simple second way."""

from collections.abc import Collection

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.wire.mesh import Member, View


def quorum(view: View, nodes: Collection[str]) -> bool:
    """A1 word for word: 2|Q| > N, or 2|Q| = N and the tiebreak node is in Q."""
    q = {m.node for m in view.members} & set(nodes)
    n = len(view.members)
    if 2 * len(q) > n:
        return True
    return 2 * len(q) == n and view.tiebreak in q


def genesis_quorum(config: MeshConfig, nodes: Collection[str]) -> bool:
    """A10: (a) min_nodes > M/2 and a closed roster: any min_nodes of it; (b) a group with the first contact."""
    anywhere = len(config.roster) == config.slots and config.min_nodes * 2 > config.slots
    if anywhere:
        return len(set(nodes) & set(config.roster)) >= config.min_nodes
    return config.first_contact in nodes and len(set(nodes)) >= config.min_nodes


def world_after(config: MeshConfig, before: View, after: View) -> list[str]:
    """A6, place by place: what the order of `after` must be, given who is in it and the view before it."""
    here: dict[str, Member] = {m.node: m for m in after.members}
    was: dict[str, Member] = {m.node: m for m in before.members}
    standby = sorted(n for n in here if n not in before.order)
    good = [n for n in standby if not offender(config, after, n)]
    if len(good) + sum(n in here for n in before.order) >= config.min_nodes:
        standby = good
    order: list[str] = []
    for place in before.order:
        if place in here:
            order.append(place)
            continue
        lost = was.get(place)
        choice = None
        for same_group in (True, False):
            for node in standby:
                fits = lost is None or (here[node].nproc == lost.nproc and (here[node].group == lost.group) == same_group)
                if choice is None and fits:
                    choice = node
        if choice is not None:
            standby.remove(choice)
            order.append(choice)
    return order[: config.max_nodes]


def offender(config: MeshConfig, view: View, node: str) -> bool:
    """Its workers' faults were to be healed by replacing it, or it failed itself too often."""
    mine = [fault for fault in view.faults if fault.node == node]
    return (
        any(f.rank != -1 and f.rung == "replace" for f in mine) or sum(f.rank == -1 for f in mine) >= config.rules.max_rank_faults
    )


def ranks(view: View) -> dict[int, str]:
    """Rank -> node, counted one by one."""
    table: dict[int, str] = {}
    for node in view.order:
        for member in view.members:
            if member.node == node:
                for _ in range(member.nproc):
                    table[len(table)] = node
    return table
