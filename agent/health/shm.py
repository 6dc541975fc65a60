"""How full the shared memory file system is: what a SIGBUS is mostly about. Source: statvfs(3), shm_overview(7)."""

import os

import msgspec


class ShmFigures(msgspec.Struct, frozen=True):
    """Size and use of /dev/shm, in bytes."""

    size_bytes: int
    used_bytes: int


def shm_figures(path: str = "/dev/shm") -> ShmFigures | None:
    """The figures now; None where there is no such file system."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    size_bytes = found.f_blocks * found.f_frsize
    return ShmFigures(size_bytes, size_bytes - found.f_bfree * found.f_frsize) if size_bytes else None
