"""While too few of a view's members answer to decide anything: what people are told, and what they can order (A11).

Theory. Without a quorum nothing may be decided, for the silent may go on elsewhere. Only somebody who knows that a slot is gone for
good can help: a person, for one node (orders.py), or whoever started the job, for all (`--on-quorum-loss=continue:S`, unsafe).
The latter certifies each slot from which nothing was heard for S seconds, also one that never was a member: a recovery needs every
slot's answer or its certificate. A node that answers is never certified.

States: *good*, *doubtful* (no quorum, for less than `DOUBT_S`), *waiting* (people were told; orders are looked for).
Invariant: nobody is certified by this agent's own doing within `limit_s` of the last word from there, nor while there is a quorum.
"""

import math
from collections.abc import Callable

from hyperpodrun.agent import mesh_words, orders
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.reactor import Reactor, Timer

DOUBT_S = 1.0
ORDERS_S = 0.5


class QuorumLoss:
    """`limit_s`: after so long without a quorum the silent are certified dead, infinity: never. `certify(node)` does so."""

    def __init__(
        self, reactor: Reactor, limit_s: float, run_dir: str, say: Callable[[str], None], certify: Callable[[str], None]
    ) -> None:
        self._reactor = reactor
        self._limit_s = limit_s
        self._run_dir = run_dir
        self._say = say
        self._certify = certify
        self._heard_s: dict[str, float] = {}
        self._since_s: float | None = None
        self._told = False
        self._certified: set[str] = set()
        self._unknown_told = False
        self._timer: Timer | None = None

    def heard(self, node: str) -> None:
        """A message of this node came in."""
        if self._limit_s < math.inf:
            self._heard_s[node] = self._reactor.now_s()

    def look(self, node: Node) -> None:
        """To be called after everything that happens to `node`, which is in a view."""
        if node.view is None or node.view.mode == "closed" or not node.waits_for():
            if self._told:
                self._say("a majority of the nodes answers again")
            self.close()
        elif self._since_s is None:
            self._since_s = self._reactor.now_s()
            self._timer = self._reactor.call_later(DOUBT_S, lambda: self._tell(node))

    def close(self) -> None:
        """There is a quorum, or this agent leaves."""
        if self._timer:
            self._timer.cancel()
        self._timer, self._since_s, self._told = None, None, False
        self._certified.clear()

    def _tell(self, node: Node) -> None:
        self._told = True
        self._timer = self._reactor.call_later(ORDERS_S, lambda: self._next(node))
        if node.view is not None:
            lease_s = node.config.lease_ns / 1e9
            self._say(mesh_words.no_majority(node.view, node.waits_for(), lease_s, self._limit_s))

    def _next(self, node: Node) -> None:
        self._timer = self._reactor.call_later(ORDERS_S, lambda: self._next(node))
        for slot in orders.take(self._run_dir):
            self._say(f"{slot} was certified to be gone for good")
            self._certify(slot)
        now_s = self._reactor.now_s()
        if self._since_s is None or now_s - self._since_s < self._limit_s or node.view is None:
            return
        slots = node.slots()
        if len(slots) != node.config.slots:
            if not self._unknown_told:
                self._unknown_told = True
                self._say(mesh_words.cannot_go_on(len(slots), node.config.slots))
            return
        silent = {
            slot for slot in slots if slot != node.me().node and now_s - self._heard_s.get(slot, -math.inf) >= self._limit_s
        } - self._certified
        if silent:
            self._certified |= silent
            self._say(mesh_words.taken_for_dead(silent, self._limit_s))
            for slot in sorted(silent):
                self._certify(slot)
