"""Reading another process's memory on the same node: one copy by the kernel, no socket between.

Theory. process_vm_readv(2) copies from a process of the same user. Whether it may is the kernel's matter (the same user, Yama's ptrace
scope, a container's seccomp filter), and whether a process id means the same process there and here is the namespaces'. So nothing is
reckoned: a holder names the place of a secret that both know, and who can read it there may read the rest. Under Yama's scope 1 a
process may be read by its ancestors alone: while it serves, a holder lets the descendants of its parent read it, which are the
workers of its node.

States: none.
Invariants: `read` fills all of the memory or raises; nothing is written but there.
Source: process_vm_readv(2), prctl(2) PR_SET_PTRACER, ptrace(2) "ptrace access mode checking".
"""

import ctypes
import os
from collections.abc import Iterator, Sequence

import torch

MAX_PIECES = 512
"""At once; the kernel takes IOV_MAX, 1,024."""
_PR_SET_PTRACER = 0x59616D61

Region = tuple[int, int]
"""Address, bytes."""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_Pieces = _Piece * MAX_PIECES
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong)


def regions(tensors: Sequence[torch.Tensor]) -> list[Region]:
    """Where flat uint8 tensors of the CPU lie."""
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors if tensor.numel()]


def allow(allowed: bool) -> None:
    """May the other workers of this node read this process's memory, where Yama asks? (Elsewhere nothing changes.)"""
    _libc.prctl(_PR_SET_PTRACER, os.getppid() if allowed else 0, 0, 0, 0)


def refusal(pid: int, address: int, expected: bytes) -> str:
    """Why that process's memory cannot be read from here; "" when it can, and holds what is expected there."""
    found = bytearray(len(expected))
    try:
        read(pid, [(address, len(found))], [(ctypes.addressof((ctypes.c_char * len(found)).from_buffer(found)), len(found))])
    except OSError as error:
        return error.strerror or str(error)
    return "" if found == expected else "it is another process here"


def read(pid: int, there: Sequence[Region], here: Sequence[Region]) -> None:
    """Copy what lies in these regions of a process into those of this one, as many bytes. Raises OSError."""
    if _readv is None:
        raise OSError("this system has no process_vm_readv")
    sources, targets, count, size = _Pieces(), _Pieces(), 0, 0
    for source, target, length in _paired(there, here):
        sources[count], targets[count] = _Piece(source, length), _Piece(target, length)
        count, size = count + 1, size + length
        if count == MAX_PIECES:
            _copy(pid, sources, targets, count, size)
            count = size = 0
    if count:
        _copy(pid, sources, targets, count, size)


def _copy(pid: int, sources: ctypes.Array[_Piece], targets: ctypes.Array[_Piece], count: int, size: int) -> None:
    assert _readv is not None
    copied = _readv(pid, targets, count, sources, count, 0)
    if copied < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if copied != size:
        raise OSError(f"process {pid} has {copied} of {size} bytes there")


def _paired(there: Sequence[Region], here: Sequence[Region]) -> Iterator[tuple[int, int, int]]:
    """Stretches that are one piece on both sides: source, target, bytes. Raises ValueError when one side is longer."""
    left = list(reversed(here))
    for source, length in there:
        while length:
            if not left:
                raise ValueError("more memory there than here")
            target, room = left.pop()
            size = min(length, room)
            if size:
                yield source, target, size
            if room > size:
                left.append((target + size, room - size))
            source, length = source + size, length - size
    if left:
        raise ValueError("more memory here than there")


def cut(pieces: Sequence[Region], size: int) -> Iterator[list[Region]]:
    """The regions in stretches of so many bytes in all; the last may be shorter."""
    stretch: list[Region] = []
    room = size
    for address, length in pieces:
        while length:
            taken = min(length, room)
            stretch.append((address, taken))
            address, length, room = address + taken, length - taken, room - taken
            if not room:
                yield stretch
                stretch, room = [], size
    if stretch:
        yield stretch
