"""Copies of shards that live on too few nodes, in the memory of buddies on other nodes.

Theory. Each version of such a shard (pace.py) is fetched by its buddies from where its owner wrote it, not from the live parameters:
so they have until the version after the next, and training never waits for them. What arrives goes into the older of two versions on
the buddy's node, in its shared memory (it outlives the workers there), or, where that has no room, in this process's own. Transfers
pause in proportion to what they took, so that most of the wire is left to the training.

States of a buddy: *idle*, *fetching* the versions of its wards one after the other (others begin no new version meanwhile).
Invariants: a copy is a version only when all of it has arrived and every checksum agreed; the version before is whole meanwhile.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from hyperpodrun import ending
from hyperpodrun.recovery import shm
from hyperpodrun.recovery.peer import Peer
from hyperpodrun.recovery.plan import History
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.transfer import Server, TransferError

PIECE_BYTES = 16 << 20
DUTY = 0.25
"""Share of the time in which a fetch is under way."""
RETRY_S = 1.0
WAIT_S = 30.0
VERSION = "version"

Find = Callable[[str, int, float], Shard | None]


class Copies:
    """`find`: this rank's own version, waited for. `slots_of`: where copies of a shard go. Open until `close`."""

    def __init__(self, token: bytes, find: Find, slots_of: Callable[[str], shm.Slots], say: Callable[[str], None]) -> None:
        self._token = token
        self._find = find
        self._slots_of = slots_of
        self._say = say
        self._server = Server(token, lambda name, step, kind: find(name, step, WAIT_S) if kind == VERSION else None)
        self._wards: Sequence[tuple[str, tuple[str, int]]] = []
        self._history: History = ()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.port = self._server.port
        self.cost_s = 0.0

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

    def fetch(self, step: int) -> None:
        """The wards' versions of this step, in a thread."""
        if self._wards:
            self._thread = ending.thread(self._fetch_all, step, name="copies", stop=self._closed.set)

    def close(self) -> None:
        """Stop; what has not arrived is no version."""
        self._closed.set()
        self._server.close()
        if self._thread is not None:
            self._thread.join()

    def _fetch_all(self, step: int) -> None:
        began_s = time.thread_time()
        for name, address in self._wards:
            while not self._closed.is_set():
                try:
                    self._fetch(name, step, address)
                    break
                except TransferError as error:
                    if error.refused:
                        self._say(f"no copy of {name!r} after step {step}: {error}")
                        break
                    self._closed.wait(RETRY_S)  # it is gone, and a restart ends this; or the network is
                except OSError as error:
                    self._say(f"no copy of {name!r}: {error.strerror or error}")
                    break
        # the owner's processor is busy as long as this one's
        self.cost_s = 2 * (time.thread_time() - began_s)

    def _fetch(self, name: str, step: int, address: tuple[str, int]) -> None:
        with closing(Peer(address, self._token)) as peer:
            layout = peer.layout(name, step, VERSION)
            slots = self._slots_of(name)
            row = slots.reserve(step, layout, self._history)
            for start in range(0, row.nbytes, PIECE_BYTES):
                stop = min(row.nbytes, start + PIECE_BYTES)
                began_s = time.monotonic()
                peer.fetch(name, step, VERSION, start, stop, row.range(start, stop))
                if self._closed.wait((time.monotonic() - began_s) * (1 / DUTY - 1)):
                    raise TransferError("a restart began")
            slots.commit()
