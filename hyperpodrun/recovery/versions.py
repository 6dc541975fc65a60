"""The versions of a job's state: which this rank writes, which it keeps for others, which there are.

Theory. pace.py says after which steps, nodestate.py writes, placement.py says who keeps copies for whom, copies.py fetches them. This
file puts them together for one life of the training function.

Before each update the ranks say how far they are with the version that was made last, and all learn of the least far: so a version
is known to be whole only when everybody holds what it is to hold of it. Until then the one that was whole before is kept, and with it
what was kept of earlier processes and for another world. A version that somebody could not write (no room) never becomes whole: the
next one takes its place.

Invariants: between `begin` and `close`, versions of two steps are never under way at once; the newest version that is known to be
whole is there until another one is.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery import nodestate, parting, placement, plan, shm
from hyperpodrun.recovery.copies import Copies
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.pace import Pace
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.where import Where

HELD, FAILED, WAITS = range(3)
"""How far a rank is with the last version: it has all that it is to have; it never will; it is still on its way."""
TOLD_BYTES = 1 << 20
"""From here on it is said what versions take of the node's memory."""


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
        self._node = NodeState(self.folder, mine.heap, say, lambda: mine.untouched)
        self._copies = Copies(token, self._node.version, self._slots_of, say)
        self._roomy = self._roomy_for_copies = self._is_written = True
        self._in_use: set[str] = set()
        self._every, self._waits = 1, False
        self._before: int | None = None
        """That of earlier lives that is whole."""
        self._made: int | None = None
        """The step of the newest version."""
        self._whole: int | None = None
        """The newest one of this life that is known to be there on all nodes, and on those that keep copies."""

    def room(self, host: str, expected: int) -> Room:
        """What the others have to know. Where nothing can be written there is no room."""
        try:
            nodestate.hold(self.folder)
            status = os.statvfs(node_state.BASE)
            free = status.f_bavail * status.f_frsize + sum(version.shard.nbytes for version in shm.scan(self.folder))
        except OSError:
            free = 0
        return Room(free, expected, host, self._copies.listen())

    def begin(
        self,
        step: int,
        names: Sequence[str],
        offers: Mapping[int, plan.Offer],
        rooms: Mapping[int, Room],
        small: Sequence[placement.Place],
        before: int | None,
    ) -> None:
        """The state after `step` is in place. `names` is written. `before`: the newest version that is whole, of earlier lives.

        `small`: who writes whose private state besides its rank.

        What is copied of a rank is all that it needs (`offers`): its shard, and what is common to those who have it.
        """
        rank, node, history = self._where.rank, self._where.node, self._mine.history
        self._before = before
        cramped = _cramped(offers, rooms)
        places = placement.place(list(offers.values()), self._number, cramped)
        sent = offers[rank].needs if any(place.owner == rank for place in places) else ()
        self._roomy = self._node.begin(step, history, names, sent, node not in cramped)
        self._is_written = _is_written(offers[rank].needs[0], offers, places, cramped) and (self._roomy or node in cramped)
        needed = _needed(node, offers, rooms) + _kept(node, offers, rooms, places)
        self._roomy_for_copies = self._roomy and _free(node, offers, rooms) >= needed
        self._in_use = _in_use(self._where, offers, places, small)
        addresses = {other: (room.host, room.port) for other, room in rooms.items()}
        wards = [(name, addresses[p.owner]) for p in places if p.buddy == rank for name in offers[p.owner].needs]
        self._copies.begin(wards, bool(sent), history)
        self.pace.begin(step)
        self._tell(offers, rooms, places)

    def _tell(self, offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room], places: Sequence[placement.Place]) -> None:
        """What it costs, once, and what is amiss."""
        rank, node, base = self._where.rank, self._where.node, node_state.BASE
        free, own, kept = _free(node, offers, rooms), _needed(node, offers, rooms), _kept(node, offers, rooms, places)
        remedy = f"Make it larger (mount -o remount,size=... {base}; in a container --shm-size) or give copies=1"
        first = rank == min(other for other, offer in offers.items() if offer.node == node)
        if not self._roomy and first and self._node.usable:
            self._say(
                f"{base} has {_mib(free)} free, versions of this node's state need about {_mib(own)}: none are written there. {remedy}"
            )
        elif first and kept and not self._roomy_for_copies:
            self._say(
                f"{base} has {_mib(free)} free, versions of this node's state need about {_mib(own)} and copies for others "
                f"{_mib(kept)}: the copies are kept by the processes, with which they end. {remedy}"
            )
        if self._roomy and first and own + kept >= TOLD_BYTES:
            copies = f", copies for others {_mib(kept)}" if kept and self._roomy_for_copies else ""
            self._tell_once(f"versions of this node's state take about {_mib(own)} of {base}{copies}")
        if any(place.buddy == rank for place in places):
            owners = ", ".join(str(place.owner) for place in places if place.buddy == rank)
            size = sum(2 * rooms[place.owner].expected for place in places if place.buddy == rank)
            self._tell_once(f"rank {rank} keeps copies of the shards of rank {owners}: about {_mib(size)}")

    def _tell_once(self, text: str) -> None:
        if text not in _told:
            _told.add(text)
            self._say(text)

    def agreed(self, every: int, said: int) -> None:
        """All ranks are about to update: whatever was begun before is written. `every`, `said`: the largest of all `agree`."""
        self._every, self._waits = every, said == WAITS
        if said == FAILED and self._made is not None and self._keep is not None:
            self._node.make_room(self._in_use, self._keep)
        if said != HELD or self._made is None:
            return
        first, self._whole = self._whole is None, self._made
        if first:
            if self._roomy:
                parting.forget(self.folder)
            self._node.only(self._in_use)
            self._mine.only({plan.private(rank, self._where.world_size) for rank in range(self._where.world_size)})

    def part(self) -> None:
        """Other processes take over: write what is newer than the versions."""
        self._node.settle()
        if not self._roomy:
            return
        try:
            parting.write(self.folder, self._mine, self._made if self._whole == self._made else None)
        except OSError as error:
            self._say(f"the steps since {self._made} will be repeated, they could not be saved: {error.strerror or error}")

    def agree(self) -> tuple[int, int]:
        """What this rank says before an update: its k, and how far it is with the last version."""
        if self._copies.waits:
            return self.pace.every(), WAITS
        held = self._node.held and self._copies.held and self._is_written
        return self.pace.every(), HELD if held else FAILED

    def settle(self) -> None:
        """Before anything changes."""
        self._node.settle()

    def stepped(self, step: int, made: Callable[[], dict[str, Shard]]) -> None:
        """A step was committed; its version is made if it is due, as agreed. `made` gives the shards by name."""
        self.pace.stepped(time.monotonic())
        if not self.pace.due(step, self._every, self._waits):
            return
        self.pace.cost(self._node.cost_s + self._copies.cost_s)
        self._made = step
        self._mine.pin(step, self._keep)
        self._node.write(step, {} if self._node.off else made(), self.pace.step_s, self._keep)
        self._copies.fetch(step, self._keep)

    @property
    def _keep(self) -> int | None:
        """The step of the newest version that is known to be whole."""
        return self._before if self._whole is None else self._whole

    def close(self) -> None:
        """No more of them."""
        self._node.close()
        self._copies.close()

    def _slots_of(self, name: str) -> shm.Slots:
        return shm.Slots(self.folder, name) if self._roomy_for_copies else self._mine.heap.setdefault(name, shm.HeapSlots(name))


_told: set[str] = set()


def found_by(where: Where, earlier: Memory | None) -> list[shm.Version]:
    """All versions on this node and in this process."""
    heap = {} if earlier is None else earlier.heap
    try:
        nodestate.hold(where.folder)
        on_node = shm.scan(where.folder)
    except OSError:  # not this job's; `begin` says it
        on_node = []
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


def _is_written(
    shard: str, offers: Mapping[int, plan.Offer], places: Sequence[placement.Place], cramped: Collection[str]
) -> bool:
    """Is there a version of it anywhere, with or without a copy?"""
    roomy = any(offer.needs[0] == shard and offer.node not in cramped for offer in offers.values())
    return roomy or any(place.shard == shard for place in places)


def _free(node: str, offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room]) -> int:
    return min(rooms[rank].free for rank, offer in offers.items() if offer.node == node)


def _kept(node: str, offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room], places: Sequence[placement.Place]) -> int:
    """Bytes of copies that a node holds for others."""
    return sum(2 * rooms[place.owner].expected for place in places if offers[place.buddy].node == node)


def _needed(node: str, offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room]) -> int:
    shards = {offer.needs[0]: rooms[rank].expected for rank, offer in offers.items() if offer.node == node}
    return 2 * sum(shards.values())


def _cramped(offers: Mapping[int, plan.Offer], rooms: Mapping[int, Room]) -> set[str]:
    """Nodes without room for two versions of each of their shards."""
    nodes = {offer.node for offer in offers.values()}
    return {node for node in nodes if _free(node, offers, rooms) < _needed(node, offers, rooms)}


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
