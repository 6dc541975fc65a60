"""The state of this node's agent, kept in files for people and tools: `<run folder>/status.json` and $HYPERPODRUN_STATUS_FILE.

Written whole and renamed, so a reader sees the old state or the new one. A file that cannot be written is said once and given up:
state files never touch the job.
"""

import os
from collections.abc import Callable

import msgspec

from hyperpodrun.agent import run_dir


class WorkerStatus(msgspec.Struct, frozen=True):
    """One running worker."""

    rank: int
    local_rank: int
    pid: int


class MeshStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How this agent stands in the mesh; `view` is -1 and `mode` "" before its first one.

    `view_at`: when it was adopted here, in Unix seconds. `counters`: totals of this agent's life, see transport.COUNTERS.
    """

    slot: str
    view: int
    mode: str
    members: list[str]
    active: list[str]
    view_at: float
    counters: dict[str, int]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is a state of policy/job.py; `started_at` is in Unix seconds; `pid` is the keeper's.

    `mesh`: None in a job of one node. `faults`: those remembered and what was done, a sentence each, the oldest first.
    """

    job_id: str
    pid: int
    agent_pid: int
    node: str
    generation: int
    restart_count: int
    state: str
    world_size: int
    workers: list[WorkerStatus]
    started_at: float
    run_dir: str
    command: list[str]
    exit_code: int | None = None
    mesh: MeshStatus | None = None
    faults: list[str] = []


class StatusFiles:
    """`extra` is the path asked for by $HYPERPODRUN_STATUS_FILE, or None."""

    def __init__(self, folder: str, extra: str | None, say: Callable[[str], None]) -> None:
        self._paths = [os.path.join(folder, run_dir.STATUS)] + ([extra] if extra else [])
        self._say = say

    def write(self, status: Status) -> None:
        """Replace the files' content."""
        # Arguments need not be UTF-8, JSON must be.
        text = msgspec.json.encode(msgspec.structs.replace(status, command=[_readable(word) for word in status.command]))
        for path in list(self._paths):
            draft = f"{path}.{os.getpid()}.new"
            try:
                with open(draft, "wb") as file:
                    file.write(text + b"\n")
                os.replace(draft, path)
            except OSError as error:
                self._paths.remove(path)
                self._say(f"the status file {path} cannot be written ({error.strerror}); the job goes on without it")
                try:
                    os.unlink(draft)
                except OSError:
                    pass  # it was never made


def _readable(word: str) -> str:
    return word.encode(errors="surrogateescape").decode(errors="replace")
