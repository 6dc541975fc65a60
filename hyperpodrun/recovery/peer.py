"""The asking side of a transfer (see transfer.py).

States: *far* (everything comes through the socket), *near* (the other's memory is read by the kernel).
Invariants: a range is complete and correct when `fetch` returns, else it raises TransferError.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch

from hyperpodrun.recovery import checksum, near
from hyperpodrun.recovery.shard import Layout, view
from hyperpodrun.recovery.transfer import (
    Have,
    Process,
    Refused,
    Reply,
    Request,
    TransferError,
    Want,
    Whose,
    chunks,
    limit,
    message,
    receive_views,
    send,
    tune,
)

CONNECT_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60
"""A peer that says nothing for so long is given up; one that dies is noticed at once (reset)."""

READ_BYTES = 32 << 20
"""Of the other's memory at once: a few milliseconds in which a thread cannot be called off."""


class Peer:
    """A connection to another worker's server. Raises TransferError throughout; to be closed."""

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._address = address
        self._token = token
        self._process = Process(0, 0)
        self._is_cut = False
        try:
            self._connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
            self._connection.settimeout(None)
            for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                limit(self._connection, which, STALL_TIMEOUT_S)
            tune(self._connection)
            self._connection.sendall(token)
        except OSError as error:
            raise self._failed(error) from error

    def layout(self, shard: str, step: int, kind: str, since: int) -> tuple[Layout, bytes]:
        """What the shard there looks like, and its digest where that is known."""
        have = self._have(Want(shard, step, kind, since))
        if have.layout is None:
            raise TransferError(f"{self._name()} gave no layout of {shard!r}")
        return have.layout, have.digest

    def come_near(self) -> str:
        """From now on read the other's memory without the socket, if that can be done. Why not, or ""."""
        try:
            reply = self._ask(Whose())
        except TransferError as error:
            if error.refused:
                return str(error)
            raise
        if not isinstance(reply, Process):
            raise TransferError(f"{self._name()} answered something else")
        refusal = near.refusal(reply.pid, reply.token_at, self._token)
        if not refusal:
            self._process = reply
        return refusal

    def fetch(self, shard: str, step: int, kind: str, since: int, start: int, stop: int, into: Sequence[torch.Tensor]) -> None:
        """Fill these flat uint8 tensors of the CPU, `stop - start` bytes in all."""
        if sum(piece.numel() for piece in into) != stop - start:
            raise ValueError("the place is not as long as the range")
        have = self._have(Want(shard, step, kind, since, start, stop, self._process.pid > 0))
        try:
            if have.regions is None:
                self._receive(shard, into)
            else:
                self._read(have.regions, into)
        except (OSError, EOFError, ValueError) as error:
            raise self._failed(error) from error

    def _receive(self, shard: str, into: Sequence[torch.Tensor]) -> None:
        expected = bytearray(checksum.BYTES)
        for chunk in chunks(into):
            views = [view(piece) for piece in chunk]
            receive_views(self._connection, [*views, memoryview(expected)])
            self._compare(shard, views, expected)

    def _read(self, regions: Sequence[near.Region], into: Sequence[torch.Tensor]) -> None:
        pid = self._process.pid
        for there, here in zip(near.cut(regions, READ_BYTES), near.cut(near.regions(into), READ_BYTES), strict=True):
            if self._is_cut:
                raise OSError("it is not wanted any more")
            near.read(pid, there, here)
        refusal = near.refusal(pid, self._process.token_at, self._token)
        if refusal:
            raise OSError(f"it let go of its memory while that was read ({refusal})")

    def _compare(self, shard: str, views: Sequence[memoryview], expected: bytes | bytearray) -> None:
        if checksum.of_memory(views) != expected:
            raise TransferError(f"{shard!r} from {self._name()} arrived damaged (checksum)")

    def cut(self) -> None:
        """What is under way fails at once. From any thread."""
        self._is_cut = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No more of it."""
        self._connection.close()

    def _have(self, want: Want) -> Have:
        reply = self._ask(want)
        if not isinstance(reply, Have):
            raise TransferError(f"{self._name()} answered something else")
        return reply

    def _ask(self, request: Request) -> Have | Process:
        try:
            send(self._connection, msgspec.msgpack.encode(request))
            reply: Reply = msgspec.msgpack.decode(message(self._connection), type=Reply)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise self._failed(error) from error
        if isinstance(reply, Refused):
            raise TransferError(f"{self._name()}: {reply.reason}", refused=True)
        return reply

    def _failed(self, error: Exception) -> TransferError:
        return TransferError(f"{self._name()}: {error or type(error).__name__}")

    def _name(self) -> str:
        return f"the worker at {self._address[0]}:{self._address[1]}"
