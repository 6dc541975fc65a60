"""From the bytes of many streams to lines on one console: pure, no I/O, no clock.

Theory. A stream's bytes reach the console in *pieces*. `Held` keeps what follows a stream's last newline until it is complete,
old (the driver's clock decides) or large. `Screen` renders pieces: it puts the stream's prefix before each line and knows whose
line is open at the end of the console. `LastLines` and `Matching` look at the same bytes for the failure report and the
duplicate filters.

States of a screen: *at a line's start* (no speaker) or *inside the open line of one voice*.
Invariants:
- what a voice wrote appears in its order and whole; only prefixes and newlines are added. A newline is added where another
  voice speaks while a line is open, and where a stream ends in mid-line. If the next byte of the broken line is a newline, the
  added one stands for it (except for an `exact` voice, of which every byte is shown);
- a line goes on without a second prefix as long as nobody else spoke;
- memory is bounded, however long a line is.
"""

from collections.abc import Iterable

import msgspec

HELD_BYTES = 64 * 1024
"""A line longer than this is shown in pieces as it comes."""
LAST_LINES = 400
LAST_BYTES = 32 * 1024


def to_bytes(text: str) -> bytes:
    """UTF-8, with the bytes of names that are no UTF-8 as they were; never raises."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


class Voice:
    """Who speaks on a screen: one stream (or several that share a line, when `exact`).

    `vital`: never dropped from a backlog (the launcher's own words). `exact`: no byte is ever left out. `redraws`: it is shown
    on a terminal, where a carriage return lets the rest of the line overwrite the prefix: it gets it once more.
    A voice belongs to one screen.
    """

    __slots__ = ("broken", "exact", "prefix", "redraws", "returned", "vital")

    def __init__(self, prefix: bytes = b"", *, vital: bool = False, exact: bool = False, redraws: bool = False) -> None:
        self.prefix = prefix
        self.vital = vital
        self.exact = exact
        self.redraws = redraws and bool(prefix)
        self.returned = False  # the last byte it wrote was a carriage return
        self.broken = False  # its open line was ended by an added newline


class Screen:
    """The end of what a console shows. `render` must be called in the order of writing."""

    __slots__ = ("_speaker",)

    def __init__(self) -> None:
        self._speaker: Voice | None = None

    def render(self, voice: Voice, data: bytes) -> bytes:
        """The bytes to write so that `data` of `voice` appears next."""
        prefix = voice.prefix
        head = b""
        if voice is not self._speaker:
            if voice.broken:
                voice.broken = False
                if not voice.exact and data.startswith(b"\n"):
                    data = data[1:]
            if not data:
                return b""
            head = prefix
            if self._speaker is not None:
                self._speaker.broken = True
                head = b"\n" + prefix
        elif not data:
            return b""
        elif voice.returned and data[0] not in b"\r\n":
            head = prefix
        if voice.redraws:
            voice.returned = data.endswith(b"\r")
            if b"\r" in data:
                data = _redrawn(data, prefix)
        whole = data.endswith(b"\n")
        self._speaker = None if whole else voice
        if prefix:
            data = data.replace(b"\n", b"\n" + prefix)
            if whole:
                data = data[: -len(prefix)]
        return head + data if head else data

    def end(self, voice: Voice) -> bytes:
        """The bytes to write now that `voice` falls silent for good: a newline when its line is open."""
        voice.broken = False
        if voice is not self._speaker or voice.exact:
            return b""
        self._speaker = None
        return b"\n"

    def lose(self, voice: Voice) -> None:
        """Some bytes of `voice` will never be rendered: what it says next starts a line of its own."""
        voice.broken = False
        if voice is self._speaker:
            self._speaker = Voice()


def _redrawn(data: bytes, prefix: bytes) -> bytes:
    import re  # only where there are progress bars

    return re.sub(rb"\r(?=[^\r\n])", lambda _: b"\r" + prefix, data)


class Held:
    """The part of a stream after its last newline, not shown yet; at most `HELD_BYTES` between calls."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns those to be shown now (whole lines, or a piece of a very long one)."""
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._bytes += data
            return self.take() if len(self._bytes) > HELD_BYTES else b""
        ready = data[:cut]
        if self._bytes:
            ready = self.take() + ready
        self._bytes += data[cut:]
        return ready + self.take() if len(self._bytes) > HELD_BYTES else ready

    def take(self) -> bytes:
        """All that is held."""
        held = bytes(self._bytes)
        self._bytes.clear()
        return held


class Tail(msgspec.Struct, frozen=True):
    """The last lines of one rank's two streams, oldest first, without newlines; at most `LAST_LINES` each."""

    stdout: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()


class LastLines:
    """A stream's last `LAST_LINES` lines within its last `LAST_BYTES` bytes."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        kept_bytes = LAST_BYTES + 1  # one more than is shown, so that a cut first line is known as such
        self._bytes += data[-kept_bytes:]
        if len(self._bytes) > 2 * kept_bytes:
            del self._bytes[:-kept_bytes]

    def lines(self) -> tuple[str, ...]:
        """Decoded with errors="replace". Of a line redrawn with carriage returns, its last state; of a cut one, its end."""
        data = self._bytes
        cut = len(data) > LAST_BYTES
        lines = data[-LAST_BYTES:].decode(errors="replace").split("\n")
        if lines[-1] == "":
            lines.pop()
        if cut and len(lines) > 1:
            del lines[0]
        return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines[-LAST_LINES:])


class Matching:
    """Picks the whole lines that contain any of some texts, each behind a prefix.

    A line longer than `HELD_BYTES` is judged by what was there when it outgrew that: then it is copied or skipped to its end.
    """

    __slots__ = ("_found", "_held", "_prefix", "_rest")

    def __init__(self, texts: Iterable[str], prefix: bytes) -> None:
        import re  # not on the way to the first line of a job without filters

        self._found = re.compile(b"|".join(re.escape(to_bytes(text)) for text in texts))
        self._prefix = prefix
        self._held = bytearray()
        self._rest: bool | None = None  # inside an overlong line: whether it is copied

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns the matching lines that are complete."""
        out: list[bytes] = []
        if self._rest is not None:
            cut = data.find(b"\n") + 1
            if self._rest:
                out.append(data[:cut] if cut else data)
            if not cut:
                return b"".join(out)
            data = data[cut:]
            self._rest = None
        cut = data.rfind(b"\n") + 1
        if cut:
            self._pick(self._take() + data[:cut], out)
        self._held += data[cut:]
        if len(self._held) > HELD_BYTES:
            start = self._take()
            self._rest = self._found.search(start) is not None
            if self._rest:
                out.append(self._prefix + start)
        return b"".join(out)

    def end(self) -> bytes:
        """What is left of a last line without a newline; one is added."""
        out: list[bytes] = []
        if self._rest:
            out.append(b"\n")
        elif self._held:
            self._pick(self._take() + b"\n", out)
        self._rest = None
        return b"".join(out)

    def _take(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held

    def _pick(self, lines: bytes, out: list[bytes]) -> None:
        at = 0
        while at < len(lines) and (match := self._found.search(lines, at)):
            start = lines.rfind(b"\n", at, match.start()) + 1 or at
            at = lines.find(b"\n", max(match.start(), match.end() - 1)) + 1 or len(lines)
            out.append(self._prefix + lines[start:at])
