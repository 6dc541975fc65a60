"""The agent's part in the node's versions of the training state: it ends them with the job.

A job that succeeded needs them no more. One that failed or was stopped may be started again under the same id and goes on from
them, so they stay, and a line says so; where the id was drawn by chance nobody could, so they go. What jobs that were killed whole
left behind is removed by later agents of the same user, once it is `KEPT_S` old and no worker holds it.
"""

import os
import shutil
import time
from collections.abc import Callable

from hyperpodrun.agent.wire.node_state import BASE, folder_of, is_used, prefix

KEPT_S = 24 * 3600.0


def end(job_id: str, node: str, success: bool, by_chance: bool, say: Callable[[str], None]) -> None:
    """The job is over on this node and none of its workers runs here any more."""
    folder = folder_of(job_id, node)
    if not os.path.isdir(folder) or is_used(folder):
        return
    if success or by_chance:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(
            f"the training state stays in {folder}: started again with the id {job_id} on this host, the job goes on from it. "
            "Remove the folder if that is not wanted"
        )


def remove_old(job_id: str, node: str, say: Callable[[str], None], base: str = BASE) -> None:
    """Remove what jobs of this user left behind that were killed long ago."""
    mine = folder_of(job_id, node, base)
    try:
        names = [name for name in os.listdir(base) if name.startswith(prefix())]
    except OSError:
        return
    removed = 0
    for folder in (os.path.join(base, name) for name in names):
        if folder != mine and _is_old(folder) and not is_used(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    if removed:
        say(f"removed the training state of {removed} job(s) that were killed on this host more than {KEPT_S / 3600:g} hours ago")


def _is_old(folder: str) -> bool:
    try:
        status = os.lstat(folder)
        return status.st_uid == os.getuid() and status.st_mtime < time.time() - KEPT_S
    except OSError:
        return False
