"""A Unix socket by its path, however long: the address itself holds 107 bytes (unix(7), sun_path)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_BYTES = 107


@contextmanager
def fitting(path: str) -> Iterator[str]:
    """Another name for `path` that fits into a socket address, for bind and connect, while the context lasts.

    A path that is too long is reached through its folder's descriptor in /proc. Raises OSError when the folder cannot be opened.
    """
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
