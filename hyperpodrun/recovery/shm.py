"""Versions of shards in the shared memory of their node: they outlive the workers, their agent and the launcher.

Theory. A version is a file under /dev/shm: a head, the layout, the row. Each shard has two files, written in turn, so that one whole
version is there while the next is being written; ranks are never more than one version apart, because all of them have finished one
before any begins the next (see pace.py). A head that says WHOLE is written last, with a checksum over everything: what a killed
writer leaves behind is no version. Head and description have a checksum of their own, so that what a file holds is known at once, and
its row is read only when it is needed. All memory is reserved when a file is made, so that a full /dev/shm is told then and never met
by a write (on tmpfs that would be SIGBUS).

Invariants: a version that is offered has its checksum; readers see a version or nothing.
Source: tmpfs(5), posix_fallocate(3), mmap(2); xxHash (XXH3, 64 bit).
"""

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import msgspec
import torch
import xxhash

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery.codec import CodecError
from hyperpodrun.recovery.plan import History
from hyperpodrun.recovery.shard import Layout, Shard, view

_HEAD = struct.Struct("<8sqQQQQ16s")
_MAGIC_WHOLE, _MAGIC_TORN = b"HPRstat3", b"HPR-torn"
_PAGE_BYTES = 4096
_COPY_BYTES = 4 << 20
VERSIONS, PARTING = (".0", ".1"), (".2", ".3", ".4")
"""Ends of the names of a shard's files: its versions, and what processes that were replaced have left (parting.py)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class NoRoom(OSError):
    """The shared memory is too small for two versions; says how much is needed and how to get it."""


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    shard: str
    layout: Layout
    history: History


class Version:
    """What a file holds. Its description is checked; `check` says whether the row is what was written (it reads all of it once)."""

    def __init__(self, step: int, meta: _Meta, where: memoryview, start: int, digest: bytes) -> None:
        self.path = ""
        self.step = step
        self.name = meta.shard
        self.history = meta.history
        self.shard = Shard(meta.layout, _tensors(meta.layout, where, start), digest)
        self.digest = self.shard.digest
        self._row = where[start:]
        self._good: bool | None = None

    def check(self) -> bool:
        """Is every bit as it was?"""
        if self._good is None:
            self._good = _digest(self._row) == self.digest
        return self._good

    def discard(self) -> None:
        """It is damaged, or void: nobody shall find it again. What was written over it meanwhile stays."""
        now = read(self.path) if self.path else None
        if now is not None and (now.name, now.step, now.history, now.digest) == (self.name, self.step, self.history, self.digest):
            with suppress(OSError):
                os.unlink(self.path)


def always() -> bool:
    """Nobody writes to it meanwhile."""
    return True


class Slots:
    """The two files of one shard. `folder` is made when the first version is written."""

    def __init__(self, folder: str, shard: str, suffixes: tuple[str, ...] = VERSIONS) -> None:
        self._folder = folder
        self._shard = shard
        name = blake2b(shard.encode(), digest_size=10).hexdigest()
        self._paths = [os.path.join(folder, name + suffix) for suffix in suffixes]
        self._maps: dict[str, memoryview] = {}
        self._files: dict[str, tuple[int, int]] = {}
        self._open: tuple[memoryview, int, _Meta, int] | None = None

    def write(
        self, step: int, shard: Shard, history: History = (), keep: int | None = None, intact: Callable[[], bool] = always
    ) -> bool:
        """Write a version over the oldest one, but not over that of the step `keep`, if it is still `intact` behind that.

        Raises NoRoom, OSError.
        """
        row = self.reserve(step, shard.layout, history, keep)
        for into, out in zip(row.tensors, shard.tensors, strict=True):
            into.copy_(out)
        return intact() and self.commit()

    def reserve(self, step: int, layout: Layout, history: History = (), keep: int | None = None) -> Shard:
        """Begin a version over the oldest one: the shard to be filled. Raises NoRoom, OSError."""
        meta = _Meta(self._shard, layout, history)
        size = len(msgspec.msgpack.encode(meta))
        start = _aligned(_HEAD.size + size)
        steps = [self._step(path) for path in self._paths]
        over = step if step in steps else min(at for at in steps if at != keep)
        path = self._paths[steps.index(over)]
        where = self._map(path, start + layout.nbytes)
        where[: _HEAD.size] = _HEAD.pack(_MAGIC_TORN, step, 0, 0, 0, 0, bytes(16))
        self._open = where, step, meta, start
        return Shard(layout, _tensors(layout, where, start))

    def commit(self, expected: bytes = b"") -> bool:
        """The reserved shard is filled: from now on it is a version, unless its digest is another one than `expected`."""
        assert self._open is not None, "reserve() comes first"
        (where, step, meta, start), self._open = self._open, None
        text = msgspec.msgpack.encode(meta)
        where[_HEAD.size : _HEAD.size + len(text)] = text
        nbytes = meta.layout.nbytes
        digest = _digest(where[start : start + nbytes])
        if expected and digest != expected:
            return False
        sizes = len(text), start, nbytes
        where[: _HEAD.size] = _HEAD.pack(_MAGIC_WHOLE, step, *sizes, _sum(step, sizes, text, digest), digest)
        return True

    def versions(self) -> dict[int, Shard]:
        """All whole versions, checked; the memory is mapped, not copied."""
        return {found.step: found.shard for found in self.found() if found.check()}

    def found(self) -> list[Version]:
        """All versions, their rows not checked yet."""
        found = [self._version(path) for path in self._paths]
        return [version for version in found if version is not None and version.name == self._shard]

    def forget_after(self, step: int) -> None:
        """Remove versions that are newer: those steps will be lived again."""
        for path in self._paths:
            if self._step(path) > step:
                self._remove(path)

    def close(self) -> None:
        """Let the mapped memory go (what was read of it must be gone by then)."""
        self._maps.clear()

    def _remove(self, path: str) -> None:
        self._maps.pop(path, None)
        with suppress(FileNotFoundError):  # another rank of the node was faster
            os.unlink(path)

    def _version(self, path: str) -> Version | None:
        return read(path)

    def _step(self, path: str) -> int:
        try:
            with open(path, "rb") as file:
                magic, step, *_ = _HEAD.unpack(file.read(_HEAD.size))
        except (OSError, struct.error):
            return -2
        return int(step) if magic == _MAGIC_WHOLE else -1

    def _map(self, path: str, size: int) -> memoryview:
        known = self._maps.get(path)
        # another process may have removed the file, made it anew or cut it
        if known is not None and len(known) == size and self._files[path] == _file(path):
            return known
        self._maps.pop(path, None)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                os.unlink(path)
                raise NoRoom(error.errno, _no_room(self._folder, size, self._shard)) from error
            self._maps[path], self._files[path] = mapped(fd, size), _file(fd)
        finally:
            os.close(fd)
        return self._maps[path]


class HeapSlots(Slots):
    """The same in this process's own memory, for where shared memory has no room. They live as long as the process."""

    def __init__(self, shard: str) -> None:
        super().__init__("", shard)

    def _map(self, path: str, size: int) -> memoryview:
        known = self._maps.get(path)
        if known is None or len(known) != size:
            self._maps.pop(path, None)
            known = self._maps[path] = mapped(-1, size)
        return known

    def _step(self, path: str) -> int:
        if path not in self._maps:
            return -2
        magic, step, *_ = _HEAD.unpack(self._maps[path][: _HEAD.size])
        return int(step) if magic == _MAGIC_WHOLE else -1

    def _version(self, path: str) -> Version | None:
        return _parse(self._maps[path]) if path in self._maps else None

    def _remove(self, path: str) -> None:
        self._maps.pop(path, None)


def write_file(path: str, name: str, step: int, shard: Shard, history: History) -> Callable[[], None]:
    """Copy a version into a file beside `path`; what is returned brings it to the disk and gives it its name. Both raise OSError."""
    meta = msgspec.msgpack.encode(_Meta(name, shard.layout, history))
    start = _aligned(_HEAD.size + len(meta))
    state, at = xxhash.xxh3_128(), start
    made = unfinished(path)
    with open(
        os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b", buffering=0
    ) as file:
        for tensor in shard.tensors:
            for first in range(0, tensor.numel(), _COPY_BYTES):
                piece = tensor[first : first + _COPY_BYTES].cpu()
                left = view(piece)
                state.update(left)
                while left:
                    count = os.pwrite(file.fileno(), left, at)
                    at, left = at + count, left[count:]
        sizes, digest = (len(meta), start, at - start), state.digest()
        os.pwrite(file.fileno(), _HEAD.pack(_MAGIC_WHOLE, step, *sizes, _sum(step, sizes, meta, digest), digest) + meta, 0)
        os.ftruncate(file.fileno(), at)

    def finish() -> None:
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        os.replace(made, path)

    return finish


def unfinished(path: str) -> str:
    """What a file is called while `write_file` of this process is at work on it."""
    return f"{path}.{os.getpid()}.new"


def scan(folder: str) -> list[Version]:
    """All versions of all shards in a folder of this user's, their rows not checked."""
    try:
        names = sorted(os.listdir(folder)) if node_state.is_own(folder) else []
    except OSError:
        return []
    found = [read(os.path.join(folder, name)) for name in names if name.endswith(VERSIONS + PARTING)]
    return [version for version in found if version is not None]


def read(path: str, anyones: bool = False) -> Version | None:
    """The version in a file, its row not checked; None when there is none. `anyones`: whoever the file belongs to."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size < _HEAD.size or not (anyones or os.fstat(fd).st_uid == os.getuid()):
            return None
        version = _parse(mapped(fd, size, shared=False))
    except OSError:
        return None
    finally:
        os.close(fd)
    if version is not None:
        version.path = path
    return version


def mapped(fd: int, size: int, shared: bool = True) -> memoryview:
    """The file's memory (-1: memory of nobody else), for as long as somebody holds a part of it. Raises OSError.

    `shared`: what is written to it is in the file; else a file that can only be read will do.
    Python's mmap keeps a descriptor of its own open for each mapping, which would grow over restarts.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size} bytes: {os.strerror(number)}")
    kind_of_array: Any = type("Mapped", (ctypes.c_char * size,), {})  # a class that weak references can point to
    array = kind_of_array.from_address(address)
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


def _parse(where: memoryview) -> Version | None:
    magic, step, length, start, nbytes, checksum, digest = _HEAD.unpack(where[: _HEAD.size])
    if magic != _MAGIC_WHOLE or start + nbytes != len(where) or _HEAD.size + length > start:
        return None
    text = where[_HEAD.size : _HEAD.size + length]
    if _sum(step, (length, start, nbytes), text, digest) != checksum:
        return None
    try:
        meta = msgspec.msgpack.decode(text, type=_Meta)
        return Version(step, meta, where, start, digest) if meta.layout.nbytes == nbytes else None
    except (msgspec.DecodeError, CodecError):
        return None


def _tensors(layout: Layout, where: memoryview, start: int) -> Sequence[torch.Tensor]:
    nbytes = layout.nbytes
    row = torch.frombuffer(where, dtype=torch.uint8, count=nbytes, offset=start) if nbytes else torch.empty(0, dtype=torch.uint8)
    tensors, at = [], 0
    for part in layout.parts:
        for leaf in part.leaves:
            tensors.append(row[at : at + leaf.nbytes])
            at += leaf.nbytes
    return tensors


def _file(path: str | int) -> tuple[int, int]:
    """Which file it is, and how long."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_ino, status.st_size


def _aligned(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def digest_of(shard: Shard) -> bytes:
    """Of a row, wherever it lies: that of a version with the same bytes."""
    state = xxhash.xxh3_128()
    for tensor in shard.tensors:
        for first in range(0, tensor.numel(), _COPY_BYTES):
            state.update(view(tensor[first : first + _COPY_BYTES].cpu()))
    return state.digest()


def _digest(row: memoryview) -> bytes:
    return xxhash.xxh3_128(row).digest()


def _sum(step: int, sizes: tuple[int, int, int], text: bytes | memoryview, digest: bytes) -> int:
    state = xxhash.xxh3_64(struct.pack("<qQQQ", step, *sizes) + digest)
    state.update(text)
    return state.intdigest()


def _no_room(folder: str, size: int, shard: str) -> str:
    base = os.path.dirname(folder)
    while not os.path.ismount(base):
        base = os.path.dirname(base)
    try:
        stat = os.statvfs(base)
        free = f"{stat.f_bavail * stat.f_frsize / 2**20:,.0f} MiB are free"
    except OSError:
        free = "it cannot be looked at"
    return (
        f"{base} has no room for {size / 2**20:,.0f} MiB (a version of {shard!r}, of which there are two): {free}. "
        f"Make it larger (mount -o remount,size=... {base}; in a container --shm-size) or give copies=1"
    )
