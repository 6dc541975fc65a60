"""Facts of the whole job as one agent of the world holds them: last committed step, checkpoints (MESH S9). Pure.

Theory. The membership of a world is fixed for a generation, and losing any member ends it. So a fact is acknowledged when *every*
node of the world keeps it: no quorum, no log. The first node of the world puts changes in one order, one at a time. A generation
begins with an exchange: each node gives the first one its newest record, that one takes the newest of all by (generation, number)
and gives it to everybody, with where each node's ranks listen. Until then, questions wait.

- Whatever was acknowledged is there for every rank of this generation, and of all that follow, as long as one node of the world
  in which it was acknowledged lives or comes back with its file.
- All ranks of a generation begin with the same facts, also those that were under way when the one before it ended: each of
  these is then there for all, or for none.
- A read is answered by the node itself: it may be behind a change that is not acknowledged yet, never behind one that is.

States: *closed*, *gathering* (begun, the first node's word is awaited), *open*.
Invariants: what a node says that it keeps was given to `record` before; numbers of changes within a generation have no gaps.
Source: write-all, read-one replication with a sequencer, under view changes (virtual synchrony, Birman and Joseph 1987).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hyperpodrun.agent.mesh.keyspace import Pending
from hyperpodrun.agent.wire import facts as wire
from hyperpodrun.agent.wire.facts import Ask, Change, Done, Have, Here, Outcome, Place, Record, Whole

RESEND_NS = 200_000_000
MOST_EARLY = 2048


class Facts:
    """`record` is what an earlier life of this agent kept. `send(node, message)` may lose messages; `keep(record)` has to be
    done when it returns."""

    def __init__(self, record: Record, send: Callable[[str, wire.Message], None], keep: Callable[[Record], None]) -> None:
        self.record = record
        self.places: tuple[Place, ...] = ()
        self.generation = -1
        self._send = send
        self._keep = keep
        self._me = ""
        self._order: tuple[str, ...] = ()
        self._open = False
        self._begun: dict[str, bytes] = {}
        """What the generation began with, at its first node."""
        self._here: dict[str, Here] = {}
        self._early: list[tuple[str, wire.Message]] = []
        self._waiting: deque[tuple[str, Any, Pending]] = deque()
        self._wishes: deque[tuple[Ask, Pending]] = deque()
        self._wish_number = 0
        self._granted: dict[str, Done] = {}
        self._queue: deque[tuple[str, Ask]] = deque()
        self._change: Change | None = None
        self._missing: set[str] = set()
        self._resend_ns: int | None = None

    # --- the agent

    def begin(self, generation: int, order: Sequence[str], place: Place, now_ns: int) -> None:
        """A generation whose nodes are `order`; `place` is this node's."""
        self.end()
        self.generation, self._me, self._order = generation, place.node, tuple(order)
        self._took(self._me, Here(generation, place, self.record), now_ns)
        if self._me != self._order[0]:
            self._say_again(now_ns)
        early, self._early = self._early, []
        for node, message in early:
            self.receive(node, message, now_ns)

    def end(self) -> None:
        """The generation is over. Who waits gets no answer: its connection ends with the generation."""
        self._open = False
        self._order = ()
        self.places = ()
        self._here.clear()
        self._waiting.clear()
        self._wishes.clear()
        self._granted.clear()
        self._queue.clear()
        self._change = None
        self._missing = set()
        self._resend_ns = None

    def call(self, verb: wire.Verb, argument: Any, now_ns: int, done: Callable[[Outcome], None]) -> Outcome | Pending:
        """A worker asks: an Outcome, or a Pending whose answer goes to `done`."""
        if not self._open:
            pending = Pending(done, lambda _: None)
            self._waiting.append((verb, argument, pending))
            return pending
        match verb:
            case "get":
                value = self.record.facts.get(argument)
                return Outcome(missing=value is None, value=value or b"")
            case "names":
                return Outcome(names=sorted(self.record.facts))
            case "places":
                return Outcome(places=list(self.places))
        name, value = argument  # set
        if value is None and name not in self.record.facts:
            return Outcome(missing=True)
        at_once: list[Outcome] = []
        pending = Pending(at_once.append, lambda _: None)
        self._wish_number += 1
        self._wishes.append((Ask(self.generation, self._wish_number, name, value), pending))
        if len(self._wishes) == 1:
            self._wish(now_ns)
        if at_once:
            return at_once[0]
        pending.done = done
        return pending

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do."""
        return self._resend_ns

    def tick(self, now_ns: int) -> None:
        """Time has passed."""
        if self._resend_ns is not None and now_ns >= self._resend_ns:
            self._say_again(now_ns)

    def receive(self, node: str, message: wire.Message, now_ns: int) -> None:
        """Another node's agent says something."""
        if message.generation > self.generation:
            if self._early and message.generation != self._early[0][1].generation:
                self._early = []  # what is lost here is sent again
            self._early = [*self._early[-MOST_EARLY:], (node, message)]
            return
        if message.generation < self.generation or node not in self._order:
            return
        first = self._order[0]
        match message:
            case Here() if self._me == first:
                self._took(node, message, now_ns)
            case Whole() if node == first and not self._open:
                self._begin_with(message.places, message.facts, now_ns)
            case Ask() if self._me == first and self._open:
                self._asked(node, message, now_ns)
            case Change() if node == first and self._open:
                if message.number == self.record.number + 1:
                    self._apply(message)
                self._send(first, Have(self.generation, self.record.number))
            case Have() if self._change is not None and message.number >= self._change.number:
                self._has(node, now_ns)
            case Done() if node == first:
                self._settled(message, now_ns)

    # --- the beginning

    def _took(self, node: str, here: Here, now_ns: int) -> None:
        self._here[node] = here
        if self._order[0] != self._me:
            return
        if self._open:
            if node != self._me:
                self._send(node, Whole(self.generation, list(self.places), self._begun))
        elif len(self._here) == len(self._order):
            newest = max((one.record for one in self._here.values()), key=lambda record: (record.generation, record.number))
            self._begun = newest.facts
            places = [self._here[one].place for one in self._order]
            for other in self._order[1:]:
                self._send(other, Whole(self.generation, places, newest.facts))
            self._begin_with(places, newest.facts, now_ns)

    def _begin_with(self, places: Sequence[Place], facts: dict[str, bytes], now_ns: int) -> None:
        self.record = Record(self.generation, 0, facts)
        self._keep(self.record)
        self.places = tuple(places)
        self._open = True
        self._resend_ns = None
        while self._waiting and self._open:
            verb, argument, pending = self._waiting.popleft()
            if pending.done is not None:
                outcome = self.call(verb, argument, now_ns, pending.done)
                if isinstance(outcome, Outcome):
                    _give(pending, outcome)

    # --- a wish of a worker here

    def _wish(self, now_ns: int) -> None:
        ask = self._wishes[0][0]
        if self._order[0] == self._me:
            self._asked(self._me, ask, now_ns)
        else:
            self._send(self._order[0], ask)
            self._resend_ns = now_ns + RESEND_NS

    def _settled(self, done: Done, now_ns: int) -> None:
        if not self._wishes or self._wishes[0][0].number != done.number:
            return
        _, pending = self._wishes.popleft()
        if self._order[0] != self._me:
            self._resend_ns = None
        if self._wishes:
            self._wish(now_ns)
        _give(pending, Outcome(error=done.error))

    # --- the first node

    def _asked(self, node: str, ask: Ask, now_ns: int) -> None:
        granted = self._granted.get(node)
        if granted is not None and ask.number <= granted.number:
            self._send(node, granted)
        elif (node, ask) not in self._queue:
            self._queue.append((node, ask))
            self._next(now_ns)

    def _next(self, now_ns: int) -> None:
        while self._change is None and self._queue:
            ask = self._queue[0][1]
            if error := self._too_much(ask):
                self._finish(error, now_ns)
                continue
            self._change = Change(self.generation, self.record.number + 1, ask.name, ask.value)
            self._apply(self._change)
            self._missing = set(self._order) - {self._me}
            if not self._missing:
                self._finish("", now_ns)
                continue
            for other in self._order[1:]:
                self._send(other, self._change)
            self._resend_ns = now_ns + RESEND_NS

    def _has(self, node: str, now_ns: int) -> None:
        self._missing.discard(node)
        if not self._missing:
            self._resend_ns = None
            self._finish("", now_ns)
            self._next(now_ns)

    def _finish(self, error: str, now_ns: int) -> None:
        node, ask = self._queue.popleft()
        self._change = None
        done = self._granted[node] = Done(self.generation, ask.number, error)
        if node == self._me:
            self._settled(done, now_ns)
        else:
            self._send(node, done)

    def _too_much(self, ask: Ask) -> str:
        if ask.value is None:
            return ""
        others = sum(len(name.encode()) + len(value) for name, value in self.record.facts.items() if name != ask.name)
        size = others + len(ask.name.encode()) + len(ask.value)
        if size <= wire.MOST_BYTES:
            return ""
        return (
            f"the job's facts would have {size} bytes, the limit is {wire.MOST_BYTES}: delete some, or keep large values in files "
            "and say where they are"
        )

    # --- both

    def _apply(self, change: Change) -> None:
        facts = dict(self.record.facts)
        if change.value is None:
            facts.pop(change.name, None)
        else:
            facts[change.name] = change.value
        self.record = Record(self.generation, change.number, facts)
        self._keep(self.record)

    def _say_again(self, now_ns: int) -> None:
        self._resend_ns = now_ns + RESEND_NS
        if not self._open:
            self._send(self._order[0], self._here[self._me])
        elif self._change is not None:
            for node in self._order:
                if node in self._missing:
                    self._send(node, self._change)
        elif self._wishes:
            self._send(self._order[0], self._wishes[0][0])
        else:
            self._resend_ns = None


def _give(pending: Pending, outcome: Outcome) -> None:
    done, pending.done = pending.done, None
    if done is not None:
        done(outcome)
