"""A cluster in one process: virtual processes on virtual nodes that run RecoverableState as it is, and die where chance says.

Theory. Each virtual process runs in a thread, and one thread at a time: it goes on until a *point*, where it hands back. Who is next
is drawn from the seed, so a run is the same each time. Points lie in the training loop and wherever a process speaks to others. At a
point a process may be killed, with its node's memory or without, or an exception be raised in it; then the generation is broken, and
the others are interrupted at one of their next points, but not inside an update. The new world is made of processes that live and of
new ones.

Fakes are at the outermost edge: the store, the collective, the server and the peer of a transfer, threads, and what tells a process
who it is. Shared memory is files, as it is. Random generators are exchanged when the thread changes.
"""

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery import (
    copies,
    exchange,
    fetching,
    memory,
    nodestate,
    pace,
    restoring,
    rng,
    shm,
    state,
    tiered,
    versions,
    where,
)
from hyperpodrun.recovery.shard import Layout, Shard
from hyperpodrun.recovery.transfer import TransferError

MAX_IDLE = 200_000


class Killed(BaseException):
    """This process is no more."""


class Interrupted(BaseException):
    """The generation is over; the function is entered again."""


class Planted(RuntimeError):
    """An exception in the training loop."""


@dataclass(eq=False)
class Process:
    """`deferring`: inside an update."""

    number: int
    node: str
    alive: bool = True
    deferring: int = 0
    generators: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"process {self.number}"


class Task:
    """Something that runs in a thread of its own, of a process. `background`: is not interrupted."""

    def __init__(self, cluster: "Cluster", process: Process, run: Callable[[], Any], background: bool = False) -> None:
        self.cluster, self.process, self.run, self.background = cluster, process, run, background
        self.until: Callable[[], bool] | None = None
        self.over = self.dying = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.turn = threading.Semaphore(0)

    def body(self) -> None:
        self.turn.acquire()
        try:
            self.result = self.run()
        except (Killed, Interrupted, Planted) as ended:
            self.result = ended
        except BaseException as error:  # noqa: BLE001  # raised by the cluster's thread
            self.error = error
        self.over = True

    def is_alive(self) -> bool:
        """As of a thread."""
        return not self.over

    def join(self, _timeout: float | None = None) -> None:
        """As of a thread."""
        self.cluster.wait(lambda: self.over)


class Cluster:
    """`faults` happen at points drawn from `chance`, one for about `rarity` points. `kinds`: "raise", "kill", "node".

    `filling`: by this chance a node's shared memory has no room for a while.
    """

    def __init__(
        self, chance: random.Random, folder: Path, faults: int = 0, rarity: int = 100, kinds: Sequence[str] = ("kill",)
    ) -> None:
        self.chance, self.folder, self.faults, self.rarity, self.kinds = chance, folder, faults, rarity, kinds
        self.filling: random.Random | None = None
        self.full: set[str] = set()
        self.back = threading.Semaphore(0)
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self.generation = 0
        self.broken = self.lost_node = False
        self.world: list[Process] = []
        self.stores: dict[tuple[int, str], dict[str, bytes]] = {}
        self.gathered: dict[tuple[int, int], dict[int, Any]] = {}
        self.counts: dict[tuple[int, int], int] = {}
        self.servers: dict[int, FakeServer] = {}
        self.numbers = iter(range(10**9))
        self.story: list[str] = []

    # --- for whoever runs in it

    @property
    def me(self) -> Process:
        assert self.current is not None
        return self.current.process

    @property
    def rank(self) -> int:
        return self.world.index(self.me)

    def point(self, label: str) -> None:
        """Others may go on; this process may end here."""
        task = self.current
        if task is None or task.dying:
            return
        if self.filling is not None and self.filling.randrange(30) == 0:
            self.full ^= {task.process.node}
        if not task.background and self.faults and not self.broken and self.chance.randrange(self.rarity) == 0:
            self.fault(task, label)
        self._hand_back(task)

    def wait(self, until: Callable[[], bool]) -> None:
        """Until that holds."""
        task = self.current
        assert task is not None
        while not until():
            if task.dying:
                return
            task.until = until
            try:
                self._hand_back(task)
            finally:
                task.until = None

    def _hand_back(self, task: Task) -> None:
        self.back.release()
        task.turn.acquire()
        if not task.process.alive:
            task.dying = True  # what its code does on its way out is nobody's business
            raise Killed
        if self.broken and not task.background and not task.process.deferring:
            stuck = task.until is not None and not task.until()
            if stuck or self.chance.random() < 0.3:
                raise Interrupted

    def fault(self, task: Task, label: str) -> None:
        kind = self.chance.choice(self.kinds)
        self.faults -= 1
        self.broken = True
        process = task.process
        self.story.append(f"generation {self.generation}: {kind} of {process.name} (rank {self.rank}, {process.node}) at {label}")
        if kind == "raise":
            raise Planted(label)
        lost = [other for other in self.world if other is process or (kind == "node" and other.node == process.node)]
        for other in lost:
            self.end(other)
        if kind == "node":
            self.lost_node = True
            shutil.rmtree(node_folder(self.folder, process.node), ignore_errors=True)
        task.dying = True
        raise Killed

    def end(self, process: Process) -> None:
        """It is no more; what it served and remembered neither."""
        process.alive = False
        memory.forget(process.name)
        for port in [port for port, server in self.servers.items() if server.process is process]:
            del self.servers[port]

    def part(self, process: Process) -> None:
        """Another one takes over, by decision: it may save what it has."""
        known = memory.of(process.name)
        if known is not None:
            task = self.start(process, lambda: (known.stop(), known.part()), background=True)
            while not task.over:
                self._give(self.chance.choice([one for one in self.tasks if self._ready(one)]))
        self.end(process)

    # --- running

    def run(self, world: Sequence[Process], life: Callable[[], Any]) -> list[Any]:
        """One generation: what each rank's `life` gave, or by what it was ended."""
        self.generation += 1
        self.broken = self.lost_node = False
        self.world = list(world)
        for process in world:
            process.deferring = 0
        lives = [self.start(process, life) for process in world]
        idle = 0
        while not all(task.over for task in lives):
            idle += 1
            ready = [task for task in self.tasks if not task.over and self._ready(task)]
            assert ready and idle < MAX_IDLE, ("nobody can go on", self.story)
            self._give(self.chance.choice(ready))
            if any(isinstance(task.result, Planted) for task in lives):
                self.broken = True
        return [task.result for task in lives]

    def start(self, process: Process, run: Callable[[], Any], background: bool = False) -> Task:
        task = Task(self, process, run, background)
        self.tasks.append(task)
        _pool.run(task.body, self.back.release, self.world.index(process) if not background else None)
        return task

    def drain(self) -> None:
        """Processes that are left alone: what still runs in them is ended."""
        for task in self.tasks:
            self.end(task.process)
        while any(not task.over for task in self.tasks):
            self._give(next(task for task in self.tasks if not task.over))
        self.tasks.clear()

    def _ready(self, task: Task) -> bool:
        if task.until is None or not task.process.alive or task.until():
            return True
        return self.broken and not task.background

    def _give(self, task: Task) -> None:
        if not task.process.generators:
            task.process.generators = rng.capture()
        if self.current is None or self.current.process is not task.process:
            if self.current is not None:
                self.current.process.generators = rng.capture()
            rng.install(task.process.generators)
        self.current = task
        task.turn.release()
        self.back.acquire()
        if task.over:
            self.tasks.remove(task)
        if task.error is not None:
            raise task.error

    # --- what ranks exchange in the training loop

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; complete on some when it may never be on others."""
        self.point("all-gather")
        at = self.counts[self.generation, self.rank] = self.counts.get((self.generation, self.rank), 0) + 1
        there = self.gathered.setdefault((self.generation, at), {})
        there[self.rank] = value
        self.wait(lambda: len(there) == len(self.world))
        return [there[rank] for rank in range(len(self.world))]


class _Pool:
    """Threads that are used again: torch keeps what it has worked out for DTensors by thread.

    Nothing of them runs beside the others: one is ready when `run` returns, and has let everything go when it says `then`.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[tuple[threading.Semaphore, list[Callable[[], None]]]]] = {}

    def run(self, body: Callable[[], None], then: Callable[[], None], slot: Any) -> None:
        free = self._free.setdefault(slot, [])
        if free:
            wake, box = free.pop()
        else:
            wake, box = threading.Semaphore(0), []
            ready = threading.Event()
            threading.Thread(target=self._loop, args=(wake, box, ready, slot), daemon=True).start()
            ready.wait()
        box.extend((then, body))
        wake.release()

    def _loop(self, wake: threading.Semaphore, box: list[Callable[[], None]], ready: threading.Event, slot: Any) -> None:
        torch.set_num_threads(1)
        ready.set()
        while True:
            wake.acquire()
            box.pop()()
            self._free[slot].append((wake, box))
            box.pop()()


_pool = _Pool()


class FakeStore:
    """What `where.Meeting` needs of a store."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self._values = cluster.stores.setdefault((cluster.generation, prefix), {})

    def set(self, key: str, value: bytes) -> None:
        self._cluster.point(f"store {key}")
        self._values[key] = value

    def add(self, key: str, count: int) -> int:
        self._cluster.point(f"store {key}")
        self._values[key] = str(int(self._values.get(key, b"0")) + count).encode()
        return int(self._values[key])

    def get(self, key: str) -> bytes:
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._values[key] for key in keys]

    def wait(self, keys: Sequence[str], _timeout: Any) -> None:
        self._cluster.wait(lambda: all(key in self._values for key in keys))


class FakeServer:
    """transfer.Server."""

    def __init__(self, cluster: Cluster, find: Callable[[str, int, str, int], Shard | None]) -> None:
        self.process, self.find, self._cluster = cluster.me, find, cluster
        self.port = 0

    def open(self) -> None:
        self.port = next(self._cluster.numbers)
        self._cluster.servers[self.port] = self

    def close(self) -> None:
        self._cluster.servers.pop(self.port, None)


class FakePeer:
    """peer.Peer; a fetch comes in pieces, between which anything may happen."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self._cluster, self._port = cluster, port
        cluster.point("connect")
        self._server()

    def _server(self) -> FakeServer:
        if self._port not in self._cluster.servers:
            raise TransferError("it is gone")
        return self._cluster.servers[self._port]

    def _find(self, name: str, step: int, kind: str, since: int) -> Shard:
        for _ in range(20):  # a version that is not written yet is waited for
            found = self._server().find(name, step, kind, since)
            if found is not None:
                return found
            if kind != copies.VERSION:
                break
            self._cluster.point("wait for a version")
        raise TransferError(f"no {kind} of {name!r} after step {step}", refused=True)

    def layout(self, name: str, step: int, kind: str, since: int) -> tuple[Layout, bytes]:
        found = self._find(name, step, kind, since)
        return found.layout, found.digest

    def fetch(self, name: str, step: int, kind: str, since: int, start: int, stop: int, into: Sequence[torch.Tensor]) -> None:
        middle = (start + stop) // 2
        for first, last in ((start, middle), (middle, stop)):
            row = self._find(name, step, kind, since).range(first, last)
            _copy(row, into, first - start)
            self._cluster.point("transfer")
            self._server()

    def come_near(self) -> str:
        return ""

    def cut(self) -> None:
        pass

    def close(self) -> None:
        pass


def _copy(row: Sequence[torch.Tensor], into: Sequence[torch.Tensor], skip: int) -> None:
    flat = torch.cat([*row]) if row else torch.empty(0, dtype=torch.uint8)
    at = 0
    for place in into:
        first, last = max(skip, at), min(skip + flat.numel(), at + place.numel())
        if first < last:
            place[first - at : last - at] = flat[first - skip : last - skip]
        at += place.numel()


class FakeDist:
    """torch.distributed for exchange.py."""

    def __init__(self, cluster: Callable[[], Cluster]) -> None:
        self._cluster = cluster

    def all_gather(self, out: Sequence[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        for into, value in zip(out, self._cluster().gather(own.clone()), strict=True):
            into.copy_(value)


class FakeThreads:
    """hyperpodrun.ending for copies.py."""

    def __init__(self, cluster: Callable[[], Cluster]) -> None:
        self._cluster = cluster

    def thread(self, target: Callable[..., Any], *args: Any, **_options: Any) -> Task:
        cluster = self._cluster()
        return cluster.start(cluster.me, lambda: target(*args), background=True)


class AtOnce:
    """hyperpodrun.ending for tiered.py: what writes files needs nobody."""

    by_itself = None

    def thread(self, target: Callable[..., Any], *args: Any, **_options: Any) -> threading.Thread:
        target(*args)
        over = threading.Thread(target=int)
        over.start()
        return over


def node_folder(folder: Path, node: str) -> Path:
    return folder / node


@contextmanager
def edges(patch: pytest.MonkeyPatch, every: int) -> Iterator[Callable[[Cluster], None]]:
    """Put the fakes in; call what is given with the cluster to use. A version is made every `every` steps."""
    now: list[Cluster] = []

    def cluster() -> Cluster:
        return now[-1]

    def look() -> where.Where:
        at = cluster()
        node = at.me.node
        local = [process for process in at.world if process.node == node]
        return where.Where(at.rank, len(at.world), local.index(at.me), node, "job", str(at.generation), True, len(local))

    @contextmanager
    def update_section() -> Iterator[None]:
        process = cluster().me
        process.deferring += 1
        try:
            yield
        finally:
            process.deferring -= 1

    def store(prefix: str) -> FakeStore:
        """Names of states are processes' here; a world shares them."""
        _, _, rest = prefix.partition("process ")
        return FakeStore(cluster(), rest.partition(" ")[2] or rest.partition("/")[2])

    def server(_token: bytes, find: Any, *_: Any, **_options: Any) -> FakeServer:
        return FakeServer(cluster(), find)

    def peer(address: tuple[str, int], _token: bytes) -> FakePeer:
        return FakePeer(cluster(), address[1])

    def reserve(slots: shm.Slots, *what: Any, **more: Any) -> Shard:
        at = cluster()
        if at.me.node in at.full and not isinstance(slots, shm.HeapSlots):
            raise shm.NoRoom(28, f"{at.me.node} is full")
        return reserved(slots, *what, **more)

    reserved = shm.Slots.reserve
    patch.setattr(shm.Slots, "reserve", reserve)
    patch.setattr(state, "look", look)
    patch.setattr(state, "update_section", update_section)
    patch.setattr(state, "_cpu_group", lambda: None)
    patch.setattr(state.RecoverableState, "_say", lambda self, text: cluster().story.append(text))
    patch.setattr(memory, "_remembered", {})
    patch.setattr(where, "_store", store)
    patch.setattr(where, "_calls", {})
    patch.setattr(exchange, "dist", FakeDist(cluster))
    patch.setattr(restoring, "Server", server)
    for module in (restoring, state):
        patch.setattr(module, "new_token", lambda: bytes([cluster().generation]) * 16)
    patch.setattr(restoring, "own_address", lambda towards: "here")
    patch.setattr(copies, "Server", server)
    patch.setattr(copies, "Peer", peer)
    patch.setattr(copies, "ending", FakeThreads(cluster))
    patch.setattr(tiered, "ending", AtOnce())
    patch.setattr(copies, "RETRY_S", 0.0)
    patch.setattr(copies, "WAIT_S", 0.0)
    patch.setattr(copies, "DUTY", 1.0)
    patch.setattr(fetching, "Peer", peer)
    patch.setattr(nodestate, "INLINE", 1e9)
    patch.setattr(pace.Pace, "every", lambda self: every)
    patch.setattr(node_state, "folder_of", lambda job, node: str(node_folder(cluster().folder, node)))
    patch.setattr(node_state, "of_state", lambda folder, name: folder)  # names of states are processes', which share them
    patch.setattr(versions.Versions, "_tell", lambda *_: None)
    yield now.append
    now.clear()
