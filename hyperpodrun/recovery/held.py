"""What this rank can give after a restart: what its process remembers, and the versions that its node has.

Theory. Live parts and small states in memory are as they are. A version was written by somebody who may be gone: its row is read
through, once, before the first byte of it is used, and a damaged one is removed so that nobody finds it again.

Invariants: `whole` gives nothing that differs from what was written.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

import torch

from hyperpodrun.recovery import keys, plan, shard
from hyperpodrun.recovery.codec import Leaf
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.private import PORTABLE_BYTES
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.shm import Version


class Given:
    """One thing held: the shard, made when it is asked for, and the restarts that came before it."""

    def __init__(self, make: Callable[[], Shard], history: plan.History, version: Version | None = None) -> None:
        self._make = make
        self._made: Shard | None = None
        self._version = version
        self.history = history

    @property
    def live(self) -> bool:
        """Is it memory of this process?"""
        return self._version is None

    @property
    def since(self) -> int:
        """The last of these restarts."""
        return plan.last(self.history)

    @property
    def digest(self) -> str:
        """Of a version as it was written."""
        return "" if self._version is None else self._version.digest.hex()

    def shard(self) -> Shard:
        """What it is, not looked at closely."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def whole(self) -> Shard | None:
        """What it is, if it is still what was written."""
        if self._version is not None and not self._version.check():
            self._version.discard()
            return None
        return self.shard()


class Held:
    """All of it, by shard, step, kind and the last restart before it was made."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int, str, int], Given] = {}

    def remembered(self, earlier: Memory | None) -> None:
        """Add the live parts of this process, when they are whole, and the small states it keeps."""
        if earlier is None:
            return
        history = earlier.history
        if earlier.before is not None:
            self.remembered(earlier.before)
        if earlier.whole:
            self._add(earlier.key, earlier.step, "live", Given(lambda: shard.of(earlier.parts, earlier.kin), history))
        states = {f"common {earlier.key}": earlier.common, **earlier.private}
        for name, kept in sorted(states.items()):
            for step in kept.steps():
                self._add(name, step, "live", Given(partial(blob, name, kept.get(step) or b""), history))

    def found(self, versions: Iterable[Version], needs: Container[str], kind: plan.Kind | None = None) -> None:
        """Add versions. What this rank needs is its own node's ("shm"); other shards are copies that are kept for others."""
        for version in versions:
            own = version.name in needs or version.name.startswith(("rank ", "common "))
            given = Given(partial(_row, version), version.history, version)
            self._add(version.name, version.step, kind or ("shm" if own else "copy"), given)

    def _add(self, name: str, step: int, kind: str, given: Given) -> None:
        self._given[name, step, kind, given.since] = given

    def drop(self, name: str, step: int, kind: str, since: int) -> None:
        """It is not what it was any more."""
        self._given.pop((name, step, kind, since), None)

    def whole(self, name: str, step: int, kind: str, since: int) -> Shard | None:
        """That shard, if it is held and undamaged."""
        given = self._given.get((name, step, kind, since))
        return None if given is None else given.whole()

    def holdings(self) -> Sequence[plan.Holding]:
        """For this rank's offer."""
        made = [_holding(name, step, kind, given) for (name, step, kind, _), given in self._given.items()]
        return [holding for holding in made if holding is not None]


def _holding(name: str, step: int, kind: str, given: Given) -> plan.Holding | None:
    layout = content = ""
    made: Shard | None = given.shard()
    family: tuple[str, int] = "", 0
    if name.startswith("rank "):
        made = given.whole()  # small, and what it says counts already for the plan
        content = "" if made is None else b"".join(bytes(shard.view(piece)) for piece in made.range(0, PORTABLE_BYTES)).hex()
    elif not name.startswith("common ") and made is not None:
        layout = made.layout.digest()
        family = made.layout.family, made.layout.members
        content = keys.sample(made) if given.live else ""  # of a version that may be damaged it would say nothing
    if made is None:
        return None
    where = kind, made.nbytes, layout, content, len(given.history), *family, given.since, given.digest
    return plan.Holding(name, step, *where)  # type: ignore[arg-type]  # a Kind


def _row(version: Version) -> Shard:
    return version.shard


def blob(name: str, text: bytes) -> Shard:
    """Bytes as a shard."""
    layout = shard.Layout((shard.PartLayout(name, (Leaf("bytes", "uint8", (len(text),)),), b""),))
    return Shard(layout, [torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)])
