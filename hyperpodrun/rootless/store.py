"""Door 2: the agents' store as a `torch.distributed.Store` written in Python (MESH S7).

Theory. The work is done by torch's own C++ client on the agent's port, one connection a thread, so that no thread waits for another
and a blocked call does not hold the interpreter's lock. What is added: writes are acknowledged before the call returns, so each call
is linearizable; a fork gets connections of its own; torch finds the methods under both spellings that it looks for.

torch keeps only the C++ half of a Python store alive: `current()` keeps the other one, until two generations later.
Invariants: a connection is used by the process and thread that made it; none is made in a generation that is not the store's.
Keys are text: torch hands them to a Python store as such, so a key that is no UTF-8 fails before it gets here.
Source: torch/csrc/distributed/c10d/init.cpp, PythonStore.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore  # where torch.distributed takes them from
from torch.distributed import DistNetworkError, DistStoreError

from hyperpodrun.agent.wire import names

_DEFAULT_TIMEOUT = timedelta(seconds=300)
_current: dict[str, "MeshStore"] = {}
"""By "generation address": the newest, and the one before it, whose groups may be on their way out. A process that is restarted in
place again and again would else keep the connections of all its generations."""
_lock = threading.Lock()


class NoLauncher(RuntimeError):
    """This process was not started by hyperpodrun with its own store."""


class MeshStore(Store):
    """All keys of this generation. `address` is (host, port) of this node's agent; what takes longer than `timeout` raises
    `dist.DistStoreError`."""

    def __init__(self, address: tuple[str, int], timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._address = address
        self._clients = threading.local()
        self._anchor: tuple[int, Any] | None = None
        """(pid, a connection that nothing is asked over): while one is open the agent keeps what this process has written."""
        self._generation = os.environ.get(names.GENERATION, "")
        self.set_timeout(timeout)

    @classmethod
    def current(cls) -> "MeshStore":
        """The store of the generation that this process belongs to; one object a generation. Raises NoLauncher."""
        address = os.environ.get(names.STORE, "")
        generation = os.environ.get(names.GENERATION, "")
        if not address.startswith("tcp://"):
            raise NoLauncher(
                f"{names.STORE} is not set: start this program with hyperpodrun (and without {names.USE_ROOTLESS}=0) to have its store"
            )
        key = f"{generation} {address}"
        with _lock:
            if key not in _current:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                _current[key] = cls((host.strip("[]"), int(port)))
                for old in list(_current)[:-2]:
                    del _current[old]
            return _current[key]

    timeout: timedelta
    """How long a get or wait without a limit of its own may take. Held by the C++ half, where PrefixStore sets it."""

    def _connect(self) -> Any:
        host, port = self._address
        return TCPStore(host, port, None, False, timeout=_DEFAULT_TIMEOUT, wait_for_workers=False)

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """This thread's connection. One that broke is not used again; a new one is made as long as the generation lasts."""
        mine = self._clients
        if getattr(mine, "pid", None) != os.getpid():
            if self._generation != os.environ.get(names.GENERATION, ""):
                raise DistStoreError(f"generation {self._generation} ended, and this store with it: take MeshStore.current()")
            with _lock:
                if self._anchor is None or self._anchor[0] != os.getpid():
                    self._anchor = os.getpid(), self._connect()
            mine.client = self._connect()
            mine.pid = os.getpid()
        mine.client.set_timeout(self.timeout)
        try:
            yield mine.client
        except DistNetworkError:
            mine.pid = None
            raise

    def _acknowledged(self, client: Any) -> None:
        client.check([])  # the agent answers when all that was written before has been carried out

    # --- torch.distributed.Store

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        with self._client() as client:
            client.set(key, value)
            self._acknowledged(client)

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        with self._client() as client:
            return bytes(client.get(key))

    def add(self, key: str, value: int) -> int:
        """Add to a number (0 if there is none) and return the sum, of 64 bit."""
        with self._client() as client:
            return int(client.add(key, value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Replace `expected` by `desired`; the value after that."""
        with self._client() as client:
            return bytes(client.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        """Are all there?"""
        with self._client() as client:
            return bool(client.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        with self._client() as client:
            client.wait(list(keys), self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        """Was there such a key?"""
        with self._client() as client:
            return bool(client.delete_key(key))

    def num_keys(self) -> int:
        """Of all nodes' shards."""
        with self._client() as client:
            return int(client.num_keys())

    def append(self, key: str, value: Any) -> None:
        """Add to the end of a value."""
        with self._client() as client:
            client.append(key, value)
            self._acknowledged(client)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, once all are there."""
        with self._client() as client:
            return [bytes(value) for value in client.multi_get(list(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Store several values."""
        with self._client() as client:
            client.multi_set(list(keys), list(values))
            self._acknowledged(client)

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def queue_push(self, key: str, value: Any) -> None:
        """Put an item at a queue's end."""
        with self._client() as client:
            client.queue_push(key, value)
            self._acknowledged(client)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest item. Raises `dist.QueueEmptyError` when there is none and `block` is false."""
        with self._client() as client:
            return bytes(client.queue_pop(key, block))

    def queue_len(self, key: str) -> int:
        """How many items wait."""
        with self._client() as client:
            return int(client.queue_len(key))

    def list_keys(self) -> list[str]:
        """All keys."""
        with self._client() as client:
            return list(client.list_keys())

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Until `world_size` have come."""
        with self._client() as client:
            client.barrier(key, world_size, self.timeout if timeout is None else timeout)

    def clone(self) -> "MeshStore":
        """The same keys; torch's C++ side asks for one to use elsewhere."""
        return self

    deleteKey = delete_key
    getNumKeys = num_keys
