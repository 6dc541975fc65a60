"""The last version of a process that is replaced by decision while it waits at the restart barrier.

Theory. Versions are some steps apart (pace.py), and in between the newest state is in the processes alone. So before they end, those
of a node write it down: the live parts, by whoever of them has them, and the small states of the last two commits, also those kept
for ranks that have died (ranks may be one step apart, and which step is whole is seen by the plan only). Nobody coordinates: a lock
for each name, which who writes a version takes, too, and who finds written what it has leaves it at that.

The older of two versions of a shard is overwritten only when the newer one is known to be whole on all nodes; else, and for small
states always, there are further files, of which the one of the step that was restored last stays. They go once a version made since
is whole.

Invariants: what was whole before is whole afterwards; live parts are written only if they are.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b

from hyperpodrun.recovery import shard, shm
from hyperpodrun.recovery.held import blob
from hyperpodrun.recovery.memory import KEPT, Memory
from hyperpodrun.recovery.plan import went_to


def write(folder: str, mine: Memory, whole: int | None) -> None:
    """What this process has and the folder has not. `whole`: the step of the newest version, if it is known to be whole.

    Raises OSError: there is no room for all of it.
    """
    if mine.before is not None:
        write(folder, mine.before, None)
    restored = went_to(mine.history[-1]) if mine.history else -1
    small = {f"common {mine.key}": mine.common, **mine.private}
    for name, kept in sorted(small.items()):
        with alone(folder, name):
            for step in kept.steps()[-KEPT:]:
                steps = _steps(folder, name, shm.PARTING)
                others = [at for at in steps if at != restored]
                full = len(steps) == len(shm.PARTING) and step < min(others)
                if step not in (*steps, *_steps(folder, name, shm.VERSIONS)) and not full:
                    made = blob(name, kept.get(step) or b"")
                    shm.Slots(folder, name, shm.PARTING).write(step, made, mine.history, restored)
    if not mine.whole or not mine.untouched:
        return
    with alone(folder, mine.key):
        if mine.step > max(_steps(folder, mine.key, shm.VERSIONS + shm.PARTING), default=-1):
            files, keep = (shm.PARTING[:2], restored) if whole is None else (shm.VERSIONS, whole)
            shm.Slots(folder, mine.key, files).write(mine.step, shard.of(mine.parts, mine.kin), mine.history, keep)


def forget(folder: str) -> None:
    """What was left by processes of earlier generations is not needed any more."""
    for name in os.listdir(folder):
        if name.endswith(shm.PARTING):
            with suppress(FileNotFoundError):  # another rank of the node was faster
                os.unlink(os.path.join(folder, name))


def _steps(folder: str, name: str, files: tuple[str, ...]) -> list[int]:
    return [version.step for version in shm.Slots(folder, name, files).found()]


@contextmanager
def alone(folder: str, name: str) -> Iterator[None]:
    """Nobody else of this node writes that meanwhile, in this way or (nodestate.py) the usual one."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, blake2b(name.encode(), digest_size=10).hexdigest() + ".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
