"""Kinds of option values: how a text becomes a checked value.

A `Kind` turns the text of a flag or of a variable into a value or raises `BadValueError` with the reason. Kinds do no I/O; those
that look at files or at the scheduler's variables are in `places.py`. `allowed` completes the sentence "allowed: ...".
"""

import math
from collections.abc import Callable, Mapping

import msgspec

from hyperpodrun.agent.config import Streams
from hyperpodrun.cli.refusal import quoted

LARGEST_COUNT = 1 << 20


class BadValueError(Exception):
    """The text is no value of this kind; its own text is the reason, or empty when `allowed` says it all."""


class Kind(msgspec.Struct, frozen=True):
    """`metavar` stands for the value in help; `allowed` says which texts are values; `parse` makes the value or raises."""

    metavar: str
    allowed: str
    parse: Callable[[str], object]
    may_look_like_an_option: bool = False
    """Else `--log-dir --standalone` is a forgotten value, not a folder of that name."""


class Nodes(msgspec.Struct, frozen=True):
    """A range of node counts, both ends included."""

    minimum: int
    maximum: int


class StreamChoice(msgspec.Struct, frozen=True):
    """-r and -t: the same streams for every local rank, or streams for some local ranks and none for the others."""

    everywhere: Streams
    by_local_rank: dict[int, Streams] | None = None

    def of(self, local_rank: int) -> Streams:
        """The streams chosen for one local rank."""
        if self.by_local_rank is None:
            return self.everywhere
        return self.by_local_rank.get(local_rank, Streams())


STREAMS = {
    "0": Streams(),
    "1": Streams(stdout=True),
    "2": Streams(stderr=True),
    "3": Streams(stdout=True, stderr=True),
}
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})


def integer(text: str) -> int:
    """A decimal integer, ASCII digits only ("1_000" and Arabic digits are typing errors here)."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        raise BadValueError("")
    return int(text)


def boolean(text: str) -> bool:
    """1/true/yes/on or 0/false/no/off, in any case."""
    word = text.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise BadValueError("")


def whole(minimum: int, maximum: int = LARGEST_COUNT, allowed: str = "") -> Kind:
    """A whole number within the two bounds."""

    def parse(text: str) -> int:
        number = integer(text)
        if not minimum <= number <= maximum:
            raise BadValueError("")
        return number

    if not allowed:
        allowed = f"a whole number from {minimum}" + (f" to {maximum}" if maximum != LARGEST_COUNT else "")
    return Kind("N", allowed, parse)


def _seconds(text: str, zero: bool = False) -> float:
    try:
        number = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        raise BadValueError("") from None
    if not math.isfinite(number) or number < 0 or number > 1e9 or (number == 0 and not zero):
        raise BadValueError("")
    return number


def seconds(zero: str = "") -> Kind:
    """A finite number of seconds; 0 only where `zero` says what it means."""
    return Kind("S", f"seconds, more than 0{f' (or 0: {zero})' if zero else ''}", lambda text: _seconds(text, bool(zero)))


def choice(values: Mapping[str, object]) -> Kind:
    """One of a few words; each stands for a value."""

    def parse(text: str) -> object:
        if text not in values:
            raise BadValueError("")
        return values[text]

    names = list(values)
    listed = " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    return Kind("|".join(names), listed, parse)


def words(*names: str) -> Kind:
    """One of a few words that stand for themselves."""
    return choice({name: name for name in names})


def listed(metavar: str, allowed: str, item: Callable[[str], object]) -> Kind:
    """A comma-separated list; the value is a tuple of its items, each once."""

    def parse(text: str) -> tuple[object, ...]:
        return tuple(dict.fromkeys(item(part.strip()) for part in text.split(",")))

    return Kind(metavar, allowed, parse)


def _text(text: str) -> str:
    if not text:
        raise BadValueError("it is empty")
    if not text.isprintable():
        raise BadValueError("it holds characters that cannot be shown")
    return text


def _name(text: str) -> str:
    if len(_text(text).encode()) > 200:
        raise BadValueError("it is too long")
    return text


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise BadValueError("it is empty" if not text else "it holds a NUL character")
    return text


def _nodes(text: str) -> Nodes:
    low, colon, high = text.partition(":")
    minimum = integer(low)
    maximum = integer(high) if colon else minimum
    if minimum > maximum:
        raise BadValueError("MIN is larger than MAX")
    if minimum < 1 or maximum > LARGEST_COUNT:
        raise BadValueError("")
    return Nodes(minimum, maximum)


def _workers(text: str) -> int | str:
    if text in ("auto", "cpu", "gpu", "xpu"):
        return text
    number = integer(text)
    if not 1 <= number <= LARGEST_COUNT:
        raise BadValueError("")
    return number


def _streams(text: str) -> StreamChoice:
    text = text.removeprefix("=")  # `-r=3`, which torchrun takes
    if text in STREAMS:
        return StreamChoice(STREAMS[text])
    chosen: dict[int, Streams] = {}
    for part in text.split(","):
        rank_text, colon, stream = part.partition(":")
        if not colon or stream not in STREAMS:
            raise BadValueError("")
        rank = integer(rank_text)
        if rank < 0:
            raise BadValueError("")
        if rank in chosen:
            raise BadValueError(f"local rank {rank} is there twice")
        chosen[rank] = STREAMS[stream]
    return StreamChoice(Streams(), chosen)


def _local_ranks(text: str) -> frozenset[int]:
    ranks = [integer(part.strip()) for part in text.split(",")]
    if min(ranks) < 0:
        raise BadValueError("")
    return frozenset(ranks)


def _filters(text: str) -> tuple[str, ...]:
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        key, _, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not key or not value:
            raise BadValueError(f"{quoted(part)} is no KEY=VALUE")
        if key == "join_timeout":
            try:
                SECONDS.parse(value)
            except BadValueError:
                raise BadValueError(f"join_timeout takes {SECONDS.allowed}") from None
        pairs[key] = value
    return pairs


def _signal(text: str) -> int:
    import signal

    from hyperpodrun.agent import keeper

    name = text.upper()
    found = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
    if not isinstance(found, signal.Signals):
        raise BadValueError(f"{quoted(text)} is no signal of this system")
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise BadValueError(f"{found.name} cannot be handled by any program")
    if found not in keeper.FORWARDED:
        raise BadValueError(f"the launcher does not wait for {found.name}")
    return int(found)


def _module(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise BadValueError(f"{quoted(text)} is no module name")
    return text


def _arguments(text: str) -> tuple[str, ...]:
    import shlex

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadValueError(str(error).rstrip(".").lower()) from None


def _on_quorum_loss(text: str) -> float:
    """Seconds until silent nodes are taken for dead; "hold" waits without an end."""
    word, colon, wait = text.partition(":")
    if text == "hold":
        return math.inf
    if word != "continue" or not colon:
        raise BadValueError("")
    return _seconds(wait)


FLAG = Kind("", "1, true, yes or on, and 0, false, no or off", boolean)
TEXT = Kind("TEXT", "a text that is not empty", _text)
NAME = Kind("ID", "up to 200 bytes of printable text", _name)
PATH = Kind("PATH", "a path", _path)
NODES = Kind("N|MIN:MAX", "N or MIN:MAX, whole numbers from 1", _nodes)
WORKERS = Kind("N|auto|cpu|gpu", "a whole number from 1, auto, cpu or gpu", _workers)
STREAM_CHOICE = Kind(
    "0-3|RANK:0-3,...",
    "0 (none), 1 (stdout), 2 (stderr), 3 (both), or such a number for single local ranks as in 0:1,1:2",
    _streams,
)
LOCAL_RANKS = Kind("RANK,...", "local ranks separated by commas", _local_ranks)
FILTERS = Kind("TEXT,...", "texts separated by commas (,, stands for a comma)", _filters, True)
PAIRS = Kind("KEY=VALUE,...", "KEY=VALUE pairs separated by commas", _pairs)
SIGNALS = listed(
    "SIGNAL,...",
    "SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU and SIGPWR, separated by commas without blanks",
    _signal,
)
MODULES = listed("MODULE,...", "module names separated by commas", _module)
ARGUMENTS = Kind("'ARG ...'", "arguments as in a shell, quoted as one word", _arguments, True)
SECONDS = seconds()
ON_QUORUM_LOSS = Kind("hold|continue:S", "hold, or continue:S with seconds more than 0", _on_quorum_loss)
