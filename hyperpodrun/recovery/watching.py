"""Was the live state written to since its last update?

Theory. Between updates a model is what its last update left, and so it is offered to others and written into versions. Some scripts
put other weights in their place for a while, averages for a validation, and put back what was there. A fault in between would find
the averages. Writes in place count up a tensor's version; many of these scripts write through `.data`, which has a version of its own,
so a few bytes of a few tensors are noted at each update as well.

States: none but what is looked at. Invariants: equal stamps of one watch mean that nothing was written, as far as can be known
in a few microseconds.
Source: torch.Tensor._version (autograd's version counter).
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from hyperpodrun.recovery.parts import ModelPart, OptimizerPart, Part

SAMPLED = 8
SAMPLE_BYTES = 64
_version_of = attrgetter("_version")


def trainable(parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """What the optimizers among them optimize."""
    return (parameter for part in parts if isinstance(part, OptimizerPart) for parameter in part.parameters())


class Stamp(NamedTuple):
    """`versions`: their sum; `sample`: some bytes, by device."""

    versions: int
    sample: tuple[torch.Tensor, ...]


NEVER = Stamp(-1, ())
"""Of what was not committed yet."""


def alike(one: Stamp, other: Stamp) -> bool:
    """Was nothing written in between?"""
    same = one.versions == other.versions and len(one.sample) == len(other.sample)
    return same and all(torch.equal(*pair) for pair in zip(one.sample, other.sample, strict=True))


class Watch:
    """What updates change: the parameters of optimizers, and of modules that no optimizer trains (averages)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._groups = [part.groups() for part in parts if isinstance(part, OptimizerPart)]
        self._count = -1
        self._plain: list[torch.Tensor] = []
        self._spread: list[torch.Tensor] = []
        self._sampled: list[tuple[torch.Tensor, int]] = []
        self._views: list[list[torch.Tensor]] = []

    def stamp(self) -> Stamp:
        """As they are now: another one when they have been written to."""
        count = sum(len(group["params"]) for groups in self._groups for group in groups)
        if count != self._count:
            self._count = count
            self._choose()
        versions = sum(map(_version_of, self._plain))
        if self._spread:
            versions += sum(map(_version_of, map(_here, self._spread)))
        if any(_here(tensor).data_ptr() != address for tensor, address in self._sampled):
            self._look()
        return Stamp(versions, tuple([torch.cat(views) for views in self._views]))

    def _choose(self) -> None:
        watched = {id(parameter): parameter for parameter in trainable(self._parts)}
        for part in self._parts:
            if isinstance(part, ModelPart):
                own = part.parameters()
                if not any(id(parameter) in watched for parameter in own):
                    watched |= {id(parameter): parameter for parameter in own}
        every = [*watched.values()]
        self._spread = [tensor for tensor in every if hasattr(tensor, "to_local")]
        self._plain = [tensor for tensor in every if not hasattr(tensor, "to_local")]
        known = [tensor for tensor in every if _has_bytes(_here(tensor))]
        some = known[:: max(1, len(known) // SAMPLED)][: SAMPLED - 1] + known[-1:]
        self._sampled = [(tensor, 0) for tensor in some]
        self._look()

    def _look(self) -> None:
        self._sampled = [(tensor, _here(tensor).data_ptr()) for tensor, _ in self._sampled]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor, _ in self._sampled:
            here = _here(tensor).detach()
            offset, size = here.storage_offset() * here.element_size(), min(SAMPLE_BYTES, here.numel() * here.element_size())
            storage = here.untyped_storage()
            view = torch.empty(0, dtype=torch.uint8, device=here.device).set_(storage, offset, (size,))  # type: ignore[call-overload]
            by_device.setdefault(here.device, []).append(view)
        self._views = [*by_device.values()]


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece itself; `to_local` makes another tensor of it."""
    return getattr(tensor, "_local_tensor", tensor)


def _has_bytes(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type != "meta" and tensor.numel() > 0
