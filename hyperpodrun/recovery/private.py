"""A rank's private state: what exists nowhere else, taken when all of a step's draws are done.

Theory. Samplers have moved and generators have been drawn from when `update` is entered, and no optimizer touches either. So the state
at that moment is the state after the step. Buffers belong here too (and what a module's get_extra_state gives): a forward pass changes
them (running means) before anybody knows whether the step will be committed, and they may differ between ranks. Contents are compared
with those at first, for not every kernel that writes a buffer counts up its version (batch norm's does not).

Constants (masks, tables, random features) are buffers, too: what still is as it was at first does not travel at each step. All of
them are exchanged once (`constants`), and kept with the states of the steps; for the next entry of the function may draw others.
Buffers that are no part of a state_dict are carried as long as they are constant: after that they are caches.

Whatever changes inside the update comes too late for this. `differs` says so.

Invariants: `install(capture())` changes nothing. What is captured aliases nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import xxhash

from hyperpodrun.recovery import counting, rng, shard
from hyperpodrun.recovery.parts import RecoveryError, following, local
from hyperpodrun.recovery.sampler import JobSampler

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


class _Buffer(NamedTuple):
    """A place for a buffer: a module may put another tensor there. `counts`: it is part of the module's state_dict."""

    module: torch.nn.Module
    name: str
    counts: bool

    @property
    def device(self) -> torch.device:
        """Where it is."""
        here = self.tensor
        if here is None:
            here = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if here is None else here.device

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is there now: this rank's piece of it."""
        value = self.module._buffers.get(self.name)
        return None if value is None else local(value)

    def put(self, value: torch.Tensor) -> None:
        """Make it that."""
        here = self.tensor
        if here is not None and (here.shape, here.dtype) == (value.shape, value.dtype):
            here.copy_(value)
        else:
            self.module._buffers[self.name] = value.to(self.device)


class Private:
    """`things`: objects with state_dict, by name; `models`: whose buffers count; `mode`: see rng.py."""

    def __init__(self, things: Mapping[str, Any], models: Mapping[str, torch.nn.Module], mode: rng.Mode) -> None:
        self._things = things
        self._mode = mode
        self._models = models
        self._buffers = dict(_buffers(models))
        self._untouched = {path: at.tensor.clone() for path, at in self._buffers.items() if at.tensor is not None}
        self._extra = {
            f"{name}.{path}": module
            for name, model in models.items()
            for path, module in model.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        }
        self._taken: dict[str, Any] | None = None
        self._counting = counting.Counting()

    @property
    def empty(self) -> bool:
        """Is there nothing private, ever?"""
        return not self._things and not self._buffers and not self._extra and self._mode != "replicate"

    @property
    def has_constants(self) -> bool:
        """May there be some?"""
        return bool(self._buffers)

    def constants(self) -> bytes:
        """The buffers that have not been touched. Raises CodecError."""
        return pack(self._untouched) if self._untouched else b""

    def begin(self, world: int) -> None:
        """The state is in place in a world of that size; draws follow."""
        self._counting.begin(self._counted(), world)

    def drawn(self, step: int) -> None:
        """All draws of this step are done: what follows is `capture`. Raises plan.Contradiction, see counting.py."""
        for thing in self._things.values():
            if isinstance(thing, JobSampler):
                thing.trained(step)
        self._taken = {name: thing.state_dict() for name, thing in self._things.items()}
        self._counting.step(self._counted(self._taken))

    def capture(self) -> bytes:
        """All of it, now, behind a digest of what must be equal on all ranks if the world's size is to change. Raises CodecError."""
        taken, self._taken = self._taken, None
        values = {name: thing.state_dict() for name, thing in self._things.items()} if taken is None else taken
        touched = self._touched()
        portable = xxhash.xxh3_128(pack(values)).digest() if values else bytes(PORTABLE_BYTES)
        states = rng.capture() if self._mode == "replicate" else None
        extra = {path: module.get_extra_state() for path, module in self._extra.items()}
        return portable + pack({
            "things": values, "buffers": touched, "extra": extra, "rng": states, "moves": list(self._counting.moves),
        })  # fmt: skip

    def install(self, text: bytes, world: int = 0, fresh: int | None = None) -> None:
        """Put it back, in a world of that size. `fresh`: a seed for the generators, when the random states in it are another rank's.

        Raises CodecError, RecoveryError, plan.Contradiction, and what an object's load_state_dict raises.
        """
        values = unpack(text[PORTABLE_BYTES:])
        if values["things"].keys() != self._things.keys():
            raise RecoveryError(f"the state has {', '.join(values['things'])}, here are {', '.join(self._things)}")
        self._counting.take_over(counting.Moves(*values["moves"]), world, [*self._counted()])
        for name, thing in self._things.items():
            thing.load_state_dict(values["things"][name])
        for path, value in values["buffers"].items():
            self._at(path).put(value)
            self._untouched.pop(path, None)
        for path, value in values["extra"].items():
            if path not in self._extra:
                raise RecoveryError(f"there is no module {path} with an extra state any more")
            self._extra[path].set_extra_state(value)
        if self._mode == "replicate" and fresh is not None:
            rng.seed_with(fresh)
        elif self._mode == "replicate" and values["rng"] is not None:
            rng.install(values["rng"])

    def install_constants(self, text: bytes) -> None:
        """Before `install`: what was constant then. Raises CodecError, RecoveryError."""
        for path, value in (unpack(text) if text else {}).items():
            at = self._at(path)
            here = at.tensor
            if not at.counts and (here is None or here.shape != value.shape):
                continue  # a cache
            at.put(value)
            self._untouched[path] = value.to(at.device)

    def differs(self, before: bytes) -> list[str]:
        """What is not as it was when that was captured, by name."""
        was, now = unpack(before[PORTABLE_BYTES:]), unpack(self.capture()[PORTABLE_BYTES:])
        found = []
        for kind in ("things", "buffers", "extra"):
            found += [name for name in {**was[kind], **now[kind]} if pack(was[kind].get(name)) != pack(now[kind].get(name))]
        return found + (["the random numbers"] if pack(was["rng"]) != pack(now["rng"]) else [])

    def appeared(self) -> list[str]:
        """Buffers that were not there at first: no restart would know of them."""
        return [path for path, at in _buffers(self._models) if at.counts and path not in self._buffers]

    def _touched(self) -> dict[str, torch.Tensor]:
        for path, first in list(self._untouched.items()):
            at = self._buffers[path]
            here = at.tensor
            if here is not None and here.device != first.device:
                first = self._untouched[path] = first.to(here.device)  # the model was moved
            if here is None or here.dtype != first.dtype or not torch.equal(here, first):
                del self._untouched[path]
                if not at.counts:
                    del self._buffers[path]
        places = ((path, at.tensor) for path, at in self._buffers.items() if path not in self._untouched)
        return {path: here for path, here in places if here is not None}

    def _at(self, path: str) -> _Buffer:
        if path not in self._buffers:
            raise RecoveryError(f"there is no buffer {path} any more")
        return self._buffers[path]

    def _counted(self, states: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The states of which nobody says that they are the whole job's."""
        if states is None:
            states = {name: thing.state_dict() for name, thing in self._things.items()}
        return {name: state for name, state in states.items() if not getattr(self._things[name], "job_wide", False)}


def _buffers(models: Mapping[str, torch.nn.Module]) -> list[tuple[str, _Buffer]]:
    """Of all modules, each tensor once; without those that go with the parameters."""
    found, seen = [], set[int]()
    for name, model in models.items():
        seen |= {id(buffer) for buffer in following(model).values()}
        for path, module in model.named_modules():
            for key, buffer in module._buffers.items():
                counts = key not in module._non_persistent_buffers_set
                if counts if buffer is None else id(buffer) not in seen:  # one that is None may be made by a forward pass
                    seen.add(id(buffer))
                    full = f"{name}.{path}.{key}" if path else f"{name}.{key}"
                    found.append((full, _Buffer(module, key, counts)))
    return found
