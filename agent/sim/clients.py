"""Worker processes that use the store at random, and the record of what they were told.

Theory: a client asks one thing after another, as a rank does: of counters, of texts, of queues, of keys that somebody else may
make. It waits for some answers without end, and gives others up. What it was told is recorded by generation and key, with places
in the order of the run, which is the order of true time.

States of a client: thinking, asking, over (its worker is gone, or the generation has ended for it).
Invariants: after a generation has ended here nothing asked in it has another answer than that it ended (S5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from hyperpodrun.agent.mesh.config import MS
from hyperpodrun.agent.mesh.keyspace import KeySpace, Pending
from hyperpodrun.agent.sim.hosts import Generation
from hyperpodrun.agent.sim.invariants import Violation
from hyperpodrun.agent.sim.linear import INFINITY, Call, without_order
from hyperpodrun.agent.sim.witness import first_misfit, happened
from hyperpodrun.agent.wire import store as op


class Undecided(Violation):
    """It was not found out whether a history has an order: neither good nor bad."""


class History:
    """Everything that was asked, by world and key."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Generation, bytes], list[Call]] = defaultdict(list)
        self._open: dict[int, tuple[Generation, op.KeyOperation]] = {}
        self._took: dict[int, int] = {}
        """By the identity of the operation, which the simulated network passes on as it is."""
        self._place = 0
        self.searched = 0
        """Keys whose order had to be looked for: the owners' was none."""

    def asked(self, world: Generation, asked: op.KeyOperation) -> int:
        """A call begins: its place."""
        self._place += 1
        self._open[self._place] = world, asked
        return self._place

    def did(self, asked: op.Operation) -> None:
        """An owner did this operation now."""
        self._place += 1
        self._took.setdefault(id(asked), self._place)

    def answered(self, start: int, answer: Any) -> None:
        """Its answer came."""
        self._place += 1
        self._over(start, self._place, answer)

    def unanswered(self, start: int) -> None:
        """Nobody will ever know."""
        self._over(start, INFINITY)

    def _over(self, start: int, end: int, answer: Any = None) -> None:
        world, asked = self._open.pop(start)
        self._calls[world, asked.key].append(Call(start, end, asked, answer))

    def judge(self) -> None:
        """Raises Violation when some key's history has no order, else Undecided when of some that is not known."""
        for start in list(self._open):
            self.unanswered(start)
        unknown = None
        for (world, key), calls in self._calls.items():
            seen = happened([call._replace(took=self._took.get(id(call.asked))) for call in calls])
            misfit = first_misfit(seen)
            if misfit is None:
                continue
            self.searched += 1
            name = f"S3 {key!r} in generation {world[1]}"
            bad = without_order(seen, misfit.end)
            if bad:
                raise Violation(f"{name} has no order:\n{_shown(bad)}")
            if bad is None:
                unknown = f"{name}: {len(seen)} calls; in the owners' order {misfit.asked} -> {misfit.answer!r} is wrong"
        if unknown is not None:
            raise Undecided(unknown)

    def count(self) -> int:
        """Calls that are recorded."""
        return sum(map(len, self._calls.values()))


def _shown(calls: list[Call]) -> str:
    return "\n".join(f"  {c.start}..{'' if c.end == INFINITY else c.end} {c.asked} -> {c.answer!r}" for c in calls[-20:])


class Habits(NamedTuple):
    """Clients think for up to `pause_ns` between answer and question; there are `keys` keys of each kind."""

    pause_ns: int
    keys: int


def random_operation(rng: Random, keys: int, mark: bytes) -> op.KeyOperation:
    """One of a rank's, about one of a few keys. `mark` is a value that nobody else writes."""
    which = rng.randrange(4)
    if which == 0:
        key = b"count%d" % rng.randrange(keys)
        return rng.choice((op.Add(key, 1), op.Add(key, 5), op.Add(key, 0), op.Get(key), op.Delete(key), op.Check(key)))
    if which == 1:
        key = b"queue%d" % rng.randrange(keys)
        return rng.choice(
            (op.Push(key, mark), op.Push(key, mark), op.Pop(key), op.Pop(key), op.Pop(key, True), op.Length(key), op.Watch(key))
        )
    key = b"text%d" % rng.randrange(keys)
    return rng.choice((
        op.Set(key, mark), op.Set(key, b""), op.Get(key), op.Get(key, True), op.Append(key, mark[-2:]), op.Delete(key),
        op.CompareSet(key, b"", mark), op.CompareSet(key, b"", b""), op.Check(key), op.Watch(key),
    ))  # fmt: skip


class Rank:
    """One client. `alive`: whether its process can act now (False: it is gone, None: it stands still)."""

    def __init__(
        self,
        number: int,
        space: KeySpace,
        world: Generation,
        history: History,
        rng: Random,
        habits: Habits,
        later: Callable[[int, Callable[[], None]], None],
        alive: Callable[[], bool | None],
    ) -> None:
        self._space = space
        self._client = space.client(number)
        self._name = b"%s-%d-%d" % (space.client(number)[0].encode(), world[1], number)
        self._world = world
        self._history = history
        self._rng = rng
        self._habits = habits
        self._later = later
        self._alive = alive
        self._asked = 0
        self.waits_for: tuple[int, op.KeyOperation, Pending] | None = None
        later(rng.randrange(20 * MS), self.act)

    def act(self) -> None:
        """Ask the next thing, or give up waiting."""
        alive = self._alive()
        if alive is None:
            self._later(50 * MS, self.act)
        if not alive:
            return
        if self.waits_for is not None:
            start, _, pending = self.waits_for
            self.waits_for = None
            self._history.unanswered(start)
            pending.cancel()
        self._ask()

    def _ask(self) -> None:
        self._asked += 1
        asked = random_operation(self._rng, self._habits.keys, b"%s-%d" % (self._name, self._asked))
        start = self._history.asked(self._world, asked)
        ended = self._space.ended
        answer = self._space.call(self._client, asked, lambda answer: self._came(start, answer))
        if type(answer) is not Pending:
            if ended and type(answer) is not op.Trouble:
                raise Violation(f"S5 {asked} was served in generation {self._world[1]}, which had ended: {answer!r}")
            self._came(start, answer)
            return
        if ended:
            raise Violation(f"S5 {asked} waits in generation {self._world[1]}, which has ended")
        self.waits_for = start, asked, answer
        if self._rng.random() < 0.3:
            serial = self._asked
            self._later(self._rng.randrange(50, 1500) * MS, lambda: self._tire(serial))

    def _tire(self, serial: int) -> None:
        if self._asked == serial and self.waits_for is not None:
            self.act()

    def _came(self, start: int, answer: Any) -> None:
        self.waits_for = None
        if type(answer) is op.Trouble:
            if not self._space.ended:
                raise Violation(f"S6 {answer.text}")
            self._history.unanswered(start)
            if self._rng.random() < 0.5:
                return
        else:
            self._history.answered(start, answer)
        self._later(self._rng.randrange(self._habits.pause_ns), self.act)
