"""Which ranks keep copies of whose shard: a pure function that every rank computes for itself.

Theory. A shard that lives on fewer nodes than there shall be copies is lost with them. Its owner (the lowest rank that has it) gets
buddies on other nodes, the ranks that keep the least yet, the nearest of these in the order of ranks. A job on one node needs none:
the node's shared memory outlives its workers. Where that is too small, ranks of the same node are buddies.

Private states are with other ranks anyway (exchange.py), but in their processes. So that a lost node and then all processes do not
make an end of them, ranks on other nodes write them into shared memory with their own.

Invariants: no two copies of a shard on one node, unless the job has but one; nobody keeps a copy of what it has itself.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import msgspec

from hyperpodrun.recovery.plan import Offer, private


class Place(msgspec.Struct, frozen=True, array_like=True):
    """`buddy` keeps a copy of `shard`, which it gets from `owner`."""

    shard: str
    owner: int
    buddy: int


def place(offers: Sequence[Offer], copies: int, cramped: Collection[str] = ()) -> tuple[Place, ...]:
    """`offers`: of all ranks, each one's first need is its shard. `copies`: nodes that shall hold a shard. `cramped`: nodes whose
    shared memory is too small."""
    ranks: dict[str, list[Offer]] = defaultdict(list)
    for offer in sorted(offers, key=lambda offer: offer.rank):
        ranks[offer.needs[0]].append(offer)
    one_node = len({offer.node for offer in offers}) == 1
    load: dict[int, int] = defaultdict(int)
    places = []
    for shard, have in sorted(ranks.items(), key=lambda pair: pair[1][0].rank):
        owner = have[0]
        used = {offer.node for offer in have}
        missing = copies - (len(have) if one_node else len(used))
        if one_node and owner.node not in cramped:
            continue
        for _ in range(missing):
            free = [o for o in offers if (o.node not in used or one_node) and shard != o.needs[0]]
            free = [o for o in free if Place(shard, owner.rank, o.rank) not in places]
            if not free:
                break
            best = min(free, key=lambda o: (load[o.rank], (o.rank - owner.rank) % len(offers)))
            places.append(Place(shard, owner.rank, best.rank))
            load[best.rank] += 1
            used.add(best.node)
    return tuple(places)


def of_private(offers: Sequence[Offer], copies: int, keepers: Callable[[int], Sequence[int]]) -> tuple[Place, ...]:
    """Who writes whose private state besides the rank itself. `keepers`: those who are given a rank's state, best first."""
    nodes = {offer.rank: offer.node for offer in offers}
    places = []
    for rank in sorted(nodes):
        used = {nodes[rank]}
        for keeper in keepers(rank):
            if len(used) < copies and nodes[keeper] not in used:
                places.append(Place(private(rank, len(nodes)), rank, keeper))
                used.add(nodes[keeper])
    return tuple(places)
