"""The rank map (A6): a pure function, so that it never has to be sent apart from the view.

Theory: a world is a sequence of nodes; node i holds the ranks after those of nodes 0..i-1, so that ranks of one node
are always consecutive. Whoever stays keeps its place. A hole goes to the node that left it if it is back, then to a
stand-by of the same topology group, then to any; a hole nobody fills closes, if that leaves enough nodes. New places
are added at the end.

Invariants: no node twice; survivors keep their relative order, and their place as long as no hole before them closes.
"""

from collections.abc import Mapping

from hyperpodrun.agent.wire.mesh import Member


def first_world(members: tuple[Member, ...], max_nodes: int) -> tuple[str, ...]:
    """Places of the first world: wishes first (the lower node name wins a place two ask for), the rest by group and name."""
    ordered = sorted(members, key=lambda member: (member.wish is None, member.group, member.node))[:max_nodes]
    places: list[str | None] = [None] * len(ordered)
    waiting = []
    for member in sorted(ordered, key=lambda member: member.node):
        if member.wish is not None and member.wish < len(places) and places[member.wish] is None:
            places[member.wish] = member.node
        else:
            waiting.append(member)
    rest = iter(sorted(waiting, key=lambda member: (member.group, member.node)))
    return tuple(place if place is not None else next(rest).node for place in places)


def assign(
    order: tuple[str, ...], lost: Mapping[str, Member], members: tuple[Member, ...], min_nodes: int, max_nodes: int, grow: bool
) -> tuple[str, ...] | None:
    """The next world's nodes in order, or None when no world is feasible.

    `order`: the previous world's; `lost`: what is known of those of its nodes that are gone; `members`: everyone there now.
    `grow`: add places up to `max_nodes`; without it only as many as `min_nodes` needs.
    """
    if not order:
        world = first_world(members, max_nodes)
        return world if len(world) >= min_nodes else None
    here = {member.node: member for member in members}
    spare = [member for member in members if member.node not in order]
    places: list[str] = []
    for node in order:
        if node in here:
            places.append(node)
            continue
        old = lost.get(node)
        fitting = [m for m in spare if old is None or m.nproc == old.nproc]
        if fitting:
            chosen = min(fitting, key=lambda m: (old is not None and m.group != old.group, m.node))
            spare.remove(chosen)
            places.append(chosen.node)
    places = places[:max_nodes]
    wanted = max_nodes if grow else min_nodes
    for member in sorted(spare, key=lambda m: (m.group, m.node)):
        if len(places) >= wanted:
            break
        places.append(member.node)
    return tuple(places) if len(places) >= min_nodes else None
