"""The durable vote of this slot (MESH A2): on tmpfs, written whole and renamed before anything that rests on it is sent.

It survives the agent and the launcher, not the host: a rebooted host has forgotten, and so it is another incarnation. One file a
job and slot; removed when the job ends. A full or missing tmpfs costs this node its vote, not the job: without the file it comes
back as another incarnation, which is safe.

When all launchers of a job are killed its files stay, so that the same job can go on where it was: but not for ever. An agent renews
its file's time every `RENEW_S`; a file that nobody renewed for `KEPT_S` is of a job that nobody runs any more, and the next agent
of the same user on this host removes it. Should it be wrong (a clock that jumped), a node has lost its vote, which is safe.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Sequence

import msgspec

from hyperpodrun.agent.wire.mesh import Vote

FOLDERS = ("/dev/shm", "/run/shm", "/tmp")
RENEW_S = 3600.0
KEPT_S = 7 * 24 * 3600.0


def path_for(job_id: str, slot: str) -> str:
    """Where this slot's vote lies."""
    key = hashlib.blake2b(f"{job_id}\0{slot}".encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    folder = next((folder for folder in FOLDERS if os.access(folder, os.W_OK)), FOLDERS[-1])
    return os.path.join(folder, f"{_prefix()}{key}.vote")


def remove_old(mine: str, say: Callable[[str], None], folders: Sequence[str] = FOLDERS) -> None:
    """Remove this user's votes, but for `mine`, that nobody has renewed for `KEPT_S`; one line says how many."""
    removed: set[str] = set()
    for folder in folders:
        for path in _old_votes(folder):
            if path != mine:
                try:
                    os.unlink(path)
                except OSError:
                    continue  # another agent was quicker
                removed.add(path.partition(".vote")[0])
    if removed:
        say(f"removed {len(removed)} vote file(s) of jobs that were killed on this host more than {KEPT_S / 86400:g} days ago")


def _old_votes(folder: str) -> list[str]:
    """Votes and unfinished drafts (`VoteFile.write`) of this user."""
    latest_s = time.time() - KEPT_S
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(_prefix()) or not entry.name.endswith((".vote", ".new")):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_mtime < latest_s:
                    found.append(entry.path)
    except OSError:
        pass  # no such folder, or not ours to read: what was found so far will do
    return found


def _prefix() -> str:
    return f"hyperpodrun-{os.getuid()}-"


class VoteFile:
    """`say` tells once that the file cannot be written."""

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._broken = False

    def read(self) -> Vote | None:
        """The vote of an earlier life; None when there is none that can be trusted."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.getuid():
                return None  # somebody else put it there
            try:
                return msgspec.msgpack.decode(file.read(), type=Vote)
            except msgspec.DecodeError:
                return None

    def renew(self) -> None:
        """Say that somebody still needs the file."""
        try:
            os.utime(self._path)
        except OSError:
            pass  # it could not be written, or is not there yet

    def write(self, vote: Vote | None) -> None:
        """Replace the file; None removes it."""
        if vote is None:
            self._unlink(self._path)
            return
        draft = f"{self._path}.{os.getpid()}.new"
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(vote))
            os.replace(draft, self._path)
            self._broken = False
        except OSError as error:
            # An old vote must not stay where the new one could not be written: a later life would vote twice.
            self._unlink(draft)
            self._unlink(self._path)
            if not self._broken:
                self._broken = True
                self._say(
                    f"the vote file {self._path} cannot be written ({error.strerror}): should this agent be restarted, it joins the "
                    "job anew. Make room there"
                )

    @staticmethod
    def _unlink(path: str) -> None:
        try:
            os.unlink(path)
        except OSError:
            pass  # it was not there
