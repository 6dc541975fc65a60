"""Ranges of shards arrive in place and whole, or an error says so."""

import ctypes
import errno
import gc
import socket
import struct
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch

from hyperpodrun.recovery import codec, near, shard, transfer
from hyperpodrun.recovery.peer import Peer
from hyperpodrun.recovery.transfer import CHUNK_BYTES, Server, TransferError

TOKEN = b"t" * 16


def made(*sizes: int) -> shard.Shard:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    leaves = tuple(codec.leaf_of(f"t{place}", tensor) for place, tensor in enumerate(tensors))
    return shard.Shard(shard.Layout((shard.PartLayout("p", leaves, b""),)), tensors)


def opened(find: transfer.Find, readable: bool = False) -> Server:
    server = Server(TOKEN, find, "127.0.0.1", readable)
    server.open()
    return server


@pytest.fixture
def held() -> shard.Shard:
    return made(5, 0, CHUNK_BYTES - 7, 3 * CHUNK_BYTES + 1, *([11] * 1500))


@pytest.fixture
def server(held: shard.Shard) -> Iterator[Server]:
    server = opened(lambda *what: held if what == ("model", 7, "live", 1) else None)
    yield server
    server.close()


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    with closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        yield peer


def test_a_whole_shard_arrives_in_place(peer: Peer, held: shard.Shard) -> None:
    layout, _ = peer.layout("model", 7, "live", 1)
    assert layout == held.layout
    tensors = [codec.empty(leaf) for leaf in layout.parts[0].leaves]
    here = shard.Shard(layout, tensors)
    peer.fetch("model", 7, "live", 1, 0, here.nbytes, here.range(0, here.nbytes))
    assert shard.pack(here) == shard.pack(held)


class Elsewhere(torch.Tensor):
    """A tensor of a device: the CPU gets a copy of it, which lives as long as somebody has it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read only
        return torch.device("cuda")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_what_a_device_holds_is_sent_and_packed_as_it_is() -> None:
    plain = made(*([200] * 50))
    held = shard.Shard(plain.layout, [tensor.as_subclass(Elsewhere) for tensor in plain.tensors])  # type: ignore[arg-type]
    into = torch.zeros(held.nbytes, dtype=torch.uint8)
    with closing(opened(lambda *_: held)) as server, closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        peer.fetch("model", 7, "live", 1, 0, held.nbytes, [into])
    assert torch.equal(into, torch.cat(plain.tensors))
    assert shard.pack(held) == shard.pack(plain)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (3, 9), (CHUNK_BYTES - 3, 3 * CHUNK_BYTES + 5), (4 * CHUNK_BYTES, -1)])
def test_any_range_arrives(peer: Peer, held: shard.Shard, start: int, stop: int) -> None:
    stop = stop % (held.nbytes + 1)
    into = torch.zeros(stop - start, dtype=torch.uint8)
    peer.fetch("model", 7, "live", 1, start, stop, [into])
    assert torch.equal(into, torch.cat(held.range(start, stop)))


def test_what_is_not_there_is_refused_and_the_connection_goes_on(peer: Peer, held: shard.Shard) -> None:
    with pytest.raises(TransferError, match="no live version of 'model' after step 8"):
        peer.layout("model", 8, "live", 1)
    with pytest.raises(TransferError, match="bytes long"):
        peer.fetch("model", 7, "live", 1, held.nbytes, held.nbytes + 1, [torch.zeros(1, dtype=torch.uint8)])
    peer.layout("model", 7, "live", 1)


def test_strangers_get_nothing(server: Server) -> None:
    with closing(Peer(("127.0.0.1", server.port), b"x" * 16)) as peer, pytest.raises(TransferError):
        peer.layout("model", 7, "live", 1)


@pytest.mark.parametrize(
    "noise", [b"", bytes(range(64)), TOKEN + struct.pack("<I", 2**32 - 1), TOKEN + struct.pack("<I", 9) + b"\xc1" * 9]
)
def test_noise_hurts_nobody(server: Server, peer: Peer, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection, suppress(OSError):  # it may hang up at any point
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    peer.layout("model", 7, "live", 1)


def test_who_connects_and_says_nothing_is_hung_up_on(server: Server, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be there as long as the job: what scans ports and is gone would leave a thread and a descriptor each time."""
    monkeypatch.setattr(transfer, "GREETING_S", 1)
    with closing(Peer(("127.0.0.1", server.port), TOKEN)) as known:
        known.layout("model", 7, "live", 1)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger:
            stranger.sendall(TOKEN[:-1])
            assert stranger.recv(1) == b""
        known.layout("model", 7, "live", 1)


class Poor:
    """A listener in a process that has no descriptor left, once."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._refusals = 1

    def accept(self) -> Any:
        if self._refusals:
            self._refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_want_of_descriptors_passes(held: shard.Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_listen", lambda host, listen=transfer._listen: Poor(listen(host)))
    monkeypatch.setattr("hyperpodrun.recovery.peer.STALL_TIMEOUT_S", 10)
    with closing(opened(lambda *_: held)) as server, closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        peer.layout("model", 7, "live", 1)


def test_a_damaged_chunk_is_never_taken(held: shard.Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = transfer.send_views

    def flip_one_bit(connection: socket.socket, views: list[memoryview]) -> None:
        copies = [bytearray(piece) for piece in views]
        copies[0][0] ^= 4
        whole(connection, [memoryview(copy) for copy in copies])

    server = opened(lambda *_: held)
    with closing(server), closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        monkeypatch.setattr(transfer, "send_views", flip_one_bit)
        with pytest.raises(TransferError, match=r"arrived damaged \(checksum\)"):
            peer.fetch("model", 7, "live", 1, 0, 5, [torch.zeros(5, dtype=torch.uint8)])


@pytest.fixture
def near_peer(held: shard.Shard) -> Iterator[Peer]:
    server = opened(lambda *_: held, readable=True)
    with closing(server), closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        yield peer


@pytest.mark.parametrize(("start", "stop"), [(0, -1), (3, 9), (CHUNK_BYTES - 3, 3 * CHUNK_BYTES + 5)])
def test_memory_of_the_same_node_is_read_without_the_socket(
    near_peer: Peer, held: shard.Shard, monkeypatch: pytest.MonkeyPatch, start: int, stop: int
) -> None:
    stop = stop % (held.nbytes + 1)
    into = [torch.zeros(7, dtype=torch.uint8)[:0], *torch.zeros(stop - start, dtype=torch.uint8).split(2_000_001)]
    assert near_peer.come_near() == ""
    sent: list[object] = []
    monkeypatch.setattr(transfer, "send_views", lambda _, views: sent.append(views))
    near_peer.fetch("model", 7, "live", 1, start, stop, into)
    assert torch.equal(torch.cat(into), torch.cat(held.range(start, stop)))
    assert not sent


def test_memory_that_is_let_go_of_while_it_is_read_is_not_taken(held: shard.Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(lambda *_: held, readable=True)
    with closing(server), closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        assert peer.come_near() == ""
        read = near.read

        def read_while_it_ends(pid: int, there: list[near.Region], here: list[near.Region]) -> None:
            read(pid, there, here)
            server.close()

        monkeypatch.setattr(near, "read", read_while_it_ends)
        with pytest.raises(TransferError, match="let go of its memory while that was read"):
            peer.fetch("model", 7, "live", 1, 0, 5, [torch.zeros(5, dtype=torch.uint8)])


def test_an_order_to_leave_that_breaks_into_the_end_leaves_no_token(held: shard.Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(lambda *_: held, readable=True)
    assert server._listener is not None and server._thread is not None and server._secret is not None

    class Broken:
        def shutdown(self, _how: int) -> None:
            raise KeyboardInterrupt

    listener = server._listener
    with closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        assert peer.come_near() == ""
        monkeypatch.setattr(server, "_listener", Broken())
        with pytest.raises(KeyboardInterrupt):
            server.close()
        assert server._secret.raw == bytes(len(TOKEN))
        monkeypatch.setattr(server, "_listener", listener)
        server.close()
        assert not server._thread.is_alive()


def test_a_server_that_was_not_opened_has_nothing_to_leave_behind(held: shard.Shard) -> None:
    server = Server(TOKEN, lambda *_: held, "127.0.0.1", readable=True)
    assert server._secret is not None and server._secret.raw == bytes(len(TOKEN)) and not server.port
    server.close()


def test_what_is_read_stays_where_it_is_until_the_end() -> None:
    """The holder's own state may go on to other memory meanwhile (an adopted parameter)."""
    made_of = weakref.WeakSet[shard.Shard]()

    def find(*_: object) -> shard.Shard:
        one = made(1000)
        made_of.add(one)
        return one

    server = opened(find, readable=True)
    with closing(Peer(("127.0.0.1", server.port), TOKEN)) as peer:
        assert peer.come_near() == ""
        peer.fetch("model", 7, "live", 1, 0, 1000, [torch.zeros(1000, dtype=torch.uint8)])
        gc.collect()
        assert len(made_of) == 1
    server.close()
    gc.collect()
    assert not made_of


def test_reading_of_memory_is_called_off(near_peer: Peer, held: shard.Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert near_peer.come_near() == ""
    monkeypatch.setattr(near, "read", lambda *_: near_peer.cut())
    monkeypatch.setattr("hyperpodrun.recovery.peer.READ_BYTES", 1 << 20)
    with pytest.raises(TransferError, match="not wanted any more"):
        near_peer.fetch("model", 7, "live", 1, 0, held.nbytes, [torch.zeros(held.nbytes, dtype=torch.uint8)])


def test_memory_that_is_closed_leaves_the_socket(
    server: Server, peer: Peer, near_peer: Peer, held: shard.Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not read by others" in peer.come_near()
    monkeypatch.setattr(near, "_readv", lambda *_: (ctypes.set_errno(errno.EPERM), -1)[1])
    assert near_peer.come_near() == "Operation not permitted"
    for one in (peer, near_peer):
        into = torch.zeros(held.nbytes, dtype=torch.uint8)
        one.fetch("model", 7, "live", 1, 0, held.nbytes, [into])
        assert torch.equal(into, torch.cat(held.tensors))


def test_another_process_of_that_number_is_not_taken_for_the_holder(near_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_peer, "_token", b"u" * 16)
    assert near_peer.come_near() == "it is another process here"


def test_a_server_that_ends_is_an_error_at_once(server: Server, peer: Peer) -> None:
    peer.layout("model", 7, "live", 1)
    server.close()
    with pytest.raises(TransferError, match=r"the worker at 127\.0\.0\.1"):
        peer.layout("model", 7, "live", 1)
    with pytest.raises(TransferError):
        Peer(("127.0.0.1", server.port), TOKEN)
