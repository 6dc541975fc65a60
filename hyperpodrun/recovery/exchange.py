"""Each step, before anybody changes a parameter: every rank's private state is safe in other ranks' memory.

Theory. A rank may die between its part in a step's all-reduce and its own update. The others then have the step's gradients and go on;
were the dead rank's private state known to nobody, the step could not be restored, and the one before is overwritten already. So
`swap` is called on entering the update, and returns only when the states of *all* ranks have reached somebody else: whoever has
changed a parameter knows that. Up to GATHER_RANKS everybody gets everything (one all-gather, which is the barrier at the same time);
beyond that each rank sends to `copies` buddies half the world away and so on, and a barrier follows.

With each state travel small numbers, of which every rank learns the largest: so the ranks agree on the pace of versions (pace.py).

Invariants: all ranks call `swap` equally often; the states are those of one step.
"""

import struct
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

GATHER_RANKS = 16
_HEAD = struct.Struct("<QQQ")
_ROOM_BYTES = 4096


class Exchange:
    """Over `group`, a process group that takes CPU tensors and has all ranks (None: the default group). `nodes`: of each rank."""

    def __init__(self, rank: int, world_size: int, copies: int, nodes: Sequence[str] = (), group: Any = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._copies = copies
        self._nodes = nodes
        self._group = group
        self._buddies = buddies(rank, world_size, copies, nodes)
        self._wards = [other for other in range(world_size) if rank in buddies(other, world_size, copies, nodes)]
        self._gathers = world_size <= GATHER_RANKS
        self._resize(0)

    def keepers(self, rank: int) -> Sequence[int]:
        """Who is given that rank's state, its buddies first."""
        others = (other for other in range(self._world_size) if other != rank) if self._gathers else ()
        return [*dict.fromkeys((*buddies(rank, self._world_size, self._copies, self._nodes), *others))]

    def swap(self, state: bytes, numbers: tuple[int, int] = (0, 0)) -> tuple[dict[int, bytes], tuple[int, int]]:
        """Give this rank's state; the states of others that are now kept here, and the largest numbers.

        Raises what torch.distributed raises when a rank is gone or the group is aborted.
        """
        if self._world_size == 1:
            return {}, numbers
        while True:
            self._fill(state, numbers)
            if self._gathers:
                dist.all_gather(self._others, self._own, group=self._group)
                heads = [_HEAD.unpack(bytes(other[: _HEAD.size].tolist())) for other in self._others]
            else:
                heads = self._to_buddies()
            longest = max(size for size, *_ in heads)
            if longest <= self._room:
                break
            self._resize(longest)  # on all ranks alike: all have seen the same heads
        senders = range(self._world_size) if self._gathers else self._wards
        kept = {}
        for place, sender in enumerate(senders):
            if sender != self._rank:
                size = heads[place][0]
                kept[sender] = self._others[place][_HEAD.size : _HEAD.size + size].numpy().tobytes()
        return kept, (max(numbers[0], *(head[1] for head in heads)), max(numbers[1], *(head[2] for head in heads)))

    def once(self, state: bytes) -> dict[int, bytes]:
        """`swap` of something that may be large: the steps' messages stay as small as they are."""
        return Exchange(self._rank, self._world_size, self._copies, self._nodes, self._group).swap(state)[0]

    def _resize(self, longest: int) -> None:
        self._room = (longest * 5 // 4 + _ROOM_BYTES) // 64 * 64
        size = _HEAD.size + self._room
        self._own = torch.zeros(size, dtype=torch.uint8)
        count = self._world_size if self._gathers else len(self._wards)
        self._others = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]

    def _fill(self, state: bytes, numbers: tuple[int, int]) -> None:
        head = _HEAD.pack(len(state), *numbers)
        text = bytearray(head + state[: self._room])
        self._own[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)

    def _to_buddies(self) -> list[tuple[int, int, int]]:
        # The room must be the same everywhere, and a buddy sees only its wards' sizes: so the sizes go round first.
        sizes = self._own[: _HEAD.size].view(torch.int64).clone()
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self._group)
        longest, *numbers = sizes.tolist()
        if longest > self._room:
            return [(longest, *numbers)]
        work = [dist.irecv(other, ward, group=self._group) for other, ward in zip(self._others, self._wards, strict=True)]
        work += [dist.isend(self._own, buddy, group=self._group) for buddy in self._buddies]
        for pending in work:
            pending.wait()  # type: ignore[union-attr]  # None only for ranks outside the group
        dist.barrier(group=self._group)
        return [(_HEAD.unpack(bytes(other[: _HEAD.size].tolist()))[0], *numbers) for other in self._others]


def buddies(rank: int, world_size: int, copies: int, nodes: Sequence[str] = ()) -> Sequence[int]:
    """The ranks that keep this one's private state: as far away as possible, on as many other nodes as there are (`nodes`: of each
    rank; where it is not said, ranks of a node are taken for neighbours)."""
    chosen: list[int] = []
    count = min(max(copies, 1), world_size - 1)
    for place in range(count):
        used = {nodes[other] for other in (rank, *chosen)} if nodes else set()
        first = rank + world_size * (place + 1) // (count + 1)
        free = ((first + step) % world_size for step in range(world_size))
        chosen.append(_first_elsewhere((other for other in free if other not in (rank, *chosen)), nodes, used))
    return chosen


def _first_elsewhere(ranks: Iterable[int], nodes: Sequence[str], used: Container[str]) -> int:
    """The first of these ranks that is on another node than those; the first of all where none is."""
    first = None
    for other in ranks:
        if not nodes or nodes[other] not in used:
            return other
        first = other if first is None else first
    assert first is not None, "there are more ranks than buddies"
    return first
