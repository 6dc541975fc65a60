"""A shard: what one replica set holds in common, as a row of bytes that lie where they are.

Theory. The tensors of some parts, in order, are one row of bytes, `nbytes` long; nothing is copied for it, a range of it is a list of
memory views. What is needed to make such a row elsewhere is its `Layout`: leaves and skeletons, a few hundred bytes a tensor.

Invariants: the row is the same wherever the layout is; only dense tensors are in it (others are made dense when the shard is made).
"""

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import msgspec
import torch

from hyperpodrun.recovery import boxes, codec
from hyperpodrun.recovery.parts import Part, RecoveryError


class PartLayout(msgspec.Struct, frozen=True, array_like=True):
    """One part: its leaves and the rest of it."""

    name: str
    leaves: tuple[codec.Leaf, ...]
    skeleton: bytes


class Kin(NamedTuple):
    """What a rank's shard is one of: the `family` of that name with so many `members`, and which `rank` has it. See Layout."""

    family: str = ""
    members: int = 0
    rank: int = 0


NO_KIN = Kin()


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What a shard looks like. `family`: the name of the set of shards that are the whole state together ("": it cannot be cut
    anew), and how many `members` that has."""

    parts: tuple[PartLayout, ...]
    family: str = ""
    members: int = 0

    @property
    def nbytes(self) -> int:
        """Of all its leaves."""
        return sum(leaf.nbytes for part in self.parts for leaf in part.leaves)

    def digest(self) -> str:
        """Of names, types and shapes; where the tensors live, and the skeletons, do not count."""
        names = [[part.name, [(leaf.path, leaf.dtype, leaf.shape) for leaf in part.leaves]] for part in self.parts]
        return blake2b(msgspec.msgpack.encode(names), digest_size=16).hexdigest()


class Shard:
    """`tensors` are all leaves of `layout`, dense, in its order. `digest`: of the row as it was written once (shm.digest_of)."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], digest: bytes = b"") -> None:
        self.layout = layout
        self.digest = digest
        self.tensors = [codec.raw(tensor) for tensor in tensors]
        self._offsets = [0]
        for tensor in self.tensors:
            self._offsets.append(self._offsets[-1] + tensor.numel())

    @property
    def nbytes(self) -> int:
        """How long the row is."""
        return self._offsets[-1]

    def leaves(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(path, offset, bytes) of each tensor."""
        paths = [f"{part.name}.{leaf.path}" for part in self.layout.parts for leaf in part.leaves]
        return zip(paths, self._offsets, self.tensors, strict=False)

    def range(self, start: int, stop: int) -> list[torch.Tensor]:
        """The bytes from `start` to `stop`, as flat uint8 tensors over the memory itself."""
        pieces = []
        place = max(0, bisect_right(self._offsets, start) - 1)
        while place < len(self.tensors) and self._offsets[place] < stop:
            offset, tensor = self._offsets[place], self.tensors[place]
            first, last = max(start, offset) - offset, min(stop, offset + tensor.numel()) - offset
            if first < last:
                pieces.append(tensor[first:last])
            place += 1
        return pieces

    def cuts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """That range where tensors end: the same wherever the layout is."""
        place = max(0, bisect_right(self._offsets, start) - 1)
        ends = self._offsets[place : bisect_left(self._offsets, stop) + 1]
        clipped = [(max(start, first), min(stop, last)) for first, last in pairwise(ends)]
        return [(first, last) for first, last in clipped if first < last]


def of(parts: Sequence[Part], kin: Kin = NO_KIN) -> Shard:
    """The shard that these parts are now. Raises CodecError."""
    layouts, tensors, family = [], [], kin.family
    for part in parts:
        found, skeleton = part.leaves()
        spread = part.spread(kin.rank)
        for path, tensor in found:
            _, box = spread.get(path, ((), boxes.all_of(tensor.shape)))
            if box is None or box.shape != tuple(tensor.shape):
                family = ""
        leaves = [_leaf(path, tensor, *spread.get(path, ((), None))) for path, tensor in found]
        layouts.append(PartLayout(part.name, tuple(leaves), skeleton))
        tensors += [codec.dense(tensor) for _, tensor in found]
    return Shard(Layout(tuple(layouts), family, kin.members if family else 0), tensors)


def _leaf(path: str, tensor: torch.Tensor, whole: tuple[int, ...], box: boxes.Box | None) -> codec.Leaf:
    leaf = codec.leaf_of(path, tensor)
    return leaf if box is None else msgspec.structs.replace(leaf, whole=whole, start=box.start)


def place(layout: Layout, parts: Sequence[Part]) -> tuple[Shard, list[torch.Tensor]]:
    """A shard of that layout over the parts' own memory where it can be, and its tensors for `install`. Raises RecoveryError."""
    by_name = {part.name: part for part in parts}
    if by_name.keys() != {part.name for part in layout.parts}:
        there = ", ".join(part.name for part in layout.parts)
        raise RecoveryError(f"the state has the parts {there}, here are {', '.join(by_name)}")
    tensors = [tensor for part in layout.parts for tensor in by_name[part.name].places(part.leaves)]
    return Shard(layout, tensors), tensors


def install(layout: Layout, parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> None:
    """Make the parts what the tensors say. Raises RecoveryError, CodecError, and what a part's load_state_dict raises."""
    by_name = {part.name: part for part in parts}
    at = 0
    for part in layout.parts:
        by_name[part.name].install(tensors[at : at + len(part.leaves)], part.skeleton)
        at += len(part.leaves)


def view(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor of the CPU, writable, for as long as somebody has the view (or a part of it)."""
    size = tensor.numel()
    if not size:
        return memoryview(bytearray())
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # what was copied from a device has no other owner
    return memoryview(memory).cast("B")


def pack(shard: Shard) -> bytes:
    """Layout and row in one piece of bytes (for what is small)."""
    row = b"".join(bytes(view(tensor.cpu())) for tensor in shard.tensors)
    return msgspec.msgpack.encode((shard.layout, row))


def unpack(text: bytes) -> tuple[Layout, list[torch.Tensor]]:
    """What `pack` packed: the layout and new tensors. Raises CodecError."""
    try:
        layout, row = msgspec.msgpack.decode(text, type=tuple[Layout, bytes])
        leaves = [leaf for part in layout.parts for leaf in part.leaves]
        if layout.nbytes != len(row) or any(size < 0 for leaf in leaves for size in leaf.shape):
            raise codec.CodecError("a packed state of another length than its layout says")
        tensors = [codec.empty(leaf) for leaf in leaves]
    except (msgspec.DecodeError, RuntimeError, OverflowError) as error:
        raise codec.CodecError(f"not a packed state: {error}") from error
    at = 0
    for tensor in tensors:
        flat = codec.raw(tensor)
        view(flat)[:] = row[at : at + flat.numel()]
        at += flat.numel()
    return layout, tensors
