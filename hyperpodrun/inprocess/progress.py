"""How far the wrapped function has come: what the agent's hang watch counts.

Counted: steps (hyperpodrun.recovery calls `note_step`), `caller.ping()` and sections (`note_call`), and, while a hang watch is on,
collectives: torch numbers them in each process group, so they are read there (`count_collectives`) and nothing of the user's is
patched. Progress is any of these, and entering the function: initialisation counts.

Invariant: `steps` and `calls` only grow within a generation; `begin` starts them at 0.
"""

import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyperpodrun.agent.wire import names


@dataclass(frozen=True, slots=True)
class Progress:
    """Counted since the function was entered. `still_s`: since the last of them; `step`: the last one noted, -1 for none.
    `groups`: what torch has counted in each group, by the group's key.
    """

    steps: int
    calls: int
    still_s: float
    step: int
    pinged_at_s: float | None
    groups: dict[int, int]


class Counters:
    """Written by the function's thread, read by the link's. All attributes are whole values, so no lock is held by a step."""

    def __init__(self) -> None:
        self.last_step = -1
        self.on_first_step: Callable[[], object] = _nothing
        """Called with the first step of a generation, by the function's thread."""
        self.begin()

    def begin(self) -> None:
        """The function is entered."""
        self.first_step = self.last_step + 1
        self._steps = self._calls = 0
        self._pinged_at_s: float | None = None
        self._seen: dict[int, tuple[int, int]] = {}
        """id of a group -> (its key, its number)."""
        self._moved_at_s = time.monotonic()

    def note_step(self, step: int) -> None:
        """A step has been finished."""
        self._steps += 1
        self.last_step = step
        self._moved_at_s = time.monotonic()
        if self._steps == 1:
            self.on_first_step()

    def note_restored(self, step: int) -> None:
        """The state is the one before `step`, which is run next."""
        self.first_step, self.last_step = step, step - 1
        self._moved_at_s = time.monotonic()

    def note_call(self, ping: bool = False) -> None:
        """Something has been done."""
        self._calls += 1
        self._moved_at_s = time.monotonic()
        if ping:
            self._pinged_at_s = self._moved_at_s

    def count_collectives(self) -> None:
        """Take over what torch has counted since the last look."""
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:
            return
        seen: dict[int, tuple[int, int]] = {}
        for group in list(c10d._world.pg_map):
            try:
                number = int(group._get_sequence_number_for_group())
            except (RuntimeError, AttributeError):
                continue  # a backend that does not count
            key, former = self._seen.get(id(group)) or (_key(c10d._world, group), 0)
            seen[id(group)] = key, number
            if number > former:
                self._moved_at_s = time.monotonic()
        self._seen = seen

    def now(self) -> Progress:
        """What is known at this moment."""
        return Progress(
            steps=self._steps,
            calls=self._calls,
            still_s=time.monotonic() - self._moved_at_s,
            step=self.last_step,
            pinged_at_s=self._pinged_at_s,
            groups=dict(self._seen.values()),
        )


def _key(world: Any, group: Any) -> int:
    """The same number in all members of a group: from its name and its ranks."""
    return zlib.crc32(repr((world.pg_names.get(group), sorted(world.pg_group_ranks.get(group, ())))).encode())


def _nothing() -> None:
    pass


counters = Counters()


def note_step(step: int) -> None:
    """Step `step` has been finished (its state is committed). Called by hyperpodrun.recovery, or by scripts without it."""
    counters.note_step(step)
    if names.INJECT in os.environ:
        from hyperpodrun.inprocess import inject

        inject.point("step", step)


def note_call() -> None:
    """Something was done that is not a step."""
    counters.note_call()
