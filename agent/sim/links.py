"""The network between simulated hosts: latency, loss, and directions that lose everything.

Theory: each message draws its own latency, so messages of one link may overtake each other. Everything random comes from one
generator, drawn from in the order in which messages are sent.

Invariants: a direction is open again when everything that cut it was mended.
"""

import random


class Links:
    """`base_ns`: a message takes once to twice as long. `delay_ns`: up to so much longer."""

    def __init__(self, seed: int, base_ns: int) -> None:
        self._bits = random.Random(f"net {seed}").getrandbits
        self._base_ns = base_ns
        self._width = base_ns.bit_length()
        self._cuts: dict[tuple[str, str], int] = {}
        self._loss = 0
        self.delay_ns = 0
        self.lossy = False
        """Anything may be lost at all now."""

    def latency(self) -> int:
        """How long the next message takes."""
        base, width, bits = self._base_ns, self._width, self._bits
        more = bits(width)  # `random.randrange`, spelled out: half of a message's way through the network
        while more >= base:
            more = bits(width)
        return base + more + self._below(self.delay_ns) if self.delay_ns else base + more

    def loses(self, sender: str, to: str) -> bool:
        """Whether the next message of this direction is lost."""
        if (sender, to) in self._cuts:
            return True
        return bool(self._loss) and self._below(100) < self._loss

    def set_loss(self, percent: int) -> None:
        """From now on."""
        self._loss = percent
        self.lossy = bool(self._cuts) or bool(percent)

    def is_cut(self, sender: str, to: str) -> bool:
        """Whether this direction loses everything now."""
        return (sender, to) in self._cuts

    def cut(self, pairs: list[tuple[str, str]]) -> None:
        """These directions lose everything until they are mended."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self.set_loss(self._loss)

    def mend(self, pairs: list[tuple[str, str]]) -> None:
        """One cut of each is over."""
        for pair in pairs:
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                del self._cuts[pair]
        self.set_loss(self._loss)

    def _below(self, limit: int) -> int:
        width = limit.bit_length()
        value = self._bits(width)
        while value >= limit:
            value = self._bits(width)
        return value
