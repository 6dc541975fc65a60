"""How this rank writes its part of the node's versions.

Theory. One rank writes what the ranks of a node hold in common: the lowest one with that shard. Each writes its own private state.
A write that takes longer than INLINE of a step is left to a thread, which has until the next update: parameters do not change before.
Versions lie in the node's shared memory. Where that has no room, a shard that others keep copies of is written to this process's own
memory, from which they fetch it; other shards are not written at all then. Where room is wanting in the midst of it all, that version
is not held, which is said, and the next one is tried again.

States: *off* (no room from the beginning, or nothing to write), *idle*, *writing*.
Invariants: the parts do not change while a version is written, or it does not count; the version `keep` is not written over.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress

from hyperpodrun import ending
from hyperpodrun.agent.wire import names, node_state
from hyperpodrun.recovery import parting, shm
from hyperpodrun.recovery.plan import History, counts, last
from hyperpodrun.recovery.shard import Shard

BESIDE = 0.2
"""How much of a step's time a copy takes that is made beside it, by and large: it has a core of its own, or shares one."""
INLINE = 0.01


class NodeState:
    """`folder` lies in shared memory; `heap` keeps what has no room there; `say` tells the user something once; `intact` knows whether
    the live parts are as the last update left them."""

    def __init__(
        self, folder: str, heap: dict[str, shm.HeapSlots], say: Callable[[str], None], intact: Callable[[], bool] = shm.always
    ) -> None:
        self._folder = folder
        self._heap = heap
        self._say = say
        self._intact = intact
        self._slots: dict[str, shm.Slots] = {}
        self._history: History = ()
        self._thread: threading.Thread | None = None
        self._sent: set[str] = set()
        self._refused: set[str] = set()
        self._done = threading.Condition()
        self._written = -1
        self.took_s = 0.0
        self._waited_s = 0.0
        self._inline = True
        self.off = False
        self.usable = False
        self.held = True
        """Has all been written of the last version that is to be written here?"""

    def begin(self, step: int, history: History, written: Collection[str], sent: Collection[str], room: bool) -> bool:
        """The state after `step` is in place (-1: a new one), `history` ends with the restart that did it. This rank writes `written`;
        others fetch those `sent`. `room`: is there enough of it? Returns whether there is in fact.

        What is newer than `step` will be lived again and goes, and so does what is of another timeline.
        """
        self._history = history
        self._sent = set(sent)
        self.usable = False
        try:
            hold(self._folder)
            self.usable = True
            for name in {*written, *(version.name for version in shm.scan(self._folder))}:
                for files in (shm.VERSIONS, shm.PARTING):
                    shm.Slots(self._folder, name, files).forget_after(step)
            for found in shm.scan(self._folder):
                if not counts(history, len(found.history), last(found.history), found.step):
                    found.discard()
        except OSError as error:
            self._say(f"the node's shared memory cannot be used: {error.strerror or error}")
            room = False
        self._slots = {name: shm.Slots(self._folder, name) for name in written} if room else {}
        self._slots |= {name: self._on_heap(name) for name in sent if not room}
        self.off = not self._slots
        return room

    def settle(self) -> None:
        """Before anything changes: the version under way is finished."""
        if self._thread is not None:
            began_s = time.monotonic()
            self._thread.join()
            self._thread = None  # only now: an order to leave may break into the wait, and whoever comes next has to wait, too
            self._waited_s = time.monotonic() - began_s

    def close(self) -> None:
        """No more of them. Mapped memory goes at once, and not when the garbage collector comes by."""
        self.settle()
        for slots in self._slots.values():
            if not isinstance(slots, shm.HeapSlots):  # those are all that there is of their versions
                slots.close()

    @property
    def cost_s(self) -> float:
        """What the last version cost the training: all of its time where it was written at once.

        Else the wait for its end, and a part of the time in which it shared the processor with a step.
        """
        return self.took_s if self._inline else self._waited_s + BESIDE * self.took_s

    def write(self, step: int, shards: dict[str, Shard], step_s: float, keep: int | None = None) -> None:
        """Write the version of this step, not over that of `keep`; what has no place is left out."""
        if self.off:
            return
        self.held = False
        self._inline = self.took_s <= INLINE * step_s or not step_s
        self._waited_s = 0.0
        if self._inline:
            self._write(step, shards, keep)
        else:
            self._thread = ending.thread(self._write, step, shards, keep, name="version", stop=ending.by_itself, limit_s=math.inf)

    def only(self, names: Collection[str]) -> None:
        """Versions of other shards are not needed any more (they are another world's)."""
        for found in self._found():
            if found.name not in names:
                found.discard()
        for name in [name for name in self._heap if name not in names]:
            del self._heap[name]

    def make_room(self, names: Collection[str], keep: int) -> None:
        """Of what the versions to come do not take the place of, `names` being theirs, only that of the step `keep` stays."""
        for found in self._found():
            in_place = found.name in names and found.path.endswith(shm.VERSIONS)
            if not in_place and found.step != keep:
                found.discard()

    def _found(self) -> list[shm.Version]:
        return shm.scan(self._folder) if self.usable else []

    def version(self, name: str, step: int, since: int, timeout_s: float) -> Shard | None:
        """That version of this timeline, once it is written."""
        with self._done:
            self._done.wait_for(lambda: self._written >= step or self.off, timeout_s)
        slots = self._slots.get(name)
        found = [] if slots is None else slots.found()
        return next((one.shard for one in found if (one.step, last(one.history)) == (step, since)), None)

    def _write(self, step: int, shards: dict[str, Shard], keep: int | None) -> None:
        began_s = time.monotonic()
        with suppress(OSError):
            os.utime(node_state.top_of(self._folder))  # so young is what is in it (mapped memory's own times stand still)
        wrote = [self._write_one(name, step, made, keep) for name, made in shards.items() if name in self._slots]
        self.took_s = time.monotonic() - began_s
        with self._done:
            self.held = all(wrote)
            self._written = step
            self._done.notify_all()

    def _write_one(self, name: str, step: int, made: Shard, keep: int | None) -> bool:
        slots = self._slots[name]
        try:
            # a process beside this one, a step behind, may have been told to part already
            with nullcontext() if isinstance(slots, shm.HeapSlots) else parting.alone(self._folder, name):
                intact = shm.always if self._inline else self._intact
                if not slots.write(step, made, self._history, keep, intact):
                    return False  # other weights were in their place while it was copied
        except OSError as error:
            if name not in self._refused:
                self._say(f"there is no version of {name!r} after step {step} in the node's memory: {error.strerror or error}")
            self._refused.add(name)
            if name not in self._sent or isinstance(slots, shm.HeapSlots):
                return False
            self._slots[name] = self._on_heap(name)
            return self._write_one(name, step, made, keep)
        self._refused.discard(name)
        return True

    def _on_heap(self, name: str) -> shm.Slots:
        return self._heap.setdefault(name, shm.HeapSlots(name))


_held: dict[str, int] = {}


def hold(folder: str) -> None:
    """Mark the folder as used by this process, until it ends. Raises OSError: it cannot be used."""
    if folder not in _held or not os.path.exists(node_state.lock_of(folder)):
        _held[folder] = node_state.hold(folder, os.environ.get(names.STATE_OWNER, ""))
