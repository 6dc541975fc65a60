"""Which part of a whole tensor a piece is: boxes of elements, and what they have in common.

Theory. A DTensor's local piece is a box of the whole tensor: each dimension of the mesh that shards dimension d of the tensor cuts
what is left of d into equal runs, the last ones shorter or empty when it does not divide (torch.chunk). Cuts of one dimension are made
in the order of the mesh, but for a strided one (FSDP2 over tensor parallelism), which is made last. Two boxes meet in a box; a box
without another is some boxes. That is all that is needed to put a piece together from those of another cut.

Invariants: `minus` gives disjoint boxes that, with the overlap, are the box. A piece whose place is in doubt has no box.
Source: torch.distributed.tensor.placement_types, torch.chunk.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple


class Box(NamedTuple):
    """`shape` elements in each dimension, from `start` on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements in it."""
        return prod(self.shape)


class Cut(NamedTuple):
    """A dimension of a mesh shards `dim` of the tensor. `factor`: 0, or into how many runs it had been cut before (strided)."""

    dim: int
    factor: int = 0


def all_of(shape: Sequence[int]) -> Box:
    """The whole."""
    return Box((0,) * len(shape), tuple(shape))


def piece(whole: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut | None]) -> Box | None:
    """The box at that place of the mesh; `cuts`: one for each of its dimensions (None: replicated). None when it is in doubt."""
    start, shape = [0] * len(whole), list(whole)
    places = [(cut, size, at) for cut, size, at in zip(cuts, mesh, coordinate, strict=True) if cut is not None]
    for number, (cut, *_) in enumerate(places):
        later = prod(size for other, size, _ in places[number + 1 :] if other.dim == cut.dim and not other.factor)
        if cut.factor not in (0, later):
            return None
    strided = [cut.dim for cut, *_ in places if cut.factor]
    if len({*strided}) < len(strided):
        return None
    for cut, size, at in sorted(places, key=lambda place: place[0].factor > 0):
        length = shape[cut.dim]
        run = -(-length // size)
        first = min(length, run * at)
        start[cut.dim] += first
        shape[cut.dim] = min(length, first + run) - first
    return Box(tuple(start), tuple(shape))


def of(tensor: Any, rank: int, spread: Iterable[Any] | None = None, whole: Sequence[int] | None = None) -> Box | None:
    """The box of that rank's piece of a tensor (a DTensor, or one that is whole everywhere).

    `spread`, `whole`: for another tensor on the same mesh, its placements and its shape.
    """
    shape = tuple(tensor.shape) if whole is None else tuple(whole)
    if not hasattr(tensor, "placements"):
        return all_of(shape) if spread is None else None
    mesh = tensor.device_mesh
    coordinate = coordinate_of(mesh, rank)
    placements = list(tensor.placements if spread is None else spread)
    cuts = [_cut(kind, len(shape)) for kind in placements]
    if not coordinate or len(cuts) != len(mesh.shape) or "?" in cuts:
        return None
    return piece(shape, tuple(mesh.shape), coordinate, cuts)  # type: ignore[arg-type]  # no "?" is left


def coordinate_of(mesh: Any, rank: int) -> tuple[int, ...]:
    """A rank's place in a mesh; (): it is not in it.

    A mesh's own `get_coordinate` may be of the rank that this process was before a restart: torch keeps meshes that compare equal.
    """
    places = (mesh.mesh == rank).nonzero().tolist()
    return tuple(places[0]) if places else ()


def _cut(kind: Any, ndim: int) -> Cut | str | None:
    if kind.is_replicate():
        return None
    name = type(kind).__name__
    if name not in ("Shard", "_StridedShard") or not -ndim <= kind.dim < ndim:
        return "?"
    return Cut(kind.dim % ndim, kind.split_factor if name == "_StridedShard" else 0)


def overlap(one: Box, other: Box) -> Box | None:
    """What both have; None when that is nothing."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(last - first for first, last in zip(start, stop, strict=True))
    return None if any(size <= 0 for size in shape) else Box(start, shape)


def minus(one: Box, part: Box) -> list[Box]:
    """What is left of a box without a part of it."""
    left = []
    start, shape = list(one.start), list(one.shape)
    for dim in range(len(shape)):
        before = part.start[dim] - start[dim]
        after = start[dim] + shape[dim] - part.start[dim] - part.shape[dim]
        if before:
            left.append(Box(tuple(start), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            behind = (*start[:dim], part.start[dim] + part.shape[dim], *start[dim + 1 :])
            left.append(Box(behind, (*shape[:dim], after, *shape[dim + 1 :])))
        start[dim], shape[dim] = part.start[dim], part.shape[dim]
    return left


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """How a part of a box is indexed in a tensor that is the box."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(part.start, part.shape, whole.start, strict=True))


def run(part: Box, whole: Box) -> tuple[int, int]:
    """The elements of a box, laid out row by row, from the first to the last that the part has."""
    first = last = 0
    for a, n, b, size in zip(*part, *whole, strict=True):
        first, last = first * size + a - b, last * size + a - b + n - 1
    return first, last + 1
