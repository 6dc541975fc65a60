"""What heartbeats carry (M6): each item for a few rounds, the least told first.

Theory: SWIM's piggybacked dissemination. On a K-regular expander an item told in R rounds to K neighbours each
reaches all of N nodes in about log_K(N) rounds; R = 2 + ceil(log2(N + 1) / 2) also survives losses. Reports and
alerts travel here *besides* the direct way to the first candidates: this is the way that works when those are the
ones who died.

States of an item: queued (rounds left), told (forgotten here; the tables that hold it know that it is not news).
Invariant: at most `most` items a heartbeat.
"""

from hyperpodrun.agent.wire.mesh import Item


class Gossip:
    """A transmit-limited queue."""

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._rounds = 2
        self._queue: dict[Item, int] = {}

    def adopt(self, nodes: int) -> None:
        """A new view with so many nodes: what was said about the old one is stale."""
        self._rounds = 2 + ((nodes + 1).bit_length() + 1) // 2
        self._queue.clear()

    def put(self, item: Item) -> None:
        """Tell `item` to the neighbours in the next rounds."""
        self._queue[item] = self._rounds

    def take(self) -> tuple[Item, ...]:
        """The items of this round's heartbeats."""
        if not self._queue:
            return ()
        chosen = sorted(self._queue, key=lambda item: -self._queue[item])[: self._most]
        for item in chosen:
            self._queue[item] -= 1
            if not self._queue[item]:
                del self._queue[item]
        return tuple(chosen)
