"""Does the state of a sampler count the samples of the whole job? Measured where nobody says so.

Theory. In a world of another size a rank goes on with the private state of a rank of the old one. That is right only for a sampler
whose state is the whole job's, and equal states do not show it: one that counts its own draws is equal on all ranks too, and would
lose or repeat samples. An object says so by an attribute, `job_wide = True`. Else the numbers in its state are looked at: in one step
of W ranks those of the job move by W times what each rank draws, so with V ranks by V/W times as much. How they moved in the last
step, and in a world of which size, is carried with the state; in the first step of another world it is compared, before anything is
changed. A step in which an epoch ends (a number falls) says nothing, then the next one is taken.

What cannot be measured (nothing moves, or something else than a few numbers does) has to be declared.

States: *sure* (measured in a world of this size), *asking* (until a step has shown it).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hyperpodrun.recovery.plan import Contradiction

TRIES = 3
MANY = 64
"""More values than this are no counters."""
_REST = "(what is not a number)"


class Moves(NamedTuple):
    """How numbers moved in a step, by path, with so many ranks."""

    by: dict[str, int]
    world: int


class Counting:
    """Of the states that are not declared. `moves`: in the last step that says something."""

    def __init__(self) -> None:
        self.moves = Moves({}, 0)
        self._world = 0
        self._before: dict[str, Any] = {}
        self._left = TRIES

    def begin(self, states: Mapping[str, Any], world: int) -> None:
        """As they are before the first step of this world."""
        self._before, self._world, self._left = _flat(states), world, TRIES

    def take_over(self, moves: Moves, world: int, names: Sequence[str]) -> None:
        """The states are those of ranks that moved like that, and go on with `world` ranks. Raises plan.Contradiction."""
        self.moves = moves
        if moves.world != world and names and (not any(moves.by.values()) or moves.by.get(_REST)):
            raise _refusal(names, moves.world, world, "and it cannot be seen from them whether they are the whole job's")

    def step(self, states: Mapping[str, Any]) -> None:
        """As they are after a step's draws. Raises plan.Contradiction."""
        before, now = self._before, _flat(states)
        self._before = now
        moves = {path: _move(before.get(path), now.get(path)) for path in {**before, **now}}
        if any(move < 0 for move in moves.values()):
            self._left -= 1
            if self._left:
                return
        then, old = self.moves
        if states and old not in (0, self._world):
            alike = all(moves.get(path, 0) * old == then.get(path, 0) * self._world for path in {**then, **moves})
            if not alike:
                raise _refusal([*states], old, self._world, "and they do not move as those of the whole job would")
        self.moves = Moves(moves, self._world)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Numbers by path, all else in one."""
    if isinstance(value, Mapping | list | tuple) and len(value) <= MANY:
        found: dict[str, Any] = {_REST: []}
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            inner = _flat(item, f"{path}.{key}")
            found[_REST] += inner.pop(_REST)
            found |= inner
        return found
    if isinstance(value, int) and not isinstance(value, bool):
        return {path: value, _REST: []}
    comparable = value is None or isinstance(value, bool | float | str | bytes)
    return {_REST: [value if comparable else object()]}  # an object of its own: it has changed, for all that is known


def _move(before: Any, now: Any) -> int:
    if isinstance(before, int) and isinstance(now, int):
        return now - before
    return int(before != now)


def _refusal(names: Sequence[str], old: int, new: int, why: str) -> Contradiction:
    return Contradiction(
        f"the world has {new} ranks instead of {old}; the states of {', '.join(names)} are private to the ranks, {why}: samples would "
        "be lost or repeated. Use hyperpodrun.recovery.JobSampler, or set `job_wide = True` on an object whose state counts the "
        "samples of the whole job and is equal on all ranks"
    )
