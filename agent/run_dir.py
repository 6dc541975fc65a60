"""The launcher's private folder: error files, sockets, status. Made at the start, gone at the end.

Its file `lock` is held with flock(2) by keeper and agent (one open file description, shared over fork): the folder of a launcher
that was killed is told by its free lock, and the next launcher of the same user removes it.

Standard library only: the keeper uses it.
"""

import fcntl
import os
from collections.abc import Iterator

PREFIX = "hyperpodrun"
STATUS = "status.json"


def bases() -> list[str]:
    """Folders to try for private files, best first: $TMPDIR, /tmp, /dev/shm, /var/tmp, the working folder."""
    wanted = [os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp"]
    try:
        wanted.append(os.getcwd())
    except OSError:
        pass  # the working folder was removed: one candidate fewer
    return list(dict.fromkeys(os.path.abspath(base) for base in wanted if base))


class RunDir:
    """`path` is the folder, `lock_fd` keeps it ours."""

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    def remove(self) -> None:
        """Remove the folder and all in it, subfolders that were made unreadable too; a folder that is gone already is fine."""
        import shutil  # 8 ms to import: not on the way to the first worker

        shutil.rmtree(self.path, ignore_errors=True)
        if os.path.isdir(self.path) and not os.path.islink(self.path):
            _unlock(self.path)
            shutil.rmtree(self.path, ignore_errors=True)


def create() -> RunDir:
    """Make a locked folder in the first base that takes one; raises OSError naming all of them when none does."""
    reasons = []
    for base in bases():
        name = f"{PREFIX}-{os.getuid()}-{os.urandom(6).hex()}"
        # Locked under another name first: what carries the final name is never unlocked while its owner lives.
        draft, final = os.path.join(base, f".{name}"), os.path.join(base, name)
        try:
            os.mkdir(draft, 0o700)
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            continue
        try:
            lock_fd = os.open(os.path.join(draft, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(draft, final)
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            RunDir(draft, -1).remove()
            continue
        return RunDir(final, lock_fd)
    raise OSError("no folder takes a private subfolder for this job (" + "; ".join(reasons) + "): set TMPDIR to a writable one")


def living(base: str) -> list[str]:
    """Folders of this user's launchers below `base` that are running now."""
    return [path for path, dead in _mine(base) if not dead]


def remove_dead() -> None:
    """Remove what launchers of this user left behind that were killed together with their agents."""
    for base in bases():
        for path, dead in _mine(base):
            if dead:
                RunDir(path, -1).remove()


def _unlock(path: str) -> None:
    """Undo chmod: a worker can take its own user the right to look into a folder."""
    try:
        os.chmod(path, 0o700)
        for folder, subfolders, _ in os.walk(path):
            for subfolder in (os.path.join(folder, name) for name in subfolders):
                if not os.path.islink(subfolder):
                    os.chmod(subfolder, 0o700)
    except OSError:
        pass  # gone meanwhile, or not ours: then it stays


def _mine(base: str) -> Iterator[tuple[str, bool]]:
    """(folder, is its launcher dead?) for each run folder of this user."""
    try:
        entries = [entry for entry in os.listdir(base) if entry.startswith(f"{PREFIX}-{os.getuid()}-")]
    except OSError:
        return
    for entry in sorted(entries):
        path = os.path.join(base, entry)
        try:
            if os.lstat(path).st_uid != os.getuid():
                continue  # the name is free to everybody
            fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # being removed right now, or no folder of ours
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path, True
        except OSError:
            yield path, False
        finally:
            os.close(fd)
