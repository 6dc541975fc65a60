"""Two jobs of one name at once on this node: the later one gets a name of its own.

Theory. What a job keeps for its return, the training state in shared memory, is found by its name. Names come from schedulers and
from copied command lines, so two jobs that run at once may have the same one, and each would go on from the other's state. So a
launcher writes the name that it wants into its run folder and then looks into those of all launchers of this user that live: of two
that start together at least one sees the other. Who sees another takes a name that nobody else has. One that is on its way out
(its keeper is dead, or it is being stopped) is waited for, since this job may be the same one that comes back.

Invariant: the file stays as it is from then on, and as long as the keeper lives: an agent that follows a dead one goes by it.
Jobs of several nodes need none of this: their ports keep them apart.
"""

import os
import signal
import time

from hyperpodrun.agent import run_dir
from hyperpodrun.agent.keeper import STOP_SIGNALS
from hyperpodrun.cli.jobs import Job, running
from hyperpodrun.cli.speech import remark

NAME = "name"
LOOK_EVERY_S = 0.05
LEAVING = ("stopping", "ended")
"""States of policy/job.py from which no job comes back."""


def settle(wanted: str, folder: str, unique: str) -> tuple[str, str]:
    """(the name that this job has, what is to be said about it or ""). `folder`: of this launcher."""
    try:
        return _settle(wanted, folder, unique)
    except OSError as error:
        name = f"{wanted}.{unique}"
        return name, (
            f"the id {wanted} cannot be taken, for nothing can be written to {folder} ({error.strerror}): this job is called {name}, "
            "and does not come back under its id"
        )


def _settle(wanted: str, folder: str, unique: str) -> tuple[str, str]:
    try:
        with open(os.path.join(folder, NAME), "rb") as file:
            return os.fsdecode(file.read()), ""
    except FileNotFoundError:
        pass
    _write(folder, wanted)
    told = False
    while namesakes := [path for path in _others(folder) if _name_in(path) == wanted]:
        jobs = [job for job in running() if job.run_dir in namesakes]
        staying = [job for job in jobs if not _leaves(job)]
        if staying or signal.sigpending() & set(STOP_SIGNALS):
            name = f"{wanted}.{unique}"
            _write(folder, name)
            return name, (
                f"another job with the id {wanted} runs on this node: this one is called {name}, so that neither goes on from the "
                "other's training state. Give each a --job-id of its own to bring it back under that"
            )
        if not told:
            told = True
            remark("hyperpodrun", f"waiting for the job with the id {wanted} that is about to end on this node")
        time.sleep(LOOK_EVERY_S)
    return wanted, ""


def _others(folder: str) -> list[str]:
    return [path for base in run_dir.bases() for path in run_dir.living(base) if path != folder]


def _leaves(job: Job) -> bool:
    if job.status is None:
        return False
    return job.status.state in LEAVING or not os.path.exists(f"/proc/{job.status.pid}")


def _name_in(folder: str) -> str | None:
    try:
        with open(os.path.join(folder, NAME), "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return None


def _write(folder: str, name: str) -> None:
    draft = os.path.join(folder, f"{NAME}.new")
    with open(draft, "wb") as file:
        file.write(os.fsencode(name))
    os.replace(draft, os.path.join(folder, NAME))
