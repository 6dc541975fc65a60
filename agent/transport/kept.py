"""First words to a peer whose connection is still being made: few, young, and then forgotten. Pure.

So that a first message needs no second try. Old ones are worth nothing: whoever waits for an answer has asked again.
Invariants: at most `KEPT` messages and `KEPT_BYTES`; none older than `KEPT_S` is handed out; each is handed out or counted once.
"""

from collections import deque

KEPT = 128
KEPT_BYTES = 1 << 20
KEPT_S = 2.0


class Kept:
    """`counters["dropped"]` counts what is forgotten."""

    def __init__(self, counters: dict[str, int]) -> None:
        self._counters = counters
        self._messages: deque[tuple[float, bytes]] = deque()
        self._size_bytes = 0

    def keep(self, now_s: float, payload: bytes) -> bool:
        """Keep it, at the cost of older ones; False when it is too large."""
        if len(payload) > KEPT_BYTES:
            self._counters["dropped"] += 1
            return False
        self._messages.append((now_s, payload))
        self._size_bytes += len(payload)
        while len(self._messages) > KEPT or self._size_bytes > KEPT_BYTES or self._messages[0][0] < now_s - KEPT_S:
            self._size_bytes -= len(self._messages.popleft()[1])
            self._counters["dropped"] += 1
        return True

    def take(self, now_s: float) -> list[bytes]:
        """All that is still fresh, oldest first; nothing is left."""
        fresh = [payload for when_s, payload in self._messages if when_s >= now_s - KEPT_S]
        self._counters["dropped"] += len(self._messages) - len(fresh)
        self._messages.clear()
        self._size_bytes = 0
        return fresh

    def forget(self) -> None:
        """Drop everything."""
        self._counters["dropped"] += len(self._messages)
        self._messages.clear()
        self._size_bytes = 0
