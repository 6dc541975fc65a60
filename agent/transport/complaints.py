"""Sentences about things that can happen a million times: each is said at once, then at most once a minute, with a count."""

from collections.abc import Callable

EVERY_S = 60.0
MOST_TOPICS = 256


class Complaints:
    """Topics are told apart by their key. A full table forgets the oldest: memory stays bounded whoever sends the noise."""

    def __init__(self, say: Callable[[str], None], now_s: Callable[[], float]) -> None:
        self._say = say
        self._now_s = now_s
        self._topics: dict[str, tuple[float, int]] = {}

    def about(self, key: str, sentence: str) -> None:
        """Say it unless it was said within the last minute."""
        now_s = self._now_s()
        said_s, unsaid = self._topics.get(key, (-EVERY_S, 0))
        if now_s - said_s < EVERY_S:
            self._topics[key] = (said_s, unsaid + 1)
            return
        while len(self._topics) >= MOST_TOPICS and key not in self._topics:
            del self._topics[next(iter(self._topics))]
        self._topics[key] = (now_s, 0)
        self._say(f"{sentence} ({unsaid} more since)" if unsaid else sentence)

    def over(self, key: str) -> None:
        """The matter is settled: should it come back it is news."""
        self._topics.pop(key, None)
