"""The agent's end of the worker link (wire/link.py): a Unix socket in the launcher's private folder.

Who connects is known by the kernel's word (SO_PEERCRED: the process that called connect(2)), never by what it says: a worker's main
process, or a process below one (a script that a worker starts, a data loader); anybody else is refused. What comes in is read with
a typed decoder; a few malformed packets are dropped, then the connection.

States of a connection: *open*, *closed* (nothing is delivered or sent any more; `on_closed` comes once, in a later turn).
Invariants: the agent never waits for a worker; what a worker does not read is held up to a limit, then its connection is dropped;
one connection gets at most _READS packets a turn, so that a storm leaves room for everybody else. The socket belongs to whoever
holds the lock beside it: a second agent cannot take it over while the first one lives.
Source: unix(7), flock(2).
"""

import errno
import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from hyperpodrun.agent import family
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.wire import address
from hyperpodrun.agent.wire.link import PACKET_BYTES, FromWorker, ToWorker

MOST_MALFORMED = 16
"""Malformed packets until a connection is dropped."""
MOST_QUEUED = 256
"""Messages, beyond what the kernel holds, that wait for a worker to read them."""
MOST_BELOW = 64
"""Connections of the processes below one worker."""
BUFFER_BYTES = 2 * PACKET_BYTES
_READS = 64
_DEPTH = 64
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """One process's link. `local_rank` is that of the worker to which the process belongs, `main` that it is its first process."""

    def __init__(self, door: "LinkDoor", opened: socket.socket, pid: int, local_rank: int, main: bool) -> None:
        self.pid = pid
        self.local_rank = local_rank
        self.main = main
        self.closed = False
        self._door = door
        self._socket = opened
        self._queue: deque[bytes] = deque()
        self._malformed = 0
        door.reactor.on_readable(opened.fileno(), self._readable)

    def send(self, message: ToWorker) -> None:
        """Give the process a message, now or when it reads. A process that has ended, or never reads, loses its connection.

        Raises ValueError for a message longer than PACKET_BYTES.
        """
        data = msgspec.msgpack.encode(message)
        if len(data) > PACKET_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too long for the link, the limit is {PACKET_BYTES}")
        if self.closed:
            return
        self._queue.append(data)
        if len(self._queue) == 1:
            self._flush()
        elif len(self._queue) > MOST_QUEUED:
            self.close("it does not read what it is told")

    def close(self, why: str = "") -> None:
        """End it; a reason is for the log."""
        if self.closed:
            return
        self.closed = True
        self._queue.clear()
        self._door.reactor.forget(self._socket.fileno())
        self._socket.close()
        self._door.forget(self, why)

    # --- inside

    def _readable(self) -> None:
        buffer = self._door.buffer
        for _ in range(_READS):
            try:
                size_bytes = self._socket.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError:
                size_bytes = 0
            if size_bytes == 0:
                self.close()
                return
            try:
                message = self._door.decoder.decode(memoryview(buffer)[:size_bytes])
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                self._malformed += 1
                if self._malformed >= MOST_MALFORMED:
                    self.close(
                        f"{MOST_MALFORMED} of its messages are malformed; is another version of hyperpodrun imported there?"
                    )
                    return
                continue
            self._door.on_message(self, message)
            if self.closed:
                return

    def _flush(self) -> None:
        while self._queue:
            try:
                self._socket.send(self._queue[0])
            except BlockingIOError:
                self._door.reactor.on_writable(self._socket.fileno(), self._writable)
                return
            except OSError:
                self.close()
                return
            self._queue.popleft()

    def _writable(self) -> None:
        self._door.reactor.forget_writable(self._socket.fileno())
        self._flush()


class LinkDoor:
    """Listens in the folder `run_dir`; `address` is for the workers (`names.LINK`).

    `on_message(connection, message)` and `on_closed(connection)` are called from the loop. `workers()` are the processes that may
    connect: local rank -> pid. Raises OSError when the socket cannot be made, or belongs to an agent that lives.
    """

    def __init__(
        self,
        reactor: Reactor,
        run_dir: str,
        say: Callable[[str], None],
        on_message: Callable[[Connection, FromWorker], None],
        on_closed: Callable[[Connection], None],
        workers: Callable[[], Mapping[int, int]],
    ) -> None:
        self.reactor = reactor
        self.on_message = on_message
        self.decoder = msgspec.msgpack.Decoder(FromWorker)
        self.buffer = bytearray(PACKET_BYTES)  # what is cut off a longer packet makes it malformed
        self._on_closed = on_closed
        self._workers = workers
        self._complaints = Complaints(say, reactor.now_s)
        self._connections: dict[Connection, None] = {}
        self._path = os.path.join(run_dir, "link")
        self._retry: Timer | None = None
        self._lock_fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_socket()  # of an agent that died
            with address.fitting(self._path) as path:
                self._socket.bind(path)
            self._socket.listen(4096)
            self._socket.setblocking(False)
            reactor.on_readable(self._socket.fileno(), self._accept)
        except OSError as error:
            self._socket.close()
            os.close(self._lock_fd)
            if error.errno == errno.EWOULDBLOCK:
                raise OSError(errno.EADDRINUSE, "another agent listens there", self._path) from None
            raise

    @property
    def address(self) -> str:
        """The value of `names.LINK`."""
        return f"unix:{self._path}"

    @property
    def connections(self) -> list[Connection]:
        """Those that are open, the oldest first."""
        return list(self._connections)

    def drop(self, pid: int) -> None:
        """That process has ended: its connections end, also where a child of it holds a copy of the socket."""
        for connection in self.connections:
            if connection.pid == pid:
                connection.close()

    def close(self) -> None:
        """Stop listening, end all connections, remove the socket."""
        if self._lock_fd < 0:
            return
        if self._retry:
            self._retry.cancel()
        for connection in self.connections:
            connection.close()
        self.reactor.forget(self._socket.fileno())
        self._socket.close()
        self._remove_socket()
        os.close(self._lock_fd)
        self._lock_fd = -1

    # --- for connections

    def forget(self, connection: Connection, why: str) -> None:
        """It closed."""
        del self._connections[connection]
        self.reactor.call_later(0, lambda: self._on_closed(connection))
        if why:
            whose = f"local rank {connection.local_rank} (pid {connection.pid})"
            self._complaints.about(f"closed {connection.local_rank}", f"the link to {whose} was closed: {why}")

    # --- inside

    def _remove_socket(self) -> None:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass

    def _accept(self) -> None:
        for _ in range(_READS):
            try:
                opened, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._complaints.about("accept", f"a worker's link has to wait: {error.strerror}; raise `ulimit -n`")
                self.reactor.forget_readable(self._socket.fileno())
                self._retry = self.reactor.call_later(0.2, self._accept_again)
                return
            self._admit(opened)

    def _accept_again(self) -> None:
        self._retry = None
        self.reactor.on_readable(self._socket.fileno(), self._accept)

    def _admit(self, opened: socket.socket) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        local_rank, main = self._whose(pid) if uid in (0, os.geteuid()) else (None, False)
        known = sum(c.local_rank == local_rank and c.main is main for c in self._connections)
        if local_rank is None:
            self._tell_stranger(pid, uid)
            opened.close()
        elif known >= MOST_BELOW:
            which = f"a process of local rank {local_rank} (pid {pid})"
            self._complaints.about(f"many {local_rank}", f"{which} was refused: {known} links are open there")
            opened.close()
        else:
            opened.setblocking(False)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            self._connections[Connection(self, opened, pid, local_rank, main)] = None

    def _tell_stranger(self, pid: int, uid: int) -> None:
        process = family.read_process(pid)
        if process is not None:  # else it is gone, which is no matter for anybody
            who = f"{process.name.encode('unicode_escape').decode()!r} (pid {pid}, uid {uid})"
            self._complaints.about(
                "stranger", f"{who} was refused at the workers' link: it is no process of a worker of this job"
            )

    def _whose(self, pid: int) -> tuple[int | None, bool]:
        """The local rank of the worker to which a process belongs, and whether it is its main process."""
        ranks = {worker: local_rank for local_rank, worker in self._workers().items()}
        at = pid
        for _ in range(_DEPTH):
            if at in ranks:
                return ranks[at], at == pid
            process = family.read_process(at)
            if process is None or process.parent <= 1:
                break
            at = process.parent
        return None, False
