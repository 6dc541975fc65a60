"""What a process remembers of its training state while its function is left and entered again.

Theory. A restart inside a process builds new objects, but the old ones are still there, and they hold the newest state that there is.
So the objects of the last RecoverableState of a name stay alive here until the next one has taken over from them. What changes
between two commits, or is too small to matter, is kept as bytes at each commit: `common` (schedulers, scalers: the same on all
ranks) and `private` (samplers, random states, buffers: this rank's own, and those of the ranks whose buddy this one is). Two commits
of each are kept, since ranks can be one step apart when a fault comes, and those that belong to the newest two versions.

States of the live parts: *unborn* (nothing was committed), *whole* at `step`, *torn* (inside an update).
Invariants: `step` only grows while the marks are of one run of the function; a torn state is never offered, nor one that was written
to since.
"""

import struct
from collections.abc import Callable, Container, Sequence
from typing import Any

from hyperpodrun.inprocess import parting
from hyperpodrun.recovery.parts import Part
from hyperpodrun.recovery.plan import History
from hyperpodrun.recovery.shard import NO_KIN
from hyperpodrun.recovery.shm import HeapSlots
from hyperpodrun.recovery.watching import NEVER, Watch, alike

KEPT = 2
_TAIL = struct.Struct("<Q")


def joined(value: bytes, constant: bytes = b"") -> bytes:
    """A value and what of it does not change from step to step, as one."""
    return value + constant + _TAIL.pack(len(constant))


def split(text: bytes) -> tuple[bytes, bytes]:
    """What was joined. Raises ValueError."""
    if len(text) < _TAIL.size or (size := _TAIL.unpack_from(text, len(text) - _TAIL.size)[0]) > len(text) - _TAIL.size:
        raise ValueError("a small state that is shorter than it says")
    end = len(text) - _TAIL.size
    return text[: end - size], text[end - size : end]


class Kept:
    """The newest KEPT values by step, and those of the newest KEPT versions. A constant that values share is there once."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[bytes, bytes]] = {}
        self._pinned: list[int] = []

    def put(self, step: int, value: bytes, constant: bytes = b"") -> None:
        """Remember a value; the oldest goes."""
        self._values[step] = value, constant
        self._tidy()

    def pin(self, step: int, keep: int | None) -> None:
        """Of this step a version is written: the value is needed as long as that one may be. That of the step `keep` stays as well."""
        pinned = [at for at in self._pinned if at == keep] or self._pinned[1 - KEPT :]
        self._pinned = [*pinned, step]
        self._tidy()

    def get(self, step: int) -> bytes | None:
        """The value after that step and its constant, joined, if it is still here."""
        return joined(*self._values[step]) if step in self._values else None

    def steps(self) -> list[int]:
        """The steps whose values are here."""
        return sorted(self._values)

    def cut(self, step: int) -> None:
        """Forget what came after that step: it will be lived again."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self._pinned = [at for at in self._pinned if at <= step]

    def _tidy(self) -> None:
        keep = {*sorted(self._values)[-KEPT:], *self._pinned}
        self._values = {at: value for at, value in self._values.items() if at in keep}


class Memory:
    """Of one RecoverableState. `key` is the shard that the live parts are, `kin` see shard.py; `history` see plan.py; `watch`, `stamp`
    see watching.py. `stop` ends the writing of versions, `part` writes what is newer than they are. `before`: what it was made of,
    while others may still need that (the shards of another world).
    """

    def __init__(self, key: str, parts: Sequence[Part]) -> None:
        self.key = key
        self.parts = parts
        self.step = -1
        self.torn = False
        self.watch = Watch(parts)
        self.stamp = NEVER
        self.history: History = ()
        self.kin = NO_KIN
        self.before: Memory | None = None
        self.common = Kept()
        self.private: dict[str, Kept] = {}
        self.heap: dict[str, HeapSlots] = {}
        self.stop: Callable[[], None] = _nothing
        self.part: Callable[[], None] = _nothing

    @property
    def whole(self) -> bool:
        """Can the live parts be given to others?"""
        return self.step >= 0 and not self.torn

    @property
    def untouched(self) -> bool:
        """Are the live parts what the last update left?"""
        return alike(self.watch.stamp(), self.stamp)

    def committed(self, step: int) -> None:
        """They are the state after that step."""
        self.step, self.stamp = step, self.watch.stamp()
        self.torn = False

    def state(self, name: str) -> Kept:
        """The private states of that name."""
        return self.private.setdefault(name, Kept())

    def pin(self, step: int, keep: int | None) -> None:
        """A version of this step is made; the newest one that is whole is that of `keep`."""
        for kept in (self.common, *self.private.values()):
            kept.pin(step, keep)

    def take_over(self, earlier: "Memory", step: int) -> None:
        """The restart went to `step`: what is known up to there is known still."""
        self.common, self.private, self.heap = earlier.common, earlier.private, earlier.heap
        for kept in (self.common, *self.private.values()):
            kept.cut(step)
        for slots in self.heap.values():
            slots.forget_after(step)

    def only(self, names: Container[str]) -> None:
        """Private states of other names are not needed any more (they are another world's)."""
        self.private = {name: kept for name, kept in self.private.items() if name in names}


def _nothing() -> None:
    pass


_remembered: dict[str, Memory] = {}


def of(name: str) -> Memory | None:
    """What this process remembers under that name."""
    return _remembered.get(name)


def remember(name: str, memory: Memory) -> None:
    """From now on this is what the process remembers; the one before may go."""
    earlier, _remembered[name] = _remembered.get(name), memory
    parting.at_parting(f"the state {name!r}", memory.part)
    if earlier is not None and earlier is not memory.before:
        loosen(earlier)


def forget(name: str) -> Any:
    """Let it go."""
    memory = _remembered.pop(name, None)
    if memory is not None:
        loosen(memory)
    return memory


def loosen(memory: Memory) -> None:
    """Nobody needs its live parts any more, and nobody is offered them.

    Those who write versions hold it and each other: its tensors would stay until the garbage collector comes by.
    """
    memory.stop = memory.part = _nothing
    memory.step, memory.parts, memory.watch, memory.stamp = -1, (), Watch(()), NEVER
