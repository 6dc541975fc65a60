"""Where logs and error files lie, and files that a full disk does not make dangerous.

Layout (torchrun's): `<log_dir>/<job_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}` and, for the
duplicate filters, `<log_dir>/<job_id>_<random>/attempt_<n>/filtered_{stdout,stderr}.log`.

States of a log file: *good*, *failing* (the last write was refused; after a second without room it is tried again), *given up*
(an error that does not pass).
Invariants: a file holds a stream's bytes untouched, and all of them unless an error was reported; writing never raises.
"""

import errno
import os
from collections.abc import Callable

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT})
_RETRY_S = 1.0
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_NAME_LENGTH = 100


def folder_name(job_id: str) -> str:
    """A job id as one path component: other characters than letters, digits, ".", "_" and "-" become "_"."""
    name = "".join(c if c in _NAME_CHARACTERS else "_" for c in job_id[:_NAME_LENGTH]).lstrip(".")
    return name or "job"


def make_unique(parent: str, stem: str, mode: int = 0o777) -> str:
    """Make and return the new folder `<parent>/<stem>_<random>`. Raises OSError."""
    while True:
        path = f"{parent}/{stem}_{os.urandom(4).hex()}"
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            continue
        return path


def make_run_folder(log_dir: str, job_id: str) -> str:
    """Make `log_dir` if need be, and in it a new folder for this run. Raises OSError that names the path."""
    if os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), log_dir)
    os.makedirs(log_dir, exist_ok=True)
    return make_unique(log_dir, folder_name(job_id))


def make_temporary_folder() -> str:
    """Make a folder, private to this user, in the first place that takes one. Raises the last place's OSError."""
    places = [os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp", "/dev/shm", os.curdir]
    for place in places[:-1]:
        try:
            return make_unique(os.path.abspath(place), "hyperpodrun", 0o700)
        except OSError:
            continue
    return make_unique(os.path.abspath(places[-1]), "hyperpodrun", 0o700)


class LogFile:
    """One stream's copy. `on_trouble(path, reason)` is called when a write is refused for the first time. `anew`: what an earlier
    process wrote there is dropped.
    """

    def __init__(self, path: str, now_s: Callable[[], float], on_trouble: Callable[[str, str], None], anew: bool = True) -> None:
        self.path = path
        self.missing_bytes = 0
        self._now_s = now_s
        self._on_trouble = on_trouble
        self._retry_at_s = 0.0
        self._given_up = False
        self._fd = -1
        try:
            truncate = os.O_TRUNC if anew else 0
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | truncate | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._trouble(error)

    def write(self, data: bytes) -> None:
        """Append `data`; what cannot be written is counted in `missing_bytes`."""
        if self._given_up or (self.missing_bytes and self._now_s() < self._retry_at_s):
            self.missing_bytes += len(data)
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._trouble(error)
            self.missing_bytes += len(rest)

    def close(self) -> None:
        """Nothing more comes."""
        self._given_up = True
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError as error:  # NFS tells of a full server only now
                self._on_trouble(self.path, os.strerror(error.errno or 0))

    def _trouble(self, error: OSError) -> None:
        self._retry_at_s = self._now_s() + _RETRY_S
        if error.errno not in _PASSING or self._fd < 0:
            self._given_up = True
        self._on_trouble(self.path, os.strerror(error.errno or 0))
