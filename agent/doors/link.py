"""Door 3: where this node's workers reach their agent (wire/link.py)."""

import os
import socket
import struct
from collections.abc import Callable

import msgspec

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import link


class Peer:
    """One connection; `pid` is the kernel's word."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = struct.unpack("3i", raw)[0]

    def send(self, message: link.ToWorker) -> None:
        """Say something; a peer that is gone or takes nothing is noticed elsewhere."""
        try:
            self._sock.send(msgspec.msgpack.encode(message))
        except OSError:
            pass


class LinkDoor:
    """Listens at `path`."""

    def __init__(
        self,
        reactor: Reactor,
        path: str,
        on_message: Callable[[Peer, link.FromWorker], None],
        on_closed: Callable[[Peer], None],
    ) -> None:
        self._reactor = reactor
        self._on_message = on_message
        self._on_closed = on_closed
        self._decoder = msgspec.msgpack.Decoder(link.FromWorker)
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        reactor.on_readable(self._listener.fileno(), self._accept)

    def close(self) -> None:
        self._reactor.forget(self._listener.fileno())
        self._listener.close()
        os.unlink(self.path)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        peer = Peer(sock)
        self._reactor.on_readable(sock.fileno(), lambda: self._read(peer, sock))

    def _read(self, peer: Peer, sock: socket.socket) -> None:
        while True:
            try:
                data = sock.recv(link.PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._reactor.forget(sock.fileno())
                sock.close()
                self._on_closed(peer)
                return
            self._on_message(peer, self._decoder.decode(data))
