"""When and how this rank writes its part of the node's versions to shared memory.

Theory. A version costs a copy of the state. So it is written every k steps, k being the least with which training slows by less
than BUDGET: the time of a write over the time of k steps. Times differ between ranks and the step of a version must not, so each
rank proposes its k in the exchange that comes before a step, and all take the largest. A write that takes longer than INLINE of a
step is left to a thread, which has until the next update: parameters do not change before.

One rank writes what the ranks of a node hold in common: the lowest one with that shard. Each writes its own private state.

States: *off* (no room, or nothing to write), *waiting* for the next version's step, *writing*.
Invariants: the parts do not change while a version is written; a version's step is the same on all ranks.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery import plan, shm
from hyperpodrun.recovery.shard import Shard

BUDGET = 0.02
INLINE = 0.01
MAX_EVERY = 10_000


class NodeState:
    """`names`: what this rank writes. `folder` lies in shared memory; `say` tells the user something once."""

    def __init__(self, folder: str, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._slots: dict[str, shm.Slots] = {}
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None
        self._cost_s = 0.0
        self._step_s = 0.0
        self._last_at_s: float | None = None
        self._due = -1
        self.off = False

    def held(self, names: Sequence[str]) -> dict[tuple[str, int, plan.Kind], Callable[[], Shard]]:
        """The versions of these shards that are whole here."""
        found: dict[tuple[str, int, plan.Kind], Callable[[], Shard]] = {}
        if not os.path.isdir(self._folder):
            return found
        for name in names:
            for step, version in shm.Slots(self._folder, name).versions().items():
                found[name, step, "shm"] = partial(_same, version)
        return found

    def begin(self, step: int, names: Sequence[str]) -> None:
        """The state after `step` is in place (-1: a new one): what is newer will be lived again."""
        try:
            _hold(self._folder)
        except OSError as error:
            self._failure = error
            self._failed()
            return
        self._slots = {name: shm.Slots(self._folder, name) for name in names}
        for slots in self._slots.values():
            slots.forget_after(step)
        self._due = step + 1
        self._last_at_s = None

    def wants(self, step: int) -> bool:
        """Is a version due after this step?"""
        return not self.off and step >= self._due

    def proposal(self) -> int:
        """After how many steps this rank would write the next version."""
        if self.off or not self._step_s:
            return 1
        return min(MAX_EVERY, max(1, -(-int(self._cost_s * 1e6) // max(1, int(self._step_s * BUDGET * 1e6)))))

    def settle(self) -> None:
        """Before anything changes: the version under way is finished."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def stepped(self, step: int, every: int, made: Callable[[], dict[str, Shard]]) -> None:
        """A step was committed; write the version if it is due. `made` gives the shards by name."""
        now_s = time.monotonic()
        if self._last_at_s is not None:
            took_s = now_s - self._last_at_s
            self._step_s = took_s if not self._step_s else 0.8 * self._step_s + 0.2 * took_s
        self._last_at_s = now_s
        if not self.wants(step) or self._failed():
            return
        self._due = step + every
        shards = made()
        if self._cost_s <= INLINE * self._step_s or not self._step_s:
            self._write(step, shards)
            self._failed()
        else:
            self._thread = threading.Thread(target=self._write, args=(step, shards), name="hyperpodrun-version", daemon=True)
            self._thread.start()

    def _write(self, step: int, shards: dict[str, Shard]) -> None:
        began_s = time.monotonic()
        try:
            for name, made in shards.items():
                self._slots[name].write(step, made)
        except OSError as error:
            self._failure = error
        took_s = time.monotonic() - began_s
        self._cost_s = took_s if not self._cost_s else 0.7 * self._cost_s + 0.3 * took_s

    def _failed(self) -> bool:
        if self._failure is not None and not self.off:
            self.off = True
            self._say(f"the node's shared memory holds no versions from now on: {self._failure.strerror or self._failure}")
        return self.off


_held: dict[str, int] = {}


def _hold(folder: str) -> None:
    """Mark the folder as used by this process, until it ends."""
    if folder not in _held or not os.path.exists(os.path.join(folder, "lock")):
        _held[folder] = node_state.hold(folder)


def _same(version: Shard) -> Shard:
    return version
