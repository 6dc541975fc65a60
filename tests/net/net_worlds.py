"""What the workers wrote down: which worlds ran, when, on which hosts with which ranks, and how far they came.

A worker appends "time step" every 50 ms to a file named by its world (generation, and how often the whole job was started, so
that two histories are never taken for one), rank, world size and host. `validate` proves from these lines alone that there never
were two worlds.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FENCE_S = 16.0
"""What is left of a dropped member's world is gone after this (MESH A9)."""

TRAINING = """
import os, time
env = os.environ
rank = env["RANK"]
name = "--".join(("steps", env["NET_START"], env["HYPERPODRUN_GENERATION"], rank, env["WORLD_SIZE"], os.uname().nodename))
step = 0
for old in os.listdir(FOLDER):
    if old.startswith("steps--") and old.split("--")[3] == rank:
        lines = open(os.path.join(FOLDER, old)).read().split()
        step = max(step, int(lines[-1]) if lines else 0)
file = os.open(os.path.join(FOLDER, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
due = time.monotonic()
while not os.path.exists(os.path.join(FOLDER, "finish")):
    step += 1
    os.write(file, b"%.6f %d\\n" % (time.monotonic(), step))
    due = max(due + 0.05, time.monotonic())
    time.sleep(due - time.monotonic() + 0.001)
    if os.path.exists(os.path.join(FOLDER, "fail-" + rank)):
        os.unlink(os.path.join(FOLDER, "fail-" + rank))
        raise SystemExit(3)
"""

Key = tuple[int, int]


class Rank(NamedTuple):
    """One rank of one world; times in seconds of the monotonic clock."""

    host: str
    first_s: float
    last_s: float
    first_step: int
    last_step: int
    lines: list[tuple[float, int]]


class World(NamedTuple):
    """`key`: number of the start of the job, generation. `ranks` by number; complete when there are `size` of them."""

    key: Key
    size: int
    ranks: dict[int, Rank]

    @property
    def hosts(self) -> list[str]:
        return sorted({rank.host for rank in self.ranks.values()})

    @property
    def is_complete(self) -> bool:
        return len(self.ranks) == self.size

    @property
    def up_s(self) -> float:
        """When its last rank began."""
        return max(rank.first_s for rank in self.ranks.values())

    @property
    def first_s(self) -> float:
        return min(rank.first_s for rank in self.ranks.values())

    @property
    def broken_s(self) -> float:
        """Until then all its ranks ran."""
        return min(rank.last_s for rank in self.ranks.values())

    @property
    def last_s(self) -> float:
        return max(rank.last_s for rank in self.ranks.values())

    def rank_of(self, host: str) -> int:
        return min(number for number, rank in self.ranks.items() if rank.host == host)


class Worlds:
    """`folder` is where the workers write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._excused: dict[str, float] = {}

    def excuse(self, host: str, since_s: float) -> None:
        """This host stood still since then: nothing on it could be stopped in time, its test looks at what its workers still did."""
        self._excused[host] = since_s

    def read(self) -> list[World]:
        """All worlds in order of their first line."""
        ranks: dict[tuple[Key, int], dict[int, Rank]] = {}
        for name in os.listdir(self._folder):
            if not name.startswith("steps--"):
                continue
            _, start, generation, rank, size, host = name.split("--")
            words = (self._folder / name).read_text().rpartition("\n")[0].split()
            lines = list(zip(map(float, words[::2]), map(int, words[1::2]), strict=True))
            if lines:
                world = ranks.setdefault(((int(start), int(generation)), int(size)), {})
                assert int(rank) not in world, f"rank {rank} of generation {generation} ran on {host} and {world[int(rank)].host}"
                world[int(rank)] = Rank(host, lines[0][0], lines[-1][0], lines[0][1], lines[-1][1], lines)
        return sorted((World(key, size, members) for (key, size), members in ranks.items()), key=lambda world: world.first_s)

    def complete(self, on: list[str], after_s: float = 0.0) -> World | None:
        """The newest world if it runs on exactly these hosts, whole, and began after that moment."""
        worlds = self.read()
        if worlds and worlds[-1].is_complete and worlds[-1].hosts == sorted(on) and worlds[-1].first_s > after_s:
            return worlds[-1]
        return None

    def steps_since(self, key: Key, since_s: float) -> int:
        """The least number of steps that a rank of this world made since then."""
        world = next(world for world in self.read() if world.key == key)
        return min(sum(at > since_s for at, _ in rank.lines) for rank in world.ranks.values())

    def generations(self) -> list[int]:
        return [world.key[1] for world in self.read()]

    def validate(self) -> None:
        """Raise AssertionError for two whole worlds at once, a remnant that outlives the fence, a host in two worlds, survivors that
        changed places, or work that began anew.
        """
        worlds = self.read()
        for i, old in enumerate(worlds):
            for new in worlds[i + 1 :]:
                both = f"{old.key} and {new.key}\n{self.story(old.first_s)}"
                if old.is_complete and new.is_complete:
                    whole_s = min(old.broken_s, new.broken_s) - max(old.up_s, new.up_s)
                    assert whole_s <= 0, f"two whole worlds at once for {whole_s:.3f} s: {both}"
                last_s = max(min(r.last_s, self._excused.get(r.host, r.last_s)) for r in old.ranks.values())
                overlap_s = min(last_s, new.last_s) - new.first_s
                assert overlap_s <= FENCE_S, f"a remnant outlives the fence ({overlap_s:.1f} s): {both}"
                for mine in old.ranks.values():
                    for his in new.ranks.values():
                        assert mine.host != his.host or mine.last_s <= his.first_s, (
                            f"{mine.host} was in two worlds at once: {both}"
                        )
        for old, new in pairwise(worlds):
            if old.is_complete and new.is_complete and new.key == (old.key[0], old.key[1] + 1):
                stay = [host for host in old.hosts if host in new.hosts]
                before, after = sorted(stay, key=old.rank_of), sorted(stay, key=new.rank_of)
                assert before == after, f"survivors changed places: {before} -> {after}\n{self.story(old.first_s)}"
                for host in stay:
                    if new.size >= old.size:
                        assert old.rank_of(host) == new.rank_of(host), f"{host} changed its rank\n{self.story(old.first_s)}"
                for number, rank in new.ranks.items():
                    if number in old.ranks:
                        assert rank.first_step > old.ranks[number].first_step, (
                            f"rank {number} began anew\n{self.story(old.first_s)}"
                        )

    def story(self, zero_s: float) -> str:
        """A table: world, rank, host, from when to when, steps."""
        return "\n".join(
            f"start {world.key[0]} generation {world.key[1]} size {world.size} rank {number} on {rank.host}: "
            f"{rank.first_s - zero_s:.3f} .. {rank.last_s - zero_s:.3f} s, steps {rank.first_step} .. {rank.last_step}"
            for world in self.read()
            for number, rank in sorted(world.ranks.items())
        )
