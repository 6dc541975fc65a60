"""Versions of shards in the shared memory of their node: they outlive the workers, their agent and the launcher.

Theory. A version is a file under /dev/shm: a head, the layout, the row. Each shard has two files, written in turn, so that one whole
version is there while the next is being written; ranks are never more than one version apart, because all of them have finished one
before any begins the next (see exchange.py). A head that says WHOLE is written last, with a checksum over everything: what a killed
writer leaves behind is no version. All memory is reserved when a file is made, so that a full /dev/shm is told then and never met by
a write (on tmpfs that would be SIGBUS).

Invariants: a version that is offered has its checksum; readers see a version or nothing.
Source: tmpfs(5), posix_fallocate(3), mmap(2); xxHash (XXH3, 64 bit).
"""

import mmap
import os
import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import torch
import xxhash

from hyperpodrun.recovery.codec import CodecError
from hyperpodrun.recovery.shard import Layout, Shard

_HEAD = struct.Struct("<8sqQQQ16s")
_MAGIC_WHOLE, _MAGIC_TORN = b"HPRstate", b"HPR-torn"
_PAGE_BYTES = 4096


class NoRoom(OSError):
    """The shared memory is too small for two versions; says how much is needed and how to get it."""


class Slots:
    """The two files of one shard. `folder` is made when the first version is written."""

    def __init__(self, folder: str, shard: str) -> None:
        self._folder = folder
        self._shard = shard
        name = blake2b(shard.encode(), digest_size=10).hexdigest()
        self._paths = [os.path.join(folder, f"{name}.{place}") for place in range(2)]
        self._maps: dict[str, tuple[mmap.mmap, memoryview]] = {}

    def write(self, step: int, shard: Shard) -> None:
        """Write a version over the older one. Raises NoRoom, OSError."""
        layout = msgspec.msgpack.encode((self._shard, shard.layout))
        start = _aligned(_HEAD.size + len(layout))
        steps = [self._step(path) for path in self._paths]
        path = self._paths[steps.index(min(steps))] if step not in steps else self._paths[steps.index(step)]
        where = self._map(path, start + shard.nbytes)
        where[: _HEAD.size] = _HEAD.pack(_MAGIC_TORN, step, 0, 0, 0, bytes(16))
        where[_HEAD.size : _HEAD.size + len(layout)] = layout
        if shard.nbytes:
            row = torch.frombuffer(where, dtype=torch.uint8, count=shard.nbytes, offset=start)
            for _, offset, piece in shard.leaves():
                row[offset : offset + piece.numel()].copy_(piece)
        digest = _digest(where, step, len(layout), start, shard.nbytes)
        where[: _HEAD.size] = _HEAD.pack(_MAGIC_WHOLE, step, len(layout), start, shard.nbytes, digest)

    def versions(self) -> dict[int, Shard]:
        """All whole versions, checked; the memory is mapped, not copied."""
        found = {}
        for path in self._paths:
            version = self._read(path)
            if version is not None:
                found[version[0]] = version[1]
        return found

    def forget_after(self, step: int) -> None:
        """Remove versions that are newer: those steps will be lived again."""
        for path in self._paths:
            if self._step(path) > step:
                self._maps.pop(path, None)
                os.unlink(path)

    def close(self) -> None:
        """Let the mapped memory go (what was read of it must be gone by then)."""
        self._maps.clear()

    def _step(self, path: str) -> int:
        try:
            with open(path, "rb") as file:
                magic, step, *_ = _HEAD.unpack(file.read(_HEAD.size))
        except (OSError, struct.error):
            return -2
        return int(step) if magic == _MAGIC_WHOLE else -1

    def _map(self, path: str, size: int) -> memoryview:
        known = self._maps.get(path)
        if known is not None and len(known[1]) == size:
            return known[1]
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
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._maps[path] = mapped, memoryview(mapped)
        return self._maps[path][1]

    def _read(self, path: str) -> tuple[int, Shard] | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            size = os.fstat(fd).st_size
            if size < _HEAD.size or os.fstat(fd).st_uid != os.getuid():
                return None
            where = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        magic, step, layout_bytes, start, nbytes, digest = _HEAD.unpack(where[: _HEAD.size])
        if magic != _MAGIC_WHOLE or start + nbytes != size or _HEAD.size + layout_bytes > start:
            return None
        if _digest(where, step, layout_bytes, start, nbytes) != digest:
            return None
        try:
            name, layout = msgspec.msgpack.decode(where[_HEAD.size : _HEAD.size + layout_bytes], type=tuple[str, Layout])
            if name != self._shard or layout.nbytes != nbytes:
                return None
            return step, Shard(layout, _tensors(layout, where, start, nbytes))
        except (msgspec.DecodeError, CodecError):
            return None


def _tensors(layout: Layout, where: memoryview, start: int, nbytes: int) -> Sequence[torch.Tensor]:
    row = torch.frombuffer(where, dtype=torch.uint8, count=nbytes, offset=start) if nbytes else torch.empty(0, dtype=torch.uint8)
    tensors, at = [], 0
    for part in layout.parts:
        for leaf in part.leaves:
            tensors.append(row[at : at + leaf.nbytes])
            at += leaf.nbytes
    return tensors


def _aligned(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _digest(where: memoryview, step: int, layout_bytes: int, start: int, nbytes: int) -> bytes:
    state = xxhash.xxh3_128(struct.pack("<qQQQ", step, layout_bytes, start, nbytes))
    state.update(where[_HEAD.size : _HEAD.size + layout_bytes])
    state.update(where[start : start + nbytes])
    return state.digest()


def _no_room(folder: str, size: int, shard: str) -> str:
    base = os.path.dirname(folder)
    try:
        stat = os.statvfs(base)
        free = f"{stat.f_bavail * stat.f_frsize / 2**20:,.0f} MiB are free"
    except OSError:
        free = "it cannot be looked at"
    return (
        f"{base} has no room for {size / 2**20:,.0f} MiB (a version of {shard!r}, of which there are two): {free}. "
        f"Make it larger (mount -o remount,size=... {base}; in a container --shm-size) or give copies=1"
    )
