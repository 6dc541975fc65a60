"""A rank's private state: what exists nowhere else, taken when all of a step's draws are done.

Theory. Samplers have moved and generators have been drawn from when `update` is entered, and no optimizer touches either. So the state
at that moment is the state after the step. Buffers belong here too: a forward pass changes them (running means) before anybody knows
whether the step will be committed, and they may differ between ranks. Constants (masks, tables) are buffers, too: what still is as it
was at first is not carried. Contents are compared, for not every kernel that writes a buffer counts up its version (batch norm's
does not).

Invariants: `install(capture())` changes nothing. What is captured aliases nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from hyperpodrun.recovery import rng, shard
from hyperpodrun.recovery.parts import RecoveryError, local

PORTABLE_BYTES = 16


class _Values:
    """Plain values as a part, for packing."""

    name = "private"

    def __init__(self, values: Any = None) -> None:
        self.values = values

    def leaves(self) -> Any:
        """See Part."""
        from hyperpodrun.recovery import codec

        return codec.encode(self.values)

    def places(self, leaves: Any) -> list[torch.Tensor]:
        """Not asked for."""
        raise NotImplementedError

    def spread(self, rank: int) -> dict[str, Any]:
        """See Part."""
        return {}

    def cut(self, leaves: Any, skeleton: bytes, rank: int) -> Any:
        """Not asked for."""
        raise NotImplementedError

    def install(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> None:
        """See Part."""
        from hyperpodrun.recovery import codec

        self.values = codec.decode(skeleton, tensors)


def pack(values: Any) -> bytes:
    """Any state as bytes. Raises CodecError."""
    return shard.pack(shard.of([_Values(values)]))


def unpack(text: bytes) -> Any:
    """What was packed. Raises CodecError."""
    layout, tensors = shard.unpack(text)
    values = _Values()
    shard.install(layout, [values], tensors)
    return values.values


class Private:
    """`things`: objects with state_dict, by name; `models`: whose buffers count; `mode`: see rng.py."""

    def __init__(self, things: Mapping[str, Any], models: Mapping[str, torch.nn.Module], mode: rng.Mode) -> None:
        self._things = things
        self._mode = mode
        self._buffers = {
            f"{name}.{path}": buffer
            for name, model in models.items()
            for path, buffer in model.named_buffers()
            if path in model.state_dict(keep_vars=True)
        }
        self._untouched = {path: local(buffer).clone() for path, buffer in self._buffers.items()}

    @property
    def empty(self) -> bool:
        """Is there nothing private, ever? (Buffers that are touched later are not foreseen.)"""
        return not self._things and not self._buffers and self._mode != "replicate"

    def capture(self) -> bytes:
        """All of it, now, behind a digest of what must be equal on all ranks if the world's size is to change. Raises CodecError."""
        values: dict[str, Any] = {name: thing.state_dict() for name, thing in self._things.items()}
        for path in [path for path, first in self._untouched.items() if not torch.equal(local(self._buffers[path]), first)]:
            del self._untouched[path]
        touched = {path: local(buffer) for path, buffer in self._buffers.items() if path not in self._untouched}
        states = rng.capture() if self._mode == "replicate" else None
        portable = xxhash.xxh3_128(pack(values)).digest() if values else bytes(PORTABLE_BYTES)
        return portable + pack({"things": values, "buffers": touched, "rng": states})

    def install(self, text: bytes, fresh: int | None = None) -> None:
        """Put it back. `fresh`: a seed for the generators, when the random states in it are another rank's.

        Raises CodecError, RecoveryError, and what an object's load_state_dict raises.
        """
        values = unpack(text[PORTABLE_BYTES:])
        if values["things"].keys() != self._things.keys():
            raise RecoveryError(f"the state has {', '.join(values['things'])}, here are {', '.join(self._things)}")
        for name, thing in self._things.items():
            thing.load_state_dict(values["things"][name])
        for path, value in values["buffers"].items():
            if path not in self._buffers:
                raise RecoveryError(f"there is no buffer {path} any more")
            local(self._buffers[path]).copy_(value)
            self._untouched.pop(path, None)
        if self._mode == "replicate" and fresh is not None:
            rng.seed_with(fresh)
        elif self._mode == "replicate" and values["rng"] is not None:
            rng.install(values["rng"])
