"""The versions of a job's state: which this rank writes, which it keeps for others, which there are.

Theory. pace.py says after which steps, nodestate.py writes, placement.py says who keeps copies for whom, copies.py fetches them. This
file puts them together for one life of the training function.

When the second version of a life begins, the first one is whole everywhere: only then goes what was kept for another world.

Invariants: between `begin` and `close`, versions of two steps are never under way at once.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery import parting, placement, plan, shm
from hyperpodrun.recovery.copies import Copies
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.pace import Pace
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.where import Where


class Room(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of versions: bytes free in its node's shared memory (its own versions included), bytes that a version of its
    shard will have, and where copies of it are to be had."""

    free: int
    expected: int
    host: str
    port: int


class Versions:
    """`copies`: how many nodes shall hold each shard."""

    def __init__(self, where: Where, mine: Memory, copies: int, token: bytes, say: Callable[[str], None]) -> None:
        self.folder = where.folder
        self.pace = Pace()
        self._where = where
        self._mine = mine
        self._number = copies
        self._say = say
        self._node = NodeState(self.folder, mine.heap, say)
        self._copies = Copies(token, self._node.version, self._slots_of, say)
        self._roomy = True
        self._in_use: set[str] = set()
        self._count = 0
        self._made: int | None = None
        """The step of the newest version."""
        self._whole: int | None = None
        """The newest one that is known to be there on all nodes, and on those that keep copies."""
        self._left = True  # something of earlier processes may be there still

    def room(self, host: str, expected: int) -> Room:
        """What the others have to know."""
        try:
            status = os.statvfs(node_state.BASE)
            free = status.f_bavail * status.f_frsize + sum(version.shard.nbytes for version in shm.scan(self.folder))
        except OSError:
            free = 0
        return Room(free, expected, host, self._copies.port)

    def begin(
        self,
        step: int,
        names: Sequence[str],
        offers: Mapping[int, plan.Offer],
        rooms: Mapping[int, Room],
        small: Sequence[placement.Place],
        first: bool,
    ) -> None:
        """The state after `step` is in place. `first`: this is the first rank of its node that has its shard; `names` is written.

        `small`: who writes whose private state besides its rank.

        What is copied of a rank is all that it needs (`offers`): its shard, and what is common to those who have it.
        """
        rank, history = self._where.rank, self._mine.history
        cramped = _cramped(offers, rooms)
        places = placement.place(list(offers.values()), self._number, cramped)
        self._roomy = self._where.node not in cramped
        sent = offers[rank].needs if any(place.owner == rank for place in places) else ()
        self._node.begin(step, history, names, sent, self._roomy)
        self._in_use = _in_use(self._where, offers, places, small)
        addresses = {other: (room.host, room.port) for other, room in rooms.items()}
        wards = [(name, addresses[p.owner]) for p in places if p.buddy == rank for name in offers[p.owner].needs]
        self._copies.begin(wards, bool(sent), history)
        self.pace.begin(step)
        self._tell(offers, rooms, places, first)

    def _tell(
        self, offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room], places: Sequence[placement.Place], first: bool
    ) -> None:
        """What it costs, once, and what is amiss."""
        mine = rooms[self._where.rank]
        if not self._roomy and first:
            base = node_state.BASE
            self._say(
                f"{base} has {_mib(mine.free)} free, versions of this node's state need about "
                f"{_mib(_needed(self._where.node, offers, rooms))}: none are written there. Make it larger (mount -o "
                f"remount,size=... {base}; in a container --shm-size) or give copies=1"
            )
        kept = sum(2 * rooms[place.owner].expected for place in places if place.buddy == self._where.rank)
        if kept:
            owners = ", ".join(str(place.owner) for place in places if place.buddy == self._where.rank)
            self._say(f"rank {self._where.rank} keeps copies of the shards of rank {owners}: about {_mib(kept)}")

    def agreed(self, waits: bool) -> None:
        """All ranks are about to update: whatever was begun before is written; `waits`: some copies are still on their way."""
        if not waits:
            self._whole = self._made
            if self._whole is not None and self._left:
                self._left = False
                parting.forget(self.folder)

    def part(self) -> None:
        """Other processes take over: write what is newer than the versions."""
        self._node.settle()
        if not self._roomy:
            return
        try:
            parting.write(self.folder, self._mine, self._made if self._whole == self._made else None)
        except OSError as error:
            self._say(f"the steps since {self._made} will be repeated, they could not be saved: {error.strerror or error}")

    def agree(self) -> tuple[int, bool]:
        """What this rank says before an update: its k, and whether it still waits for a version."""
        return self.pace.every(), self._copies.waits

    def settle(self) -> None:
        """Before anything changes."""
        self._node.settle()

    def stepped(self, step: int, every: int, waits: bool, made: Callable[[], dict[str, Shard]]) -> None:
        """A step was committed; its version is made if it is due. `every`, `waits`: as agreed; `made` gives the shards by name."""
        self.pace.stepped(time.monotonic())
        if not self.pace.due(step, every, waits):
            return
        self.pace.cost(self._node.cost_s + self._copies.cost_s)
        self._count += 1
        if self._count == 2:
            self._node.only(self._in_use)
            self._mine.only({plan.private(rank, self._where.world_size) for rank in range(self._where.world_size)})
        self._made = step
        self._mine.pin(step)
        self._node.write(step, {} if self._node.off else made(), self.pace.step_s)
        self._copies.fetch(step)

    def close(self) -> None:
        """No more of them."""
        self._node.settle()
        self._copies.close()

    def _slots_of(self, name: str) -> shm.Slots:
        return shm.Slots(self.folder, name) if self._roomy else self._mine.heap.setdefault(name, shm.HeapSlots(name))


def found_by(where: Where, earlier: Memory | None) -> list[shm.Version]:
    """All versions on this node and in this process."""
    heap = {} if earlier is None else earlier.heap
    on_node = shm.scan(where.folder)
    return [*on_node, *(version for slots in heap.values() for version in slots.found())]


def _in_use(
    where: Where, offers: Mapping[int, plan.Offer], places: Sequence[placement.Place], small: Sequence[placement.Place]
) -> set[str]:
    """The shards of which this node has versions in this world: its own ranks', and those that it keeps for others."""
    ranks = {rank for rank, offer in offers.items() if offer.node == where.node}
    owners = {place.owner for place in places if place.buddy in ranks}
    privates = {plan.private(rank, where.world_size) for rank in ranks} | {place.shard for place in small if place.buddy in ranks}
    return privates | {
        name for rank in ranks | owners for name in offers[rank].needs
    }  # fmt: skip


def _needed(node: str, offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room]) -> int:
    shards = {offer.needs[0]: rooms[rank].expected for rank, offer in offers.items() if offer.node == node}
    return 2 * sum(shards.values())


def _cramped(offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room]) -> set[str]:
    """Nodes without room for two versions of each of their shards."""
    nodes = {offer.node for offer in offers.values()}
    free = {node: min(rooms[rank].free for rank, offer in offers.items() if offer.node == node) for node in nodes}
    return {node for node in nodes if free[node] < _needed(node, offers, rooms)}


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
