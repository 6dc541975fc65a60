"""The outermost layer of every frame between agents (Z7). Pure.

    version (1 byte) | job label (16 bytes) | kind (1 byte) | body

These 18 bytes mean the same in every version, so that a foreign frame can be told for what it is. A connection is opened by
the side that wants to send. It says `Hello`, and the inbox answers on the same connection, once, `Welcome` or `Refused`; from
then on frames go one way only. The answer is why an agent knows *who* sits behind an address: a host's addresses are not
always its own (every host has the same docker0), and a contact point is an address with no name.

    kind  body              says
    H     Hello             who dials, whom it wants, where it can be reached
    W     Welcome           who answered
    R     Refused           why not
    M     bytes             a message of the mesh; only after H was welcomed
"""

import hashlib
from typing import Literal

import msgspec

from hyperpodrun.agent.transport.addresses import is_host

LABEL_BYTES = 16
HEADER_BYTES = 1 + LABEL_BYTES + 1
HELLO, WELCOME, REFUSED, MESSAGE = b"H", b"W", b"R", b"M"
LONGEST_INTRODUCTION_BYTES = 4096

Fault = Literal["malformed", "version", "job"]
Why = Literal["version", "job", "self", "wanted", "unfit"]


class Identity(msgspec.Struct, frozen=True, order=True):
    """An agent: its slot in the job, and which life of it (64 bits)."""

    node: str
    incarnation: int


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who dials. `session`: 8 random bytes a process; `want`: the node expected here ("": any); `greeting`: for the mesh."""

    node: str
    incarnation: int
    session: bytes
    want: str
    hosts: tuple[str, ...]
    port: int
    greeting: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Who answered."""

    node: str
    incarnation: int
    session: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """Why this connection is of no use; `detail` is a sentence for "unfit", the node that lives here for "wanted"."""

    why: Why
    detail: str = ""


def job_label(job_id: str) -> bytes:
    """What marks a job's frames: a hash of its id."""
    return hashlib.blake2b(job_id.encode("utf-8", "surrogateescape"), digest_size=LABEL_BYTES, person=b"hyperpodrun job").digest()


def header(version: int, label: bytes, kind: bytes) -> bytes:
    """The first bytes of a frame. Raises ValueError for a version or label that does not fit."""
    if len(label) != LABEL_BYTES:
        raise ValueError(f"a job label has {LABEL_BYTES} bytes, not {len(label)}")
    return bytes([version]) + label + kind


def fault_of(frame: bytes, version: int, label: bytes) -> Fault | None:
    """What is wrong with the header of a frame, None if nothing."""
    if len(frame) < HEADER_BYTES or frame[0] == 0:
        return "malformed"
    if frame[0] != version:
        # Only a frame that says hello may claim to be of another version: everything else of that sort is noise.
        return "version" if frame[HEADER_BYTES - 1 : HEADER_BYTES] in (HELLO, WELCOME, REFUSED) else "malformed"
    return None if frame[1 : 1 + LABEL_BYTES] == label else "job"


def kind_of(frame: bytes) -> bytes:
    """The kind byte of a frame that has a whole header."""
    return frame[HEADER_BYTES - 1 : HEADER_BYTES]


_hello = msgspec.msgpack.Decoder(Hello)
_welcome = msgspec.msgpack.Decoder(Welcome)
_refused = msgspec.msgpack.Decoder(Refused)
encode = msgspec.msgpack.encode


def decode_hello(frame: bytes) -> Hello | None:
    """The hello in a frame whose header is right; None if it is none, or says what cannot be."""
    if len(frame) > LONGEST_INTRODUCTION_BYTES:
        return None
    try:
        hello = _hello.decode(frame[HEADER_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    fits = 0 < len(hello.node) <= 255 and 0 <= hello.incarnation < 1 << 64 and len(hello.session) == 8
    fits = fits and 0 < hello.port < 65536 and len(hello.hosts) <= 32 and hello.node.isprintable()
    return hello if fits and all(is_host(host) for host in hello.hosts) else None


def decode_answer(frame: bytes) -> Welcome | Refused | None:
    """The answer to a hello in a frame with a whole header, None if it is none."""
    if len(frame) > LONGEST_INTRODUCTION_BYTES:
        return None
    try:
        match kind_of(frame):
            case b"W":
                return _welcome.decode(frame[HEADER_BYTES:])
            case b"R":
                return _refused.decode(frame[HEADER_BYTES:])
            case _:
                return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
