"""Versions in a stored checkpoint: what is left when no memory has the state any more, and for the next job.

Theory. With `tiered=` every `tiered_every` steps a version is written to files under that path, one folder a step, in the form that
versions in shared memory have (shm.py): each shard by the lowest rank that has it, each private state by its rank. A file is written
under another name and renamed when it is on the disk with its checksum, so that a file that is found is whole; whether a step is,
the plan sees from what all ranks find. Rows are copied to the file while the next step's forward and backward pass run, which
change no parameter; the disk has until the next time. The path may be one that all nodes share, or each node's own.

After a step is stored, those older than the KEPT newest whole ones before it are removed.

States: *idle*, *copying* (the state must not change), *flushing*.
Invariants: no file of a step is changed once it is there; the newest whole step is never removed.
"""

import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import count

from hyperpodrun import ending
from hyperpodrun.recovery import shm
from hyperpodrun.recovery.plan import History
from hyperpodrun.recovery.shard import Shard

EVERY = 500
KEPT = 2
_PREFIX = "step-"


class Tiered:
    """`path`: where; stored are steps whose number counted from one is a multiple of `every`; `say` tells the user something."""

    def __init__(self, path: str, every: int, say: Callable[[str], None]) -> None:
        self._path = path
        self._every = every
        self._say = say
        self._history: History = ()
        self._names: frozenset[str] = frozenset()
        self._of_node: frozenset[str] = frozenset()
        self._tidies = False
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()

    def begin(self, step: int, history: History, names: Collection[str], of_node: Collection[str], tidies: bool) -> None:
        """The state after `step` is in place. `names`: all that a version of the job consists of, `of_node`: what this node stores of
        it. `tidies`: one process of each node does.

        What is newer will be lived again and goes; what a new beginning could not use is kept aside, for people.
        """
        self._history, self._names, self._of_node, self._tidies = history, frozenset(names), frozenset(of_node), tidies
        newer = [at for at in steps(self._path) if at > step]
        if not tidies or not newer:
            return
        if step >= 0:
            for at in newer:
                shutil.rmtree(folder_of(self._path, at), ignore_errors=True)
            return
        aside = next(os.path.join(self._path, f"unused-{n}") for n in count() if not os.path.exists(f"{self._path}/unused-{n}"))
        with suppress(OSError):  # another node was faster
            os.makedirs(aside)
            for at in newer:
                os.rename(folder_of(self._path, at), folder_of(aside, at))
        self._say(f"what is stored in {self._path} cannot be used here (see above); it is in {aside} now")

    def due(self, step: int) -> bool:
        """Is this step stored?"""
        return (step + 1) % self._every == 0

    def store(self, step: int, shards: Mapping[str, Shard], intact: Callable[[], bool] = shm.always) -> None:
        """Store this rank's part of it, in a thread; `settle` before anything changes. What is not `intact` then is not stored."""
        self.close()
        self._copied.clear()
        self._thread = ending.thread(self._store, step, shards, intact, name="tiered", stop=ending.by_itself, limit_s=math.inf)

    def settle(self) -> None:
        """Until the state may change again."""
        if self._thread is not None:
            self._copied.wait()

    def close(self) -> None:
        """Until what was begun is stored."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None  # only now: an order to leave may break into the wait, and whoever comes next has to wait, too

    def _store(self, step: int, shards: Mapping[str, Shard], intact: Callable[[], bool]) -> None:
        folder, written = folder_of(self._path, step), []
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            for name, made in shards.items():
                written.append(shm.write_file(os.path.join(folder, _file_of(name)), name, step, made, self._history))
            whole = intact()
            self._copied.set()
            for finish in written if whole else ():
                finish()
            if not whole:
                self._say(f"step {step} is not stored in {self._path}: other weights were in the model meanwhile")
                return
            _flush(folder)
        except OSError as error:
            self._say(f"step {step} is not stored in {self._path}: {error.strerror or error}")
            for name in shards:
                with suppress(OSError):  # what is half of a file would fill the disk for the next ones
                    os.unlink(shm.unfinished(os.path.join(folder, _file_of(name))))
        else:
            self._tidy(step)
        finally:
            self._copied.set()

    def _tidy(self, step: int) -> None:
        """Remove what is older than the newest whole steps. (This one may not be whole yet, elsewhere.)"""
        if not self._tidies:
            return
        files = {at: _files(self._path, at) for at in steps(self._path)}
        shared = any(some & {_file_of(name) for name in self._names - self._of_node} for some in files.values())
        wanted = {_file_of(name) for name in (self._names if shared else self._of_node)}
        whole = [at for at, some in files.items() if at < step and wanted <= some]
        for at in files if len(whole) >= KEPT else ():
            if at < whole[-KEPT]:
                shutil.rmtree(folder_of(self._path, at), ignore_errors=True)


def found(path: str, place: int = 0, places: int = 1, needs: Collection[str] = ()) -> list[shm.Version]:
    """Versions in files under the path, their rows not checked: those of `needs`, and every `places`-th of the others, so that the
    processes of a node together offer all."""
    versions = []
    for step in steps(path):
        folder = folder_of(path, step)
        wanted = {_file_of(name) for name in needs}
        for number, file in enumerate(sorted(_files(path, step))):
            if file in wanted or number % places == place:
                version = shm.read(os.path.join(folder, file), anyones=True)
                if version is not None and version.step == step and _file_of(version.name) == file:
                    versions.append(version)
    return versions


def steps(path: str) -> list[int]:
    """The steps of which something is there."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(int(name[len(_PREFIX) :]) for name in names if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit())


def _files(path: str, step: int) -> set[str]:
    """What is in a step's folder; nothing if another process has just removed it, or it is none."""
    try:
        return {*os.listdir(folder_of(path, step))}
    except OSError:
        return set()


def folder_of(path: str, step: int) -> str:
    """Where a step's files are."""
    return os.path.join(path, f"{_PREFIX}{step:09d}")


def _file_of(name: str) -> str:
    return blake2b(name.encode(), digest_size=10).hexdigest() + ".version"


def _flush(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
