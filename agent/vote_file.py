"""The durable vote of this slot (MESH A2): on tmpfs, written whole and renamed before anything that rests on it is sent.

It survives the agent and the launcher, not the host: a rebooted host has forgotten, and so it is another incarnation. One file a
job and slot; removed when the job ends. A full or missing tmpfs costs this node its vote, not the job: without the file it comes
back as another incarnation, which is safe.
"""

import hashlib
import os
from collections.abc import Callable

import msgspec

from hyperpodrun.agent.wire.mesh import Vote

FOLDERS = ("/dev/shm", "/run/shm", "/tmp")


def path_for(job_id: str, slot: str) -> str:
    """Where this slot's vote lies."""
    key = hashlib.blake2b(f"{job_id}\0{slot}".encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    folder = next((folder for folder in FOLDERS if os.access(folder, os.W_OK)), FOLDERS[-1])
    return os.path.join(folder, f"hyperpodrun-{os.getuid()}-{key}.vote")


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
