"""torch's TCPStore protocol as its client speaks it: words for the tests of door 1."""

import contextlib
import struct


def text(raw):
    return struct.pack("<Q", len(raw)) + raw


def number(value):
    return struct.pack("<q", value)


def read(client, size):
    got = b""
    while len(got) < size:
        piece = client.recv(size - len(got))
        if not piece:
            return got
        got += piece
    return got


def closed(client):
    """The server ended this connection."""
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True


def alive(served):
    """A well-behaved client is still served."""
    with served.connect() as client:
        client.sendall(b"\4" + text(b"/alive") + number(0) + b"\x0d" + struct.pack("<I", 9))
        assert read(client, 12) == number(0) + struct.pack("<I", 9)
    return True


EXCHANGES = [
    (b"\1" + text(b"k") + text(b"v") + b"\3" + text(b"k"), text(b"v")),
    (b"\2" + text(b"c") + text(b"") + text(b"x"), text(b"x")),
    (b"\2" + text(b"c") + text(b"y") + text(b"z"), text(b"x")),
    (b"\4" + text(b"n") + number(-3), number(-3)),
    (b"\5" + number(2) + text(b"k") + text(b"missing"), b"\1"),
    (b"\5" + number(0), b"\0"),
    (b"\6" + number(2) + text(b"k") + text(b"n"), b"\0"),
    (b"\6" + number(0), b"\0"),
    (b"\7", number(3)),
    (b"\6" + number(2) + text(b"k") + text(b"missing") + b"\x0c", b"\1"),
    (b"\x0c", b"\1"),
    (b"\x09" + text(b"k") + text(b"w") + b"\x0a" + number(2) + text(b"n") + text(b"k"), text(b"-3") + text(b"vw")),
    (b"\x0a" + number(0) + b"\x0d\1\2\3\4", b"\1\2\3\4"),
    (b"\x0b" + number(2) + text(b"a") + text(b"1") + text(b"b") + text(b"2") + b"\3" + text(b"b"), text(b"2")),
    (b"\x0e" + text(b"q") + text(b"i") + b"\x10" + text(b"q"), number(1)),
    (b"\x0f" + text(b"q"), number(1) + text(b"i")),
    (b"\x0f" + text(b"q"), number(0)),
    (b"\x08" + text(b"a"), number(1)),
    (b"\x08" + text(b"a"), number(0)),
    (b"\x12" + text(b"bar") + number(1), b"\0"),
    (b"\x12" + text(b"bar2") + number(2) + b"\x0c", b"\1"),
    (b"\x12" + text(b"bar2") + number(2), b"\0"),
]
