"""The keys of one owner in one generation: a TCPStore as a pure core (MESH S1, S3, S4, S6).

One thread calls `call`, so operations take effect one after another, at the moment of the call: linearizable. What cannot be
answered yet (a missing key, an empty queue, a barrier) is remembered under its ticket and answered by the operation that
brings what was missing: those answers are in `woken`, to be taken after every call.

A key remembers who made it what it is: the client that set it, or all that added and appended since. Two things keep a process
group that is made again within one generation from the addresses of the one before (API section 4):

- A process that leaves the store (its last connection closes) leaves its keys behind, until it is seen that processes come back:
  then the keys of those who left before are dropped. *Session* counts the comings of one process. A counter that many have added
  to goes as soon as one of them has left.
- Ranks do not come back all at once, and what still refers to an old group keeps its connections open. So the keys that torch puts
  under `PER_ROUND` have rounds: the n-th `init_process_group` of one rank means the n-th of the others. A value that only clients
  of earlier rounds made is, for a later one, not there: `Watch` waits for the new one, a sum begins anew.

Invariants: nobody waits for a key that is there, or for an item while its queue holds one; `size_bytes` is what is held.
Source: torch's TCPStore client and server, tried out over a recording proxy.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from hyperpodrun.agent.wire import store as op

Client = tuple[str, int, int, int]
"""(agent, number of the process there, session, round)."""
Ticket = tuple[str, int]
"""(agent, number of its call)."""
Plain = bytes | int | bool | list[bytes] | None

PENDING: Final = object()
"""The answer comes later, through `woken`."""
PER_ROUND: Final = (b"/default_pg/", b"//worker/attempt_")
"""Where init_process_group has its keys when it makes the store itself; before torch 2.6 below the attempt's number."""
ENTRY_BYTES = 200
"""What an entry costs beside its key and value."""
PRUNE_AT = 4096
_BUILDS_ON = (op.Add, op.Append, op.CompareSet, op.Arrive)
_HALF = 1 << 63
_WHOLE = 1 << 64


class Shard:
    """`limit_bytes`: more is refused with a sentence."""

    def __init__(self, limit_bytes: int) -> None:
        self.woken: list[tuple[Ticket, Plain]] = []
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._values: dict[bytes, bytes] = {}
        self._authors: dict[bytes, Collection[Client]] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._watchers: dict[bytes, dict[Ticket, int]] = {}
        self._poppers: dict[bytes, dict[Ticket, None]] = {}
        self._arrivals: dict[bytes, dict[Ticket, int]] = {}
        self._waits_for: dict[Ticket, bytes] = {}
        self._session = 1
        self._departed: set[tuple[str, int, int]] = set()
        self._prune_at = PRUNE_AT
        self._handlers: dict[type, Callable[[Any, Ticket, Client], Any]] = {
            op.Set: self._set,
            op.Get: self._get,
            op.Add: self._add,
            op.CompareSet: self._compare_set,
            op.Check: self._check,
            op.Watch: self._watch,
            op.Delete: self._delete,
            op.Append: self._append,
            op.Push: self._push,
            op.Pop: self._pop,
            op.Length: self._length,
            op.Arrive: self._arrive,
            op.NumKeys: self._num_keys,
            op.ListKeys: self._list_keys,
        }

    def call(self, ticket: Ticket, client: Client, operation: op.Operation) -> Any:
        """The answer (Plain or Trouble), or PENDING. Then look into `woken`."""
        if client[3] > 1 and type(operation) in _BUILDS_ON and self._is_old(operation.key, client[3]):  # type: ignore[union-attr]
            self._forget(operation.key)  # type: ignore[union-attr]
        return self._handlers[type(operation)](operation, ticket, client)

    def cancel(self, ticket: Ticket) -> None:
        """Forget who waits there; an arrival at a barrier counts on, as TCPStore's does."""
        key = self._waits_for.pop(ticket, None)
        if key is None:
            return
        for table in (self._watchers, self._poppers, self._arrivals):
            waiting: dict[Ticket, Any] = table.get(key, {})
            if waiting.pop(ticket, PENDING) is not PENDING and not waiting:
                del table[key]

    def left(self, agent: str, process: int, session: int) -> None:
        """The last connection of a session closed."""
        gone = (agent, process, session)
        if session < self._session:
            self._drop({gone})
        else:
            self._departed.add(gone)
            if len(self._departed) > self._prune_at:  # those whose keys are gone too need no remembering
                self._departed &= {author[:3] for authors in self._authors.values() for author in authors}
                self._prune_at = max(PRUNE_AT, 2 * len(self._departed))

    def began(self, session: int) -> None:
        """A process came back for its `session`-th time."""
        if session <= self._session:
            return
        self._session = session
        gone = {one for one in self._departed if one[2] < session}
        self._departed -= gone
        self._drop(gone)

    def waiting(self) -> int:
        """How many calls are not answered yet."""
        return len(self._waits_for)

    def validate(self) -> None:
        """Raise ValueError when an invariant is broken."""
        for table in (self._watchers, self._poppers, self._arrivals):
            for key, waiting in table.items():
                if not waiting or any(self._waits_for.get(ticket) != key for ticket in waiting):
                    raise ValueError(f"who waits for {shown(key)} is not known")
        for key, watchers in self._watchers.items():
            if any(self._there(key, its_round) if its_round else key in self._values for its_round in watchers.values()):
                raise ValueError(f"somebody waits for {shown(key)}, which is there")
        if any(key in self._queues for key in self._poppers):
            raise ValueError("somebody waits for an item of a queue that is not empty")
        held = sum(len(key) + len(value) + ENTRY_BYTES for key, value in self._values.items())
        held += sum(len(key) + len(item) + ENTRY_BYTES for key, queue in self._queues.items() for item in queue)
        if held != self.size_bytes:
            raise ValueError(f"{held} bytes are held, {self.size_bytes} are counted")

    # --- operations

    def _set(self, asked: op.Set, _ticket: Ticket, client: Client) -> op.Trouble | None:
        return self._store(asked.key, asked.value, (client,))

    def _get(self, asked: op.Get, ticket: Ticket, _client: Client) -> Any:
        value = self._values.get(asked.key)
        if value is None and asked.block:
            self._watchers.setdefault(asked.key, {})[ticket] = 0
            self._waits_for[ticket] = asked.key
            return PENDING
        return value

    def _add(self, asked: op.Add, _ticket: Ticket, client: Client) -> int | op.Trouble:
        old = self._values.get(asked.key, b"0")
        try:
            total = (int(old) + asked.amount + _HALF) % _WHOLE - _HALF
        except ValueError:
            return op.Trouble(f"add: the value of {shown(asked.key)} is no number: {old[:40]!r}")
        return self._store(asked.key, b"%d" % total, self._joined(asked.key, client)) or total

    def _compare_set(self, asked: op.CompareSet, _ticket: Ticket, client: Client) -> bytes | op.Trouble:
        value = self._values.get(asked.key)
        if value is None:
            if asked.expected:
                return asked.expected
        elif value != asked.expected:
            return value
        return self._store(asked.key, asked.desired, (client,)) or asked.desired

    def _check(self, asked: op.Check, _ticket: Ticket, client: Client) -> bool:
        return self._there(asked.key, client[3])

    def _watch(self, asked: op.Watch, ticket: Ticket, client: Client) -> Any:
        if self._there(asked.key, 1 if asked.any_round else client[3]):
            return True
        self._watchers.setdefault(asked.key, {})[ticket] = 1 if asked.any_round else client[3]
        self._waits_for[ticket] = asked.key
        return PENDING

    def _delete(self, asked: op.Delete, _ticket: Ticket, _client: Client) -> bool:
        return self._forget(asked.key)

    def _append(self, asked: op.Append, _ticket: Ticket, client: Client) -> op.Trouble | None:
        return self._store(asked.key, self._values.get(asked.key, b"") + asked.value, self._joined(asked.key, client))

    def _push(self, asked: op.Push, _ticket: Ticket, _client: Client) -> op.Trouble | None:
        key = asked.key
        if takers := self._poppers.get(key):
            ticket = next(iter(takers))
            self.cancel(ticket)
            self.woken.append((ticket, asked.value))
            return None
        if trouble := self._grow(key, len(key) + len(asked.value) + ENTRY_BYTES):
            return trouble
        self._queues.setdefault(key, deque()).append(asked.value)
        self._wake(key)
        return None

    def _pop(self, asked: op.Pop, ticket: Ticket, _client: Client) -> Any:
        queue = self._queues.get(asked.key)
        if queue:
            value = queue.popleft()
            self.size_bytes -= len(asked.key) + len(value) + ENTRY_BYTES
            if not queue:
                del self._queues[asked.key]
            return value
        if asked.block:
            self._poppers.setdefault(asked.key, {})[ticket] = None
            self._waits_for[ticket] = asked.key
            return PENDING
        return None

    def _length(self, asked: op.Length, _ticket: Ticket, _client: Client) -> int:
        return len(self._queues.get(asked.key, ()))

    def _arrive(self, asked: op.Arrive, ticket: Ticket, client: Client) -> Any:
        come = self._add(op.Add(asked.key, 1), ticket, client)
        if isinstance(come, op.Trouble):
            return come
        there = self._arrivals.get(asked.key, {})
        for other in [other for other, size in there.items() if size <= come]:
            self.cancel(other)
            self.woken.append((other, True))
        if come >= asked.size:
            return True
        self._arrivals.setdefault(asked.key, {})[ticket] = asked.size
        self._waits_for[ticket] = asked.key
        return PENDING

    def _num_keys(self, _asked: op.NumKeys, _ticket: Ticket, _client: Client) -> int:
        return len(self._values)

    def _list_keys(self, _asked: op.ListKeys, _ticket: Ticket, _client: Client) -> list[bytes] | op.Trouble:
        if sum(map(len, self._values)) + 8 * len(self._values) > op.MOST_VALUE_BYTES:
            return op.Trouble(f"the names of {len(self._values)} keys are too long for one answer")
        return list(self._values)

    # --- keys

    def _store(self, key: bytes, value: bytes, authors: Collection[Client]) -> op.Trouble | None:
        if len(value) > op.MOST_VALUE_BYTES:
            return op.Trouble(f"the value of {shown(key)} would have {len(value)} bytes; the limit is {op.MOST_VALUE_BYTES}")
        old = self._values.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value) + ENTRY_BYTES
        if growth > 0 and self.size_bytes + growth > self._limit_bytes:
            return self._grow(key, growth)
        self.size_bytes += growth
        self._values[key] = value
        self._authors[key] = authors
        if key in self._watchers:
            self._wake(key)
        return None

    def _grow(self, key: bytes, growth_bytes: int) -> op.Trouble | None:
        if self.size_bytes + growth_bytes > self._limit_bytes:
            return op.Trouble(
                f"the store is full: {self.size_bytes >> 20} MiB are held, the limit is {self._limit_bytes >> 20} MiB; "
                f"{shown(key)} was not stored"
            )
        self.size_bytes += growth_bytes
        return None

    def _joined(self, key: bytes, client: Client) -> Collection[Client]:
        authors = self._authors.get(key, ())
        joined = authors if isinstance(authors, dict) else dict.fromkeys(authors)
        joined[client] = None  # thousands of ranks add to one key
        return joined

    def _wake(self, key: bytes) -> None:
        for ticket, its_round in list(self._watchers.get(key, {}).items()):
            if its_round and self._there(key, its_round):
                self.cancel(ticket)
                self.woken.append((ticket, True))
            elif not its_round and key in self._values:  # a Get, which no item of a queue contents
                self.cancel(ticket)
                self.woken.append((ticket, self._values[key]))

    def _there(self, key: bytes, its_round: int) -> bool:
        return (key in self._values and not (its_round > 1 and self._is_old(key, its_round))) or key in self._queues

    def _is_old(self, key: bytes, its_round: int) -> bool:
        """Has nobody of this round, or a later one, had a hand in this key?"""
        return key.startswith(PER_ROUND) and all(author[3] < its_round for author in self._authors.get(key, ()))

    def _forget(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        del self._authors[key]
        self.size_bytes -= len(key) + len(value) + ENTRY_BYTES
        return True

    def _drop(self, gone: set[tuple[str, int, int]]) -> None:
        if gone:
            for key in [key for key, authors in self._authors.items() if any(author[:3] in gone for author in authors)]:
                self._forget(key)


def shown(key: bytes) -> str:
    """A key in a sentence."""
    return repr(key[:80].decode(errors="backslashreplace"))
