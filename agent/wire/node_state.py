"""Where the versions of a job's training state lie on a node, for the workers that write them and the agents that remove them.

Workers hold a shared flock(2) on the folder's `lock` as long as they live: a folder whose lock is free belongs to nobody who runs.
Whoever takes a free one writes its owner into it (names.STATE_OWNER), and only processes of that one may hold it, too: a second job by
the same id (two in one allocation of a scheduler) neither reads nor writes what is the first one's.
Everybody may make a folder of that name in /dev/shm, or a link: what is no folder of this user's own is not used.
Source: flock(2), tmpfs(5). Standard library only.
"""

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from hashlib import blake2b
from urllib.parse import quote

BASE = "/dev/shm"
PREFIX = "hyperpodrun-state"
LINGER_S = 1.0
"""So long processes of a job that was ended may hold its folder against those that come after them."""
_LOCK = "lock"
_OF_STATE = "state-"


def prefix() -> str:
    """What the names of this user's folders begin with."""
    return f"{PREFIX}-{os.getuid()}-"


def folder_of(job_id: str, node: str, base: str = BASE) -> str:
    """Names of any length and letters; the folder need not exist."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", job_id)[:60]
    tail = blake2b(f"{job_id}\0{node}".encode(), digest_size=6).hexdigest()
    return os.path.join(base, f"{prefix()}{plain}-{tail}")


def of_state(folder: str, name: str) -> str:
    """Where one of several states of a program has its files: in a folder of its own within, but for the one that has no name."""
    return folder if name == "default" else os.path.join(folder, _OF_STATE + quote(name, safe=""))


def lock_of(folder: str) -> str:
    """The file that is locked while a folder, or one of a state within, is used."""
    top, name = os.path.split(folder)
    return os.path.join(top if name.startswith(_OF_STATE) else folder, _LOCK)


def top_of(folder: str) -> str:
    """The job's folder that it is, or is in."""
    return os.path.dirname(lock_of(folder))


def is_own(folder: str) -> bool:
    """Is it there, made by this user, and no link?"""
    try:
        found = [os.lstat(path) for path in (top_of(folder), folder)]
    except OSError:
        return False
    return all(stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() for status in found)


def hold(folder: str, owner: str = "") -> int:
    """Make the folder if need be; a descriptor that marks it as used by a process of that owner's. Raises OSError."""
    lock = lock_of(folder)
    for made in (top_of(folder), folder):
        os.makedirs(made, mode=0o700, exist_ok=True)
    if not is_own(folder):
        raise PermissionError(errno.EPERM, f"{folder} was made by another user, or is a link")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until_s = time.monotonic() + LINGER_S
        while not _is_held(fd, owner.encode()):
            if time.monotonic() > until_s:
                raise BlockingIOError(errno.EBUSY, f"{folder} is used by another job with the same id")
            time.sleep(LINGER_S / 50)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_held(fd: int, owner: bytes) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):  # not a byte is free: it is taken without a name, then
            os.pwrite(fd, owner, 0)
            os.ftruncate(fd, len(owner))
    except BlockingIOError:
        pass  # somebody has it, perhaps of this job
    fcntl.flock(fd, fcntl.LOCK_SH)
    if os.pread(fd, 1 << 10, 0) in (owner, b""):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def is_used(folder: str) -> bool:
    """Does a worker live that holds it?"""
    try:
        fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to judge
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
