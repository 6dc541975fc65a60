"""Items between two agents in one generation, in order, once, whatever messages the network loses (MESH S3).

The transport loses messages when a connection breaks or a peer falls behind. Here every item has a number; what is not
acknowledged is sent again after `RESEND_NS`, from the first one on, and a receiver takes only the number it expects. So an
operation that was sent twice is done once, and its answer, an item of the other direction, is itself repeated until it came.

States of an item: *fresh* (not framed yet), *out* (framed, not acknowledged), gone.
Source: go-back-N, as in any textbook on transport protocols.
"""

from collections import deque

from hyperpodrun.agent.wire.store import Answer, Call, Frame, Item

RESEND_NS = 300_000_000
RESEND_MOST_NS = 2_000_000_000
ACK_NS = 40_000_000
FRAME_ITEMS = 512
FRAME_BYTES = 1 << 20


class Reborn(Exception):
    """The peer's agent is not the one that this stream began with: what it held is lost."""


class Stream:
    """One direction out, one in. `life` is this agent's."""

    def __init__(self, generation: int, life: int) -> None:
        self._generation = generation
        self._life = life
        self._peer_life: int | None = None
        self._out: deque[Item] = deque()
        self._fresh: deque[Item] = deque()
        self._first = 0
        """The number of the first item of `_out`, which are followed by `_fresh`."""
        self._expects = 0
        self._owes_ack_at_ns: int | None = None
        self._resend_at_ns: int | None = None
        self._resend_ns = RESEND_NS

    def put(self, item: Item) -> None:
        """Queue an item; `frames` takes it along."""
        self._fresh.append(item)

    def frames(self, now_ns: int) -> list[Frame]:
        """What is to be sent now: everything fresh, and an acknowledgement that is due."""
        made = []
        while self._fresh:
            items: list[Item] = []
            size_bytes = 0
            while self._fresh and len(items) < FRAME_ITEMS and size_bytes < FRAME_BYTES:
                item = self._fresh.popleft()
                size_bytes += _weight(item)
                items.append(item)
            made.append(Frame(self._generation, self._life, self._first + len(self._out), self._expects, items))
            self._out.extend(items)
        if not made and self._owes_ack_at_ns is not None and now_ns >= self._owes_ack_at_ns:
            made.append(Frame(self._generation, self._life, self._first + len(self._out), self._expects, []))
        if made:
            self._owes_ack_at_ns = None
            if self._out and self._resend_at_ns is None:
                self._resend_at_ns = now_ns + self._resend_ns
        return made

    def receive(self, frame: Frame, now_ns: int) -> list[Item]:
        """The items that are new, in order. Raises Reborn."""
        if self._peer_life is None:
            self._peer_life = frame.life
        elif frame.life != self._peer_life:
            raise Reborn
        if self._first < frame.expects <= self._first + len(self._out) + len(self._fresh):
            while self._first < frame.expects:
                # What is fresh may have been out before, and have arrived after all.
                (self._out or self._fresh).popleft()
                self._first += 1
            self._resend_ns = RESEND_NS
            self._resend_at_ns = now_ns + self._resend_ns if self._out else None
        if not frame.items:
            return []
        if self._owes_ack_at_ns is None:
            self._owes_ack_at_ns = now_ns + ACK_NS
        known = self._expects - frame.first
        if known < 0 or known >= len(frame.items):
            # A gap, or nothing new: the acknowledgement tells where to go on.
            self._owes_ack_at_ns = now_ns
            return []
        self._expects = frame.first + len(frame.items)
        return frame.items[known:]

    def tick(self, now_ns: int) -> None:
        """Send again what was not acknowledged in time; `frames` follows."""
        if self._resend_at_ns is not None and now_ns >= self._resend_at_ns:
            self._fresh.extendleft(reversed(self._out))
            self._out.clear()
            self._resend_ns = min(2 * self._resend_ns, RESEND_MOST_NS)
            self._resend_at_ns = None

    def next_deadline_ns(self) -> int | None:
        """When `tick` and `frames` have something to do, if nothing else happens."""
        times = [at for at in (self._owes_ack_at_ns, self._resend_at_ns) if at is not None]
        return min(times) if times else None


def _weight(item: Item) -> int:
    """About how long it is, in bytes."""
    if isinstance(item, Call):
        operation = item.operation
        return 64 + sum(len(part) for part in (getattr(operation, "value", b""), getattr(operation, "desired", b"")))
    if isinstance(item, Answer):
        value = getattr(item.answer, "value", None)
        return 64 + len(value) if isinstance(value, bytes) else 64
    return 64
