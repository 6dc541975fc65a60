"""One generation's keys as one agent sees them: its own shard, and the way to the others' (MESH S1-S5).

Owner of a key: keys fall into min(64, nodes) shards by a checksum, a shard belongs to the node with the highest hash of
(shard, node) among those of the world. The path is client -> own agent -> owner's agent -> back. Reads of one key that leave in
the same frame are one read; a read never joins one that has left already, whose answer may be older than the question.

A check goes to the owner each time. Were "there is no such key" answered from a standing subscription, whoever makes the key
would have to wait until all who may still say so had heard of it, or a check could deny what a set before it had done: one more
way there and back, up to a thousand frames, and a set that hangs for as long as one subscriber stands still (3 s, M2), for every
key that anybody ever polled. The price of asking: 125 us of the owner's core a check, whose frames seldom share a turn, so with NCCL's
monitor, which asks for one key every second, about a core of one node in a job of 8,192 ranks, 7 % at 512
(scripts/bench/store_simulated.py, loaded machine).

`call` answers at once where this agent is the owner. Everything else comes through callbacks, which may call again: answers are
queued and delivered by the outermost call, one after another. When the generation ends every call that is open, and every
later one, is answered with `Trouble`.

Invariants: each call is answered once, or cancelled, and never both; nothing is answered after a cancel.
Source: rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hyperpodrun.agent.mesh.shard import PENDING, Client, Plain, Shard
from hyperpodrun.agent.mesh.stream import Reborn, Stream
from hyperpodrun.agent.wire import store as op

MOST_SHARDS = 64
MERGED = (op.Get, op.Check, op.Watch)

Answer = Plain | op.Trouble
Done = Callable[[Any], None]


class Pending:
    """A call that was not answered at once. `cancel` when nobody wants the answer any more."""

    __slots__ = ("_cancel", "done")

    def __init__(self, done: Done, cancel: Callable[["Pending"], None]) -> None:
        self.done: Done | None = done
        self._cancel = cancel

    def cancel(self) -> None:
        """The answer is not wanted; harmless when it has come."""
        if self.done is not None:
            self.done = None
            self._cancel(self)


class _Asked:
    """A call on its way: who wants the answer; several, when reads were merged."""

    __slots__ = ("owner", "wanted_by")

    def __init__(self, owner: str, first: Pending) -> None:
        self.owner = owner
        self.wanted_by = [first]


class KeySpace:
    """`order` are the world's nodes, `me` is this one, `life` this agent's number. `limit_bytes` is for the keys held here.

    `wake` is called when there is something to send: `frames` is then to be called soon.
    """

    def __init__(
        self,
        generation: int,
        me: str,
        order: Sequence[str],
        life: int,
        limit_bytes: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._wake = wake
        self.generation = generation
        self.ended = ""
        self._me = me
        self._shard = Shard(limit_bytes)
        self._owners = owners(order) if len(order) > 1 else ()
        self._life = life
        self._peers = frozenset(order) - {me}
        self._streams: dict[str, Stream] = {}
        self._busy: dict[str, Stream] = {}
        """Those with something to send, or to wait for: of a thousand peers nearly all are idle."""
        self._fresh_reads: dict[tuple[op.Operation, int], int] = {}
        self._asked: dict[int, _Asked] = {}
        self._number = 0
        self._due: deque[tuple[Done, Answer]] = deque()
        self._delivering = False

    def owner(self, key: bytes) -> str:
        """The node that holds this key. What a client asks of one owner is done there in the order asked."""
        return self._owners[zlib.crc32(key) % len(self._owners)] if self._owners else self._me

    # --- clients

    def client(self, process: int, session: int = 1, its_round: int = 1) -> Client:
        """A process of this agent's, which is here for the `session`-th time and in its `its_round`-th process group."""
        return (self._me, process, session, its_round)

    def call(self, client: Client, operation: op.KeyOperation, done: Done) -> Any:
        """The answer (Plain or Trouble), or a Pending whose answer is given to `done`."""
        return self._ask(self.owner(operation.key), client, operation, done)

    def call_all(self, client: Client, operation: op.NumKeys | op.ListKeys, done: Callable[[list[Any]], None]) -> Any:
        """The same question to every shard; the answers in the order of the nodes, or a Pending."""
        nodes = sorted({self._me, *self._peers})
        return self._together([(node, operation) for node in nodes], client, done)

    def call_each(self, client: Client, operations: Sequence[op.KeyOperation], done: Callable[[list[Any]], None]) -> Any:
        """Several operations at once; the answers in their order, or a Pending. Trouble is an answer like any other."""
        return self._together([(self.owner(operation.key), operation) for operation in operations], client, done)

    def left(self, process: int, session: int) -> None:
        """The last connection of this process's session closed."""
        self._shard.left(self._me, process, session)
        for node in sorted(self._peers):
            self._put(node, op.Left(process, session))

    def began(self, session: int) -> None:
        """A process came back for its `session`-th time."""
        self._shard.began(session)
        for node in sorted(self._peers):
            self._put(node, op.Began(session))

    def end(self, reason: str) -> None:
        """The generation is over: answer everything that is open."""
        if self.ended:
            return
        self.ended = f"generation {self.generation} ended: {reason}"
        trouble = op.Trouble(self.ended)
        for asked in self._asked.values():
            self._answer(asked, trouble)
        self._asked.clear()
        self._streams.clear()
        self._busy.clear()
        self._deliver()

    @property
    def size_bytes(self) -> int:
        """What this agent holds."""
        return self._shard.size_bytes

    def validate(self) -> None:
        """Raise ValueError when an invariant is broken."""
        self._shard.validate()
        if self._due or self._shard.woken:
            raise ValueError("answers are left lying")

    # --- agents

    def receive(self, node: str, frame: op.Frame, now_ns: int) -> None:
        """A frame of this generation came from another node's agent."""
        if self.ended or node not in self._peers or frame.generation != self.generation:
            return
        stream = self._stream(node)
        try:
            items = stream.receive(frame, now_ns)
        except Reborn:
            self.end(f"the agent of node {node} was started again and has lost the keys that it held")
            return
        for item in items:
            match item:
                case op.Call(number, client, operation):
                    answer = self._shard.call((node, number), (node, *client), operation)
                    if answer is not PENDING:
                        self._reply(node, number, answer)
                case op.Answer(number, answer):
                    self._settle(number, answer.value if isinstance(answer, op.Value) else answer)
                case op.Cancel(number):
                    self._shard.cancel((node, number))
                case op.Left(process, session):
                    self._shard.left(node, process, session)
                case op.Began(session):
                    self._shard.began(session)
        self._take_woken()
        self._deliver()

    def frames(self, now_ns: int) -> list[tuple[str, op.Frame]]:
        """What is to be sent now."""
        self._fresh_reads.clear()
        made: list[tuple[str, op.Frame]] = []
        for node, stream in list(self._busy.items()):
            made += [(node, frame) for frame in stream.frames(now_ns)]
            if stream.next_deadline_ns() is None:
                del self._busy[node]
        return made

    def tick(self, now_ns: int) -> None:
        """Time has passed; `frames` follows."""
        for stream in self._busy.values():
            stream.tick(now_ns)

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do."""
        times = [at for stream in self._busy.values() if (at := stream.next_deadline_ns()) is not None]
        return min(times) if times else None

    # --- inside

    def _ask(self, owner: str, client: Client, operation: op.Operation, done: Done) -> Any:
        if self.ended:
            return op.Trouble(self.ended)
        self._number += 1
        number = self._number
        if owner == self._me:
            answer = self._shard.call((self._me, number), client, operation)
            if self._shard.woken:
                self._take_woken()
                self._deliver()
            if answer is not PENDING:
                return answer
        else:
            if isinstance(operation, MERGED):
                read = (operation, client[3])
                fresh = self._asked.get(self._fresh_reads.setdefault(read, number))
                if fresh is not None:
                    pending = Pending(done, lambda p, number=self._fresh_reads[read]: self._unask(number, p))  # type: ignore[misc]
                    fresh.wanted_by.append(pending)
                    return pending
                self._fresh_reads[read] = number
            self._put(owner, op.Call(number, client[1:], operation))
        pending = Pending(done, lambda p: self._unask(number, p))
        self._asked[number] = _Asked(owner, pending)
        return pending

    def _put(self, node: str, item: op.Item) -> None:
        if not self.ended:
            self._stream(node).put(item)
            self._wake()

    def _stream(self, node: str) -> Stream:
        """The way to and from that peer, which is busy now."""
        stream = self._streams.get(node)
        if stream is None:
            stream = self._streams[node] = Stream(self.generation, self._life)
        self._busy[node] = stream
        return stream

    def _unask(self, number: int, pending: Pending) -> None:
        asked = self._asked.get(number)
        if asked is None:
            return
        asked.wanted_by.remove(pending)
        if asked.wanted_by:
            return
        del self._asked[number]
        if asked.owner == self._me:
            self._shard.cancel((self._me, number))
        else:
            self._put(asked.owner, op.Cancel(number))

    def _together(self, asked: list[tuple[str, Any]], client: Client, done: Callable[[list[Any]], None]) -> Any:
        answers: list[Any] = [None] * len(asked)
        open_calls: dict[int, Pending] = {}
        ready = False

        def came(place: int, answer: Answer) -> None:
            answers[place] = answer
            open_calls.pop(place, None)
            if ready and not open_calls:
                whole.done = None
                done(answers)

        for place, (owner, operation) in enumerate(asked):
            answer = self._ask(owner, client, operation, lambda answer, place=place: came(place, answer))  # type: ignore[misc]
            if type(answer) is Pending:
                open_calls[place] = answer
            else:
                answers[place] = answer
        if not open_calls:
            return answers
        ready = True

        def cancel(_whole: Pending) -> None:
            for pending in open_calls.values():
                pending.cancel()

        whole = Pending(lambda _: None, cancel)
        return whole

    def _reply(self, node: str, number: int, answer: Answer) -> None:
        if node == self._me:
            self._settle(number, answer)
        else:
            self._put(node, op.Answer(number, answer if isinstance(answer, op.Trouble) else op.Value(answer)))

    def _take_woken(self) -> None:
        woken = self._shard.woken
        if woken:
            self._shard.woken = []
            for (node, number), answer in woken:
                self._reply(node, number, answer)

    def _settle(self, number: int, answer: Answer) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._answer(asked, answer)

    def _answer(self, asked: _Asked, answer: Answer) -> None:
        for pending in asked.wanted_by:
            if pending.done is not None:
                self._due.append((lambda answer, pending=pending: _give(pending, answer), answer))  # type: ignore[misc]

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._due:
                done, answer = self._due.popleft()
                done(answer)
        finally:
            self._delivering = False


def _give(pending: Pending, answer: Answer) -> None:
    done, pending.done = pending.done, None
    if done is not None:
        done(answer)


def owners(order: Sequence[str]) -> tuple[str, ...]:
    """The owner of each shard."""
    import hashlib  # several milliseconds, and needless on a single node

    def weight(shard: int, node: str) -> bytes:
        return hashlib.blake2b(f"{shard} {node}".encode(errors="surrogateescape"), digest_size=8).digest()

    return tuple(max(sorted(order), key=lambda node, s=shard: weight(s, node)) for shard in range(min(MOST_SHARDS, len(order))))  # type: ignore[misc]
