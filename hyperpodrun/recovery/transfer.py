"""Shards from one worker's memory into another's, over plain TCP, in place.

Theory. While a world recovers, each worker that has something listens (`Server`); whoever needs a range of a shard asks for it on a
connection of its own (`Peer.fetch`) and receives straight into the memory where it belongs: neither side copies the row, no tensor is
pickled, TCP is the flow control. After each CHUNK_BYTES a checksum follows that the sender takes from its memory and the receiver from
its own.

    client                                server
      | token, Want ------------------------> |
      | <----------- Have(layout) or Refused  |
      | <----------- chunk, checksum, chunk … |

Invariants: only who knows the job's token for this recovery is answered; a range is complete and correct when `fetch` returns, else it
raises TransferError; closing the server ends its connections.
Source: socket(7), sendmsg(2), recvmsg(2); xxHash (XXH3, 64 bit).
"""

import socket
import struct
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch
import xxhash

from hyperpodrun.recovery.shard import Layout, Shard, view

CHUNK_BYTES = 1 << 20
"""Small enough to be in the processor's cache still when its checksum is taken."""
TOKEN_BYTES = 16
MAX_MESSAGE_BYTES = 1 << 28
CONNECT_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60.0
"""A peer that says nothing for so long is given up; one that dies is noticed at once (reset)."""
_VIEWS_AT_ONCE = 512


class TransferError(RuntimeError):
    """A peer could not give what it is said to have. `refused`: it has not got it; else it, or the way to it, is broken."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` to `stop` of a shard after `step`; none: its layout only."""

    shard: str
    step: int
    kind: str
    start: int = 0
    stop: int = 0


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """It comes; `layout` only where no bytes were asked for."""

    layout: Layout | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """It does not come."""

    reason: str


_Reply = Have | Refused
Find = Callable[[str, int, str], Shard | None]


class Server:
    """`find(shard, step, kind)` gives what is held here. Listens at `port` and serves from threads of its own until `close`."""

    def __init__(self, token: bytes, find: Find, host: str = "", port: int = 0) -> None:
        self._token = token
        self._find = find
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._listener = _listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="hyperpodrun-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; what is under way is cut off."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected (any more)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="hyperpodrun-transfer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _tune(connection)
            if bytes(_receive(connection, TOKEN_BYTES)) == self._token:
                while True:
                    self._answer(connection, msgspec.msgpack.decode(_message(connection), type=Want))
        except (OSError, EOFError, msgspec.DecodeError):
            pass  # the other side notices by itself, and asks somebody else
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, want: Want) -> None:
        shard = self._find(want.shard, want.step, want.kind)
        if shard is None:
            _send(connection, msgspec.msgpack.encode(Refused(f"no {want.kind} version of {want.shard!r} after step {want.step}")))
        elif want.stop <= want.start:
            _send(connection, msgspec.msgpack.encode(Have(shard.layout)))
        elif want.start < 0 or want.stop > shard.nbytes:
            _send(connection, msgspec.msgpack.encode(Refused(f"{want.shard!r} is {shard.nbytes} bytes long")))
        else:
            _send(connection, msgspec.msgpack.encode(Have()))
            for start in range(want.start, want.stop, CHUNK_BYTES):
                pieces = shard.range(start, min(start + CHUNK_BYTES, want.stop))
                views = [view(piece if piece.device.type == "cpu" else piece.cpu()) for piece in pieces]
                _send_views(connection, [*views, memoryview(_checksum(views))])


class Peer:
    """A connection to another worker's server. Raises TransferError throughout; to be closed."""

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._address = address
        try:
            self._connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
            self._connection.settimeout(STALL_TIMEOUT_S)
            _tune(self._connection)
            self._connection.sendall(token)
        except OSError as error:
            raise self._failed(error) from error

    def layout(self, shard: str, step: int, kind: str) -> Layout:
        """What the shard there looks like."""
        have = self._ask(Want(shard, step, kind))
        if have.layout is None:
            raise TransferError(f"{self._name()} gave no layout of {shard!r}")
        return have.layout

    def fetch(self, shard: str, step: int, kind: str, start: int, stop: int, into: Sequence[torch.Tensor]) -> None:
        """Fill these flat uint8 tensors of the CPU, `stop - start` bytes in all."""
        if sum(piece.numel() for piece in into) != stop - start:
            raise ValueError("the place is not as long as the range")
        self._ask(Want(shard, step, kind, start, stop))
        try:
            for views in _chunks([view(piece) for piece in into]):
                expected = bytearray(8)
                _receive_views(self._connection, [*views, memoryview(expected)])
                if _checksum(views) != expected:
                    raise TransferError(f"{shard!r} from {self._name()} arrived damaged (checksum)")
        except (OSError, EOFError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """No more of it."""
        self._connection.close()

    def _ask(self, want: Want) -> Have:
        try:
            _send(self._connection, msgspec.msgpack.encode(want))
            reply: _Reply = msgspec.msgpack.decode(_message(self._connection), type=_Reply)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise self._failed(error) from error
        if isinstance(reply, Refused):
            raise TransferError(f"{self._name()}: {reply.reason}", refused=True)
        return reply

    def _failed(self, error: Exception) -> TransferError:
        return TransferError(f"{self._name()}: {error or type(error).__name__}")

    def _name(self) -> str:
        return f"the worker at {self._address[0]}:{self._address[1]}"


def _listen(host: str, port: int) -> socket.socket:
    if host or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _checksum(views: Sequence[memoryview]) -> bytes:
    state = xxhash.xxh3_64()
    for piece in views:
        state.update(piece)
    return state.digest()


def _chunks(views: Sequence[memoryview]) -> list[list[memoryview]]:
    """The views cut into stretches of CHUNK_BYTES, as the sender cuts them."""
    chunks: list[list[memoryview]] = [[]]
    room = CHUNK_BYTES
    for piece in views:
        while len(piece):
            if not room:
                chunks.append([])
                room = CHUNK_BYTES
            chunks[-1].append(piece[:room])
            room, piece = room - len(piece[:room]), piece[room:]
    return chunks


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("<I", len(message)) + message)


def _message(connection: socket.socket) -> bytearray:
    (size,) = struct.unpack("<I", _receive(connection, 4))
    if size > MAX_MESSAGE_BYTES:
        raise EOFError("a message longer than any")
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytearray:
    text = bytearray(size)
    _receive_views(connection, [memoryview(text)])
    return text


def _send_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    left = [piece for piece in views if len(piece)]
    while left:
        _advance(left, connection.sendmsg(left[:_VIEWS_AT_ONCE]))


def _receive_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    left = [piece for piece in views if len(piece)]
    while left:
        count = connection.recvmsg_into(left[:_VIEWS_AT_ONCE])[0]
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
