"""Objects of the life before that a training function uses again: a model of its module, or an argument.

Theory. After a restart the function builds new objects, and what the earlier ones hold is the newest state there is. Where it uses
those again, the new objects are the earlier ones, and whatever writes into the one changes the other: what was done to them between
the last update and `restore` (a checkpoint that is loaded, new initial values, what a wrapper broadcasts when it is made), and what
`restore` fetches into them. Writes in place count up a tensor's version, so the sum of these says whether there was one.

States: none. Invariants: a memory is offered only while nothing has written to it since its last update (watching.py).
"""

from collections.abc import Iterator, Sequence

import torch

from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import Part, RecoveryError, local
from hyperpodrun.recovery.watching import trainable


class Reused(RecoveryError):
    """A new beginning is due, and the objects are trained ones. New processes build new ones."""

    rung = "all"


def sharing(parts: Sequence[Part], earlier: Memory | None) -> list[Memory]:
    """Which of what is remembered lies in the memory of these objects."""
    mine = _storages(tensor for part in parts for _, tensor in part.leaves()[0])
    return [one for one in _remembered(earlier) if mine & _storages(t for part in one.parts for _, t in part.leaves()[0])]


def written(parts: Sequence[Part], earlier: Memory) -> bool:
    """Was what the process remembers written to since its last update, as far as can be known? `parts`: the new objects.

    Other tensors in the same memory (made of `.data`) have versions of their own, so they count as writes.
    """
    if not earlier.whole:
        return False
    if earlier in sharing(parts, earlier):
        theirs = _storages(local(parameter) for parameter in trainable(earlier.parts))
        mine = {id(parameter) for parameter in trainable(parts) if _storages(iter([local(parameter)])) & theirs}
        if not mine <= {id(parameter) for parameter in trainable(earlier.parts)}:
            return True
    return not earlier.untouched


def trained(parts: Sequence[Part], earlier: Memory | None) -> bool:
    """Have parameters that these objects train been trained in an earlier life?"""
    mine = _storages(local(parameter) for parameter in trainable(parts))
    return any(
        mine & _storages(local(parameter) for parameter in trainable(one.parts))
        for one in _remembered(earlier)
        if one.step >= 0 or one.torn
    )


def _storages(tensors: Iterator[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


def _remembered(earlier: Memory | None) -> Iterator[Memory]:
    while earlier is not None:
        yield earlier
        earlier = earlier.before
