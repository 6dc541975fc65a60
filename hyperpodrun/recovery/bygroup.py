"""Tensors of devices from rank to rank through the new process group: point to point, in place.

Theory. All ranks know the plan, so each knows what it sends to whom and receives from whom, without asking. The bytes of a fetch go as
*messages*: a large tensor by itself, cut where it is longer than MESSAGE_BYTES, from the memory where it is into the memory where it
belongs; small tensors, and those that live elsewhere than on the group's device, packed together. The messages are cut by the layout
alone, so both ends agree. In the n-th round everybody's n-th messages go in one batch, each followed by its checksum, which both ends
take on the device. So what is needed beside the model is a few messages' memory. All bytes go as uint8, which every backend carries,
whatever the types of the tensors.

A message that arrives damaged is noted and the rounds go on, since others are waiting in them: what its fetch should have brought is
fetched from somebody else then.

States: none. Invariants: a fetch that is not among the failed ones is in place and correct.
Source: torch.distributed.batch_isend_irecv: before the first batch all ranks of an NCCL group have to meet.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from hyperpodrun.recovery import checksum, plan
from hyperpodrun.recovery.shard import Shard

MESSAGE_BYTES = 32 << 20
PACKED_BYTES = 1 << 20
"""Tensors up to here are packed."""
BY_SOCKET = {"cpu"}
"""Kinds of devices whose memory sockets fill as well as any group does."""

Message = list[tuple[int, int]]
"""Ranges of a shard's row: one, or several that are packed."""


def device_for(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Where these tensors live, if the default group brings something there and sockets cannot do it as well."""
    kinds = {tensor.device.type: tensor.device for tensor in tensors if tensor.device.type not in BY_SOCKET}
    if len(kinds) != 1 or not dist.is_initialized():
        return None
    (kind, device), *_ = kinds.items()
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(",") if ":" in pair)
    backend = backends.get(kind, "")
    return None if not backend or (backend == "gloo" and kind != "cpu") else device


def messages(cuts: Sequence[tuple[int, int]]) -> list[Message]:
    """What to send of a row that consists of these ranges, each within one tensor."""
    found: list[Message] = []
    packed: Message = []
    room = MESSAGE_BYTES
    for start, stop in cuts:
        if stop - start > PACKED_BYTES:
            found += [[(at, min(at + MESSAGE_BYTES, stop))] for at in range(start, stop, MESSAGE_BYTES)]
            continue
        if stop - start > room:
            found.append(packed)
            packed, room = [], MESSAGE_BYTES
        packed.append((start, stop))
        room -= stop - start
    return [*found, packed] if packed else found


def exchange(
    rank: int, fetches: Sequence[plan.Fetch], held: Mapping[str, Shard | None], here: Shard | None, device: torch.device
) -> list[plan.Fetch]:
    """Carry out these fetches, the same on all ranks; those of this rank whose bytes arrived damaged.

    `held` is what this rank sends, by name, `here` is where it receives. Raises what torch.distributed raises when a rank is gone.
    """
    if device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device))
    mine = [
        _End(rank, fetch, held[fetch.shard] if fetch.source == rank else here, device)
        for fetch in fetches
        if rank in _ends(fetch)
    ]
    for number in range(max((len(end.messages) for end in mine), default=0)):
        under_way = [end for end in mine if number < len(end.messages)]
        operations = [operation for end in under_way for operation in end.operations(number)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for end in under_way:
            end.finish(number)
    return [end.fetch for end in mine if end.damaged]


def _ends(fetch: plan.Fetch) -> tuple[int, int]:
    return fetch.source, fetch.rank


class _End:
    """This rank's end of one fetch."""

    def __init__(self, rank: int, fetch: plan.Fetch, row: Shard | None, device: torch.device) -> None:
        assert row is not None, "both ends are ready"
        self.fetch = fetch
        self.damaged = False
        self.messages = messages(row.cuts(fetch.start, fetch.stop))
        self._sends = fetch.source == rank
        self._row = row
        self._device = device
        self._under_way = self._sum = torch.empty(0)

    def operations(self, number: int) -> list[dist.P2POp]:
        """Those of its n-th message."""
        pieces = [self._row.range(start, stop)[0] for start, stop in self.messages[number]]
        if self._sends:
            self._under_way = _one(pieces, self._device)
            self._sum = checksum.of_tensor(self._under_way)
            return [dist.P2POp(dist.isend, tensor, self.fetch.rank) for tensor in (self._under_way, self._sum)]
        direct = len(pieces) == 1 and pieces[0].device == self._device
        size = sum(piece.numel() for piece in pieces)
        self._under_way = pieces[0] if direct else torch.empty(size, dtype=torch.uint8, device=self._device)
        self._sum = torch.empty(1, dtype=torch.int64, device=self._device)
        return [dist.P2POp(dist.irecv, tensor, self.fetch.source) for tensor in (self._under_way, self._sum)]

    def finish(self, number: int) -> None:
        """It is here: is it right, and does it still have to be unpacked?"""
        if not self._sends:
            self.damaged |= not torch.equal(checksum.of_tensor(self._under_way), self._sum)
            at = 0
            for start, stop in self.messages[number]:
                place = self._row.range(start, stop)[0]
                if place.data_ptr() != self._under_way.data_ptr():
                    place.copy_(self._under_way[at : at + stop - start])
                at += stop - start
        self._under_way = self._sum = torch.empty(0)


def _one(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    there = [piece.to(device) for piece in pieces]
    return there[0] if len(there) == 1 else torch.cat(there)
