"""Copies of shards that live on too few nodes, in the memory of buddies on other nodes.

Theory. Each version of such a shard (pace.py) is fetched by its buddies from where its owner wrote it, not from the live parameters:
so they have until the version after the next, and training never waits for them. What arrives goes into the older of two versions on
the buddy's node, in its shared memory (it outlives the workers there), or, where that has no room, in this process's own. Transfers
pause in proportion to what they took, so that most of the wire is left to the training.

States of a buddy: *idle*, *fetching* the versions of its wards one after the other (others begin no new version meanwhile).
Invariants: a copy is a version only when all of it has arrived and is, by its digest, what its owner wrote (what became of that since
shall not get a digest of its own here); the newest version that is whole is not written over. `close` waits for nobody else.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from hyperpodrun import ending
from hyperpodrun.recovery import shm
from hyperpodrun.recovery.peer import Peer
from hyperpodrun.recovery.plan import History, last
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.transfer import Server, TransferError

PIECE_BYTES = 16 << 20
DUTY = 0.25
"""Share of the time in which a fetch is under way."""
RETRY_S = 1.0
PATIENCE = 20
"""After so many failures it is said that there is no copy."""
WAIT_S = 30.0
VERSION = "version"

Find = Callable[[str, int, int, float], Shard | None]


class Copies:
    """`find`: this rank's own version (shard, step, since), waited for so many seconds. `slots_of`: where copies of a shard go.

    Open from `listen` until `close`.
    """

    def __init__(self, token: bytes, find: Find, slots_of: Callable[[str], shm.Slots], say: Callable[[str], None]) -> None:
        self._token = token
        self._find = find
        self._slots_of = slots_of
        self._say = say
        self._server = Server(token, self._served)
        self._wards: Sequence[tuple[str, tuple[str, int]]] = []
        self._history: History = ()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._peer: Peer | None = None
        self._connecting = False
        self._refused: set[str] = set()
        self.cost_s = 0.0
        self.held = True
        """Has all arrived of the last version that is to be kept here?"""

    def listen(self) -> int:
        """From now on others can ask; the port."""
        self._server.open()
        return self._server.port

    def begin(self, wards: Sequence[tuple[str, tuple[str, int]]], sends: bool, history: History) -> None:
        """What this rank keeps copies of, and where it comes from. `sends`: others fetch from here; else nobody listens any more."""
        self._wards = wards
        self._history = history
        if not sends:
            self._server.close()

    @property
    def waits(self) -> bool:
        """Is a version still on its way to here?"""
        return self._thread is not None and self._thread.is_alive()

    def fetch(self, step: int, keep: int | None = None) -> None:
        """The wards' versions of this step, in a thread; not over those of the step `keep`."""
        if self._wards:
            self.held = False
            self._thread = ending.thread(self._fetch_all, step, keep, name="copies", stop=self._stop)

    def close(self) -> None:
        """Stop; what has not arrived is no version.

        Who is still connecting, perhaps to a node that is gone, is left alone with it: it looks here before it does anything.
        """
        connecting = self._stop()
        self._server.close()
        if self._thread is not None and not connecting:
            self._thread.join()

    def _stop(self) -> bool:
        """What is under way ends. Is it only about to be?"""
        with self._lock:
            self._closed.set()
            if self._peer is not None:
                self._peer.cut()
            return self._connecting

    def _served(self, name: str, step: int, kind: str, since: int) -> Shard | None:
        return self._find(name, step, since, WAIT_S) if kind == VERSION else None

    def _fetch_all(self, step: int, keep: int | None) -> None:
        began_s = time.thread_time()
        held = 0
        for name, address in self._wards:
            failures = 0
            while not self._closed.is_set():
                try:
                    self._fetch(name, step, keep, address)
                    held += 1
                    self._refused.discard(name)
                    break
                except TransferError as error:
                    if error.refused:
                        self._refuse(name, step, str(error))
                        break
                    failures += 1
                    if failures == PATIENCE:  # training goes on, so it is not the node that is gone
                        self._refuse(name, step, f"{error}; it is tried again, and no newer version is made until then")
                    self._closed.wait(RETRY_S)  # it is gone, and a restart ends this; or the network is
                except OSError as error:
                    self._refuse(name, step, error.strerror or str(error))
                    break
        # the owner's processor is busy as long as this one's
        self.cost_s = 2 * (time.thread_time() - began_s)
        self.held = held == len(self._wards)

    def _refuse(self, name: str, step: int, reason: str) -> None:
        if name not in self._refused:
            self._say(f"no copy of {name!r} after step {step}: {reason}")
        self._refused.add(name)

    def _fetch(self, name: str, step: int, keep: int | None, address: tuple[str, int]) -> None:
        since = last(self._history)
        with self._connected(address) as peer:
            layout, digest = peer.layout(name, step, VERSION, since)
            slots = self._slots_of(name)
            row = slots.reserve(step, layout, self._history, keep)
            for start in range(0, row.nbytes, PIECE_BYTES):
                stop = min(row.nbytes, start + PIECE_BYTES)
                began_s = time.monotonic()
                peer.fetch(name, step, VERSION, since, start, stop, row.range(start, stop))
                if self._closed.wait((time.monotonic() - began_s) * (1 / DUTY - 1)):
                    raise TransferError("a restart began")
            if not slots.commit(digest):
                raise TransferError("it is not what its owner wrote (digest)", refused=True)

    @contextmanager
    def _connected(self, address: tuple[str, int]) -> Iterator[Peer]:
        """A connection that `close` cuts."""
        with self._lock:
            self._connecting = not self._closed.is_set()
        if not self._connecting:
            raise TransferError("a restart began")
        try:
            peer = Peer(address, self._token)
        except BaseException:
            self._connecting = False
            raise
        with closing(peer):
            with self._lock:
                self._connecting = False
                self._peer = peer
            try:
                if self._closed.is_set():
                    raise TransferError("a restart began")
                yield peer
            finally:
                with self._lock:
                    self._peer = None
