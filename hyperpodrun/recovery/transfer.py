"""Shards from one worker's memory into another's, in place: over plain TCP, or by the kernel on the same node.

Theory. While a world recovers, each worker that has something listens (`Server`); whoever needs a range of a shard asks for it on a
connection of its own (`Peer.fetch`) and receives straight into the memory where it belongs: neither side copies the row, no tensor is
pickled, TCP is the flow control. After each CHUNK_BYTES a checksum follows that the sender takes from its memory and the receiver from
its own. A client that can read the server's memory itself (near.py) is told where the range lies and copies it, as memory is copied
anywhere, without checksums; what it must not take is memory that is not the shard's any more. So the server's token stands in its
memory for exactly as long as it serves, and the client looks there again after its last byte. An order to leave can break into any of
this: a server is made without effects, and `close` takes the token away first, and can be called again where it was broken off.

    client                                server
      | token, Want ------------------------> |
      | <----------- Have(layout) or Refused  |
      | <----------- chunk, checksum, chunk … |

      | Whose ------------------------------> |   once, by a client of the same node
      | <------------------ Process, or none  |
      | Want(near) -------------------------> |
      | <----------------------Have(regions)  |

Invariants: only who knows the job's token for this recovery is answered; a range is complete and correct when `fetch` returns, else it
raises TransferError; closing the server ends its connections; no shard changes and no memory of one is freed before it is closed.
Source: socket(7), sendmsg(2), recvmsg(2).
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec
import torch

from hyperpodrun.recovery import checksum, near
from hyperpodrun.recovery.shard import Layout, Shard, view

CHUNK_BYTES = 4 << 20
"""Small enough to be in the processor's cache still when its checksum is taken, and large enough that Python's part does not count."""
TOKEN_BYTES = 16
MAX_MESSAGE_BYTES = 1 << 28
GREETING_S = 10
"""Who connects has said the token by then, or is a stranger: a server may be there for as long as the job."""
RETRY_S = 0.1
_VIEWS_AT_ONCE = 512


class TransferError(RuntimeError):
    """A peer could not give what it is said to have. `refused`: it has not got it; else it, or the way to it, is broken."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Bytes `start` to `stop` of a shard after `step`; none: its layout only. `near`: the client reads them itself.

    `since`: the last restart before it was made (plan.Holding); of another timeline there may be a version of that step, too.
    """

    shard: str
    step: int
    kind: str
    since: int
    start: int = 0
    stop: int = 0
    near: bool = False


class Whose(msgspec.Struct, frozen=True, array_like=True, tag="whose"):
    """Which process is it?"""


class Process(msgspec.Struct, frozen=True, array_like=True, tag="process"):
    """This one, and the token lies there in its memory."""

    pid: int
    token_at: int


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """It comes; `layout` only where no bytes were asked for, `regions` only where they are read by the client.

    `digest`: of the whole row as it was written, with the layout, where it is known.
    """

    layout: Layout | None = None
    regions: tuple[near.Region, ...] | None = None
    digest: bytes = b""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """It does not come."""

    reason: str


Request = Want | Whose
Reply = Have | Process | Refused
Find = Callable[[str, int, str, int], Shard | None]
"""Shard, step, kind, since."""


class Server:
    """`find` gives what is held here. From `open` on it listens at `port` and serves from threads of its own, until `close`.

    `readable`: workers of this node may read this process's memory meanwhile.
    """

    def __init__(self, token: bytes, find: Find, host: str = "", readable: bool = False) -> None:
        self._token = token
        self._secret = ctypes.create_string_buffer(TOKEN_BYTES) if readable else None
        self._find = find
        self._host = host
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._named: dict[int, Shard] = {}  # what clients may be reading: it has to stay where it is
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    def open(self) -> None:
        """Begin; `close` belongs to it even where this is broken off."""
        self._listener = _listen(self._host)
        self.port = int(self._listener.getsockname()[1])
        if self._secret is not None:
            near.allow(True)
            self._secret.raw = self._token
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), name="hyperpodrun-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; what is under way is cut off. A second call ends what is left of one that was broken off."""
        if self._secret is not None:
            self._secret.raw = bytes(TOKEN_BYTES)  # first: who reads memory meanwhile does not believe it
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            if connection is not None:
                with suppress(OSError):  # not connected (any more)
                    connection.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        if self._secret is not None:
            near.allow(False)
        self._named.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed.wait(RETRY_S):
                    return
                continue  # no descriptor is free just now, or a client that was gone again
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                self._connections.add(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), name="hyperpodrun-transfer", daemon=True).start()
            except RuntimeError:  # no more threads
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            limit(connection, socket.SO_RCVTIMEO, GREETING_S)
            if bytes(receive(connection, TOKEN_BYTES)) == self._token:
                limit(connection, socket.SO_RCVTIMEO, 0)
                while True:
                    request: Request = msgspec.msgpack.decode(message(connection), type=Request)
                    if isinstance(request, Want):
                        self._answer(connection, request)
                    else:
                        send(connection, msgspec.msgpack.encode(self._process()))
        except (OSError, EOFError, msgspec.DecodeError):
            pass  # the other side notices by itself, and asks somebody else
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, want: Want) -> None:
        shard = self._find(want.shard, want.step, want.kind, want.since)
        if shard is None:
            send(connection, msgspec.msgpack.encode(Refused(f"no {want.kind} version of {want.shard!r} after step {want.step}")))
        elif want.stop <= want.start:
            send(connection, msgspec.msgpack.encode(Have(shard.layout, digest=shard.digest)))
        elif want.start < 0 or want.stop > shard.nbytes:
            send(connection, msgspec.msgpack.encode(Refused(f"{want.shard!r} is {shard.nbytes} bytes long")))
        else:
            pieces = shard.range(want.start, want.stop)
            is_near = want.near and self._secret is not None and all(piece.device.type == "cpu" for piece in pieces)
            if is_near:
                self._named[id(shard)] = shard
            send(connection, msgspec.msgpack.encode(Have(regions=tuple(near.regions(pieces)) if is_near else None)))
            for chunk in () if is_near else chunks(pieces):
                views = [view(piece if piece.device.type == "cpu" else piece.cpu()) for piece in chunk]
                send_views(connection, [*views, memoryview(checksum.of_memory(views))])

    def _process(self) -> Process | Refused:
        if self._secret is None:
            return Refused("its memory is not read by others")
        return Process(os.getpid(), ctypes.addressof(self._secret))


def _listen(host: str) -> socket.socket:
    if host or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=128)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)


def limit(connection: socket.socket, which: int, seconds: int) -> None:
    """How long one call may wait (0: for ever). By the kernel's clock: Python's would poll before each call and end it early."""
    connection.setsockopt(socket.SOL_SOCKET, which, struct.pack("@ll", seconds, 0))


def new_token() -> bytes:
    """What nobody can guess."""
    return os.urandom(TOKEN_BYTES)


def tune(connection: socket.socket) -> None:
    """Small messages do not wait for larger ones."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def chunks(pieces: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat tensors in stretches of CHUNK_BYTES, the same on both sides."""
    chunk: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for piece in pieces:
        at = 0
        while at < piece.numel():
            taken = piece[at : at + room]
            chunk.append(taken)
            at, room = at + taken.numel(), room - taken.numel()
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def send(connection: socket.socket, message: bytes) -> None:
    """A message, with its length before it."""
    connection.sendall(struct.pack("<I", len(message)) + message)


def message(connection: socket.socket) -> bytearray:
    """The next one. Raises EOFError, OSError."""
    (size,) = struct.unpack("<I", receive(connection, 4))
    if size > MAX_MESSAGE_BYTES:
        raise EOFError("a message longer than any")
    return receive(connection, size)


def receive(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. Raises EOFError, OSError."""
    text = bytearray(size)
    receive_views(connection, [memoryview(text)])
    return text


def send_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """All of these, in order."""
    left = [piece for piece in views if len(piece)]
    while left:
        _advance(left, connection.sendmsg(left[:_VIEWS_AT_ONCE]))


def receive_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all of these, in order. Raises EOFError, OSError."""
    left = [piece for piece in views if len(piece)]
    while left:
        count = connection.recvmsg_into(left[:_VIEWS_AT_ONCE], 0, socket.MSG_WAITALL)[0]
        if not count:
            raise EOFError("it closed the connection")
        _advance(left, count)


def _advance(left: list[memoryview], count: int) -> None:
    whole = 0
    while whole < len(left) and count >= len(left[whole]):
        count -= len(left[whole])
        whole += 1
    del left[:whole]
    if count:
        left[0] = left[0][count:]
