"""The sockets of this process that gloo and the store's clients block on.

Theory. A blocked gloo collective is freed by shutdown(2) of its connected sockets and by nothing else that torch offers; the listening
one must stay (its loss ends the process from C++). Each gloo device runs one event loop: a thread called `gloo_tcp_loop` that sits in
epoll_wait on an epoll of its own; what that epoll watches (fdinfo) is the device's listening socket, its wake-up pipe, and exactly the
connections of the groups made on it. So nobody else's connection is ever touched, whenever it was opened, and nothing of the user's
or torch's has to be patched. Where the kernel does not tell what a thread waits for (/proc/self/task/*/syscall), or torch does
not name its threads, an epoll is taken for gloo's by its contents: pointers as data, one listening TCP socket, otherwise TCP
connections and at most one pipe; other libraries' and Python's own loops hold an eventfd or a socket pair, or descriptors as data.

A group that is being made has pairs that wait for their peer to connect: there is no socket to shut, and who has died in between will
never come. To those we connect ourselves, and hang up: gloo tells its pairs apart by a number that whoever connects says first, and a
device counts its pairs from 0.

Invariant: what is shut down is the very socket (by inode) that the epoll watches, whatever its number names by now.
Source: proc(5) (fdinfo, syscall), epoll(7), shutdown(2); gloo/transport/tcp/listener.cc.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_LOOP_THREAD: Final = "gloo_tcp_loop"
_FD, _TASK = "/proc/self/fd", "/proc/self/task"
_NUMBER: Final = struct.Struct("=q")
CONNECT_S: Final = 0.2
_LOOKS: Final = 5
"""How often a loop that happens to be running is looked at again: it waits nearly all the time, unless the machine is overloaded."""


@dataclass(frozen=True, slots=True)
class _Watched:
    fd: int
    data: int
    inode: int


def shut_gloo() -> int:
    """End all connections between this process's gloo groups and their peers, for both sides. Returns how many."""
    count = 0
    for epoll in _gloo_epolls():
        for watched in _watched_by(epoll):
            with _Held(watched.fd, watched.inode) as held:
                if held.is_tcp and not held.listens:
                    count += held.shut()
    return count


def come_for_missing_peers(most: int) -> None:
    """End the wait of pairs that nobody has connected to; `most`: pairs of a group.

    Where they have been connected meanwhile it is for nothing: gloo keeps until the group's end what comes for other numbers.
    """
    for address in _gloo_addresses():
        for number in range(most):
            try:
                with socket.create_connection(address, CONNECT_S) as peer:
                    peer.sendall(_NUMBER.pack(number))
            except OSError:
                break  # it is gone, or takes no more


def _gloo_addresses() -> list[tuple[str, int]]:
    """Where this process's gloo devices await their peers."""
    found = []
    for epoll in _gloo_epolls():
        for watched in _watched_by(epoll):
            with _Held(watched.fd, watched.inode) as held:
                if held.is_tcp and held.listens and held.socket is not None:
                    found.append(held.socket.getsockname()[:2])
    return found


def shut_connections_to(host: str, port: int) -> int:
    """End this process's connections to an address. Returns how many."""
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return 0
    count = 0
    for fd in _descriptors("socket:"):
        with _Held(fd) as held:
            address, other_port = held.peer
            if held.is_tcp and other_port == port and address.removeprefix("::ffff:") in wanted:
                count += held.shut()
    return count


class _Held:
    """A duplicate of somebody else's descriptor: what it names cannot change while it is looked at.

    `inode`: nothing is held unless it is this one. The owner may close its own meanwhile; gloo takes it off its epoll first.
    """

    def __init__(self, fd: int, inode: int | None = None) -> None:
        self.socket: socket.socket | None = None
        try:
            copy = os.dup(fd)
        except OSError:
            return  # closed meanwhile
        status = os.fstat(copy)
        if not stat.S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
            os.close(copy)
            return
        self.socket = socket.socket(fileno=copy)

    def __enter__(self) -> "_Held":
        return self

    def __exit__(self, *_: object) -> None:
        if self.socket is not None:
            self.socket.close()

    @property
    def is_tcp(self) -> bool:
        one = self.socket
        return one is not None and one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM

    @property
    def listens(self) -> bool:
        return self.socket is not None and bool(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    @property
    def peer(self) -> tuple[str, int]:
        try:
            name = self.socket.getpeername() if self.socket is not None else None
        except OSError:
            name = None
        return (str(name[0]), int(name[1])) if isinstance(name, tuple) else ("", 0)

    def shut(self) -> bool:
        """False: the other side was faster."""
        assert self.socket is not None
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        return True


# --- whose epoll is it


def _gloo_epolls() -> list[int]:
    threads = [task for task in os.listdir(_TASK) if _read(f"{_TASK}/{task}/comm").strip() == _LOOP_THREAD]
    epolls = [_waited_for(task) for task in threads]
    if threads and all(fd is not None for fd in epolls):
        return [fd for fd in epolls if fd is not None]
    return [fd for fd in _descriptors("anon_inode:[eventpoll]") if _looks_like_gloo(fd)]


def _waited_for(task: str) -> int | None:
    """The epoll that a thread waits for: the first argument of its system call."""
    for _ in range(_LOOKS):
        words = _read(f"{_TASK}/{task}/syscall").split()
        if len(words) < 3:
            if words != ["running"]:
                return None
            os.sched_yield()
            continue
        fd = int(words[1], 16)
        if _target(fd) == "anon_inode:[eventpoll]":
            return fd
    return None


def _looks_like_gloo(epoll: int) -> bool:
    listening = pipes = 0
    for watched in _watched_by(epoll):
        if watched.data < 1 << 32:
            return False
        if _target(watched.fd).startswith("pipe:"):
            pipes += 1
            continue
        with _Held(watched.fd, watched.inode) as held:
            if not held.is_tcp:
                return False
            listening += held.listens
    return listening == 1 and pipes <= 1


def _watched_by(epoll: int) -> Iterator[_Watched]:
    for line in _read(f"/proc/self/fdinfo/{epoll}").splitlines():
        words = line.replace(":", ": ").split()
        if not words or words[0] != "tfd:":
            continue
        fields = dict(zip(words[::2], words[1::2], strict=False))
        yield _Watched(int(fields["tfd:"]), int(fields["data:"], 16), int(fields.get("ino:", "0"), 16))


def _descriptors(target: str) -> list[int]:
    return [int(name) for name in os.listdir(_FD) if _target(int(name)).startswith(target)]


def _target(fd: int) -> str:
    try:
        return os.readlink(f"{_FD}/{fd}")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""
