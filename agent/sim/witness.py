"""The order in which the owners did what was asked, checked as a proof that a history is linearizable (S3).

Theory: to look for an order is hard (Gibbons and Korach 1997); to check one is not. The simulator sees at which place in the run an
owner's shard did each operation that it did (`WatchedShard`). If that place lies between call and answer, and if, one after
another, the operations give the answers that the clients had, then these places are the moments that Herlihy and Wing ask for, and the
history is linearizable, whatever the watching is worth: nothing is taken from it but the order. If not, it says where the order breaks
first, and a search has to tell whether another one is good (`linear.py`).

Reads are not seen one by one (those of one frame are one at the owner): each needs some moment of its span at which the key held what
it was told.

What an owner never did has had no effect: of the calls that were never answered only those are part of a history that were done.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.mesh.shard import PENDING, Client, Shard, Ticket
from hyperpodrun.agent.sim.linear import INFINITY, NEVER, NOTHING, Call, apply, reads
from hyperpodrun.agent.wire import store as op


class WatchedShard(Shard):
    """`did` is called with each operation when it has taken effect."""

    def __init__(self, limit_bytes: int, did: Callable[[op.Operation], None]) -> None:
        super().__init__(limit_bytes)
        self._did = did
        self._waiting: dict[Ticket, op.Operation] = {}

    def call(self, ticket: Ticket, client: Client, operation: op.Operation) -> Any:
        """As `Shard.call`."""
        before = len(self.woken)
        answer = super().call(ticket, client, operation)
        if answer is PENDING:
            self._waiting[ticket] = operation
        else:
            self._did(operation)
        for woken, _ in self.woken[before:]:
            self._did(self._waiting.pop(woken))
        return answer


class WatchedSpace(KeySpace):
    """A key space whose shard is watched."""

    def watch(self, limit_bytes: int, did: Callable[[op.Operation], None]) -> None:
        """Before anything is asked."""
        self._shard = WatchedShard(limit_bytes, did)


def happened(history: list[Call]) -> list[Call]:
    """Without the calls that can have had no effect: never answered, and never done by an owner."""
    return [call for call in history if call.end != INFINITY or (call.took is not None and not reads(call))]


def first_misfit(history: list[Call]) -> Call | None:
    """The first call whose answer the owners' order does not explain; None: the history is linearizable."""
    moments = [-1]
    states = [NOTHING]
    asked = [(call.took if call.took is not None else call.end, call) for call in history if not reads(call)]
    for moment, call in sorted(asked, key=lambda pair: pair[0]):
        answer, after = apply(states[-1], call.asked)
        lost = call.end == INFINITY
        if call.took is None or not call.start < moment < call.end or answer is NEVER or (not lost and answer != call.answer):
            return call
        moments.append(moment)
        states.append(after)
    for call in sorted((call for call in history if reads(call) and call.end != INFINITY), key=lambda call: call.end):
        first = bisect_right(moments, call.start) - 1
        last = bisect_left(moments, call.end)
        if not any(apply(held, call.asked)[0] == call.answer for held in reversed(states[first:last])):
            return call
    return None
