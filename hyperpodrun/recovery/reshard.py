"""A state that is cut among the ranks of one world, cut anew for another world: which bytes of which old shards make a new one.

Theory. Sharded states (FSDP2, HSDP, tensor parallel) are named by their place in a mesh, so that in a world of another size nobody
needs what anybody has. But every layout says of each piece of a tensor which box of the whole it is (boxes.py), and the shards of one
world, its *family*, are together the whole state. Where all members of a family are held after one step, each new rank works out
which boxes of theirs its own pieces meet, asks for the runs of bytes in which these lie, and copies them into place. Values are moved,
never computed with: the whole tensors are the old ones, bit for bit.

Why not torch.distributed.checkpoint: its planner wants the old state's metadata in one place and matches by name what a state_dict
gives, for which the optimizer's state has to exist on the new ranks; its readers hand tensors over through buffers of their own. Boxes
of DTensors are all that is needed here, uneven and empty ones included, and the bytes go where they belong.

A family is one only if a tensor of one name is the same tensor on all ranks: every DTensor's mesh spans the whole world, and the
replica group is all of it. (Two pipeline stages may both have a "0.weight".)

States of a cover: *wanting* something, or *whole*.
Invariants: each element that is wanted is taken once, from a member of the family after the plan's step; whoever is not whole in the
end has taken nothing that counts.
"""

from collections.abc import Iterable, Sequence

import msgspec
import torch

from hyperpodrun.recovery import boxes, codec, plan, shard
from hyperpodrun.recovery.boxes import Box
from hyperpodrun.recovery.parts import Part, RecoveryError

MERGE_BYTES = 16 << 20
"""Runs that follow each other are asked for together, up to this."""


class Take(msgspec.Struct, frozen=True):
    """Bytes `start` to `stop` of a member's row; in them, laid out as that member's box, is `part` of the leaf at that `place`."""

    place: int
    part: Box
    theirs: Box
    start: int
    stop: int


class Cover:
    """What is wanted, and what of it is not taken yet."""

    def __init__(self, wanted: shard.Layout) -> None:
        self._leaves = [(f"{part.name}.{leaf.path}", leaf) for part in wanted.parts for leaf in part.leaves]
        self._left = {path: [(place, box)] for place, (path, leaf) in enumerate(self._leaves) if (box := _box(leaf)).elements}
        self._skeletons = {part.name: part.skeleton for part in wanted.parts}

    @property
    def whole(self) -> bool:
        """Is nothing wanting?"""
        return not self._left

    @property
    def wanting(self) -> str:
        """The first tensor of which something is."""
        return next(iter(self._left), "")

    def take(self, layout: shard.Layout) -> list[Take]:
        """What this member has of it. Raises plan.Contradiction when the member's state is another one."""
        takes, at = [], 0
        for part in layout.parts:
            if part.skeleton != self._skeletons.get(part.name):
                raise plan.Contradiction(
                    f"the values of {part.name} (its groups' settings, or which parameters it has state for) differ between the ranks "
                    "that have shards of it: it cannot be cut anew"
                )
            for leaf in part.leaves:
                path = f"{part.name}.{leaf.path}"
                takes += self._take_of(path, leaf, at)
                at += leaf.nbytes
        return takes

    def _take_of(self, path: str, leaf: codec.Leaf, at: int) -> list[Take]:
        left = self._left.pop(path, [])
        if not left:
            return []
        theirs, size = _box(leaf), codec.torch_dtype(leaf.dtype).itemsize
        mine = self._leaves[left[0][0]][1]
        if (mine.dtype, mine.whole or mine.shape) != (leaf.dtype, leaf.whole or leaf.shape):
            raise plan.Contradiction(
                f"{path} has another type or shape on the ranks that have pieces of it: it cannot be cut anew"
            )
        takes, wanting = [], []
        for place, box in left:
            part = boxes.overlap(box, theirs)
            if part is None:
                wanting.append((place, box))
                continue
            first, last = boxes.run(part, theirs)
            takes.append(Take(place, part, theirs, at + first * size, at + last * size))
            wanting += [(place, rest) for rest in boxes.minus(box, part)]
        if wanting:
            self._left[path] = wanting
        return takes


def _box(leaf: codec.Leaf) -> Box:
    return Box(leaf.start or (0,) * len(leaf.shape), leaf.shape)


class New:
    """This rank's new shard while it is put together. `template`: the layout of any member. Raises RecoveryError."""

    def __init__(self, template: shard.Layout, parts: Sequence[Part], rank: int) -> None:
        self._layout = wanted(template, parts, rank)
        _, self._tensors = shard.place(self._layout, parts)
        self._cover = Cover(self._layout)

    @property
    def whole(self) -> bool:
        """Is nothing wanting?"""
        return self._cover.whole

    def landings(self, layout: shard.Layout) -> "list[Landing]":
        """What is to be had of a member of that layout."""
        return [Landing(takes, self._layout, self._tensors) for takes in together(self._cover.take(layout))]

    def install(self, parts: Sequence[Part]) -> None:
        """All of it has landed. Raises RecoveryError, plan.Contradiction."""
        if not self.whole:
            raise plan.Contradiction(f"no shard of the earlier layout has all of {self._cover.wanting}: it cannot be cut anew")
        shard.install(self._layout, parts, self._tensors)


class Landing:
    """Where the bytes of some takes go: straight into the shard where they lie there as they are sent, else by way of a stage."""

    def __init__(self, takes: Sequence[Take], layout: shard.Layout, tensors: Sequence[torch.Tensor]) -> None:
        leaves = [leaf for part in layout.parts for leaf in part.leaves]
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.start, self.stop = takes[0].start, takes[-1].stop
        self.into: list[torch.Tensor] = []
        for take in takes:
            leaf, here = leaves[take.place], tensors[take.place]
            dtype, mine, count = codec.torch_dtype(leaf.dtype), _box(leaf), take.part.elements
            first, last = boxes.run(take.part, mine)
            sent = (take.stop - take.start) // dtype.itemsize
            if here.device.type == "cpu" and sent == count == last - first:
                self.into.append(codec.raw(here)[first * dtype.itemsize : last * dtype.itemsize])
                continue
            stage = torch.empty(sent, dtype=dtype)
            # the stage begins with the part's first element; its rows are as far apart as those of the box they come from
            self._staged.append(
                (here[boxes.within(take.part, mine)], stage.as_strided(take.part.shape, _strides(take.theirs.shape)))
            )
            self.into.append(codec.raw(stage))

    def fill(self, pieces: Sequence[torch.Tensor]) -> None:
        """The bytes are in this process: flat tensors, as many bytes in all."""
        row, at = torch.cat([piece.cpu() for piece in pieces]), 0
        for into in self.into:
            into.copy_(row[at : at + into.numel()])
            at += into.numel()

    def land(self) -> None:
        """All of it has arrived."""
        for here, staged in self._staged:
            here.copy_(staged)


def together(takes: Iterable[Take]) -> list[list[Take]]:
    """The takes of one member in the order of its row, those together that follow each other."""
    groups: list[list[Take]] = []
    for take in sorted(takes, key=lambda take: (take.start, take.stop)):
        if groups and groups[-1][-1].stop == take.start and take.stop - groups[-1][0].start <= MERGE_BYTES:
            groups[-1].append(take)
        else:
            groups.append([take])
    return groups


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def wanted(template: shard.Layout, parts: Sequence[Part], rank: int) -> shard.Layout:
    """The layout that the state of which `template` is a shard is to have on that rank. Raises RecoveryError."""
    by_name = {part.name: part for part in parts}
    if by_name.keys() != {part.name for part in template.parts}:
        there = ", ".join(part.name for part in template.parts)
        raise RecoveryError(f"the state has the parts {there}, here are {', '.join(by_name)}")
    return shard.Layout(
        tuple(
            shard.PartLayout(part.name, tuple(by_name[part.name].cut(part.leaves, part.skeleton, rank)), part.skeleton)
            for part in template.parts
        )
    )


def nearest_first(members: Sequence[str], rank: int, world_size: int) -> list[str]:
    """The members in the order in which to ask: those first that a rank at its place is most likely to meet."""
    places = sorted(members, key=_numbers)
    at = (rank + 0.5) / world_size * len(places) - 0.5
    return [member for _, member in sorted(enumerate(places), key=lambda pair: (abs(pair[0] - at), pair[0]))]


def _numbers(name: str) -> list[tuple[int, int, str]]:
    """For an order in which "shard 10" comes behind "shard 9"."""
    words = "".join(letter if letter.isdigit() else f" {letter} " for letter in name).split()
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in words]
