"""Ending the DataLoader iterators of this process, and no other children of it.

An iterator owns worker processes and, with pin_memory, a thread. torch's own way waits up to five seconds for each worker that is
busy; here workers are asked, given GRACE_S together, and then killed: what they were fetching is not wanted any more. torch's watch
over their deaths (a SIGCHLD handler that raises) is told first.
Source: torch/utils/data/dataloader.py, "Data Loader Multiprocessing Shutdown Logic".
"""

import gc
import multiprocessing
import sys
import time
from typing import Any

GRACE_S = 0.2
_STARTERS = tuple(f"multiprocessing.popen_{way}" for way in ("fork", "spawn_posix", "forkserver"))
"""Imported when the first worker process is started: the workers may all be dead by now, and their iterators still there."""


def shut_down() -> None:
    """End all of them. Iterating one of them again raises StopIteration or an error; a loader makes new ones."""
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    if module is None or not any(name in sys.modules for name in _STARTERS):
        return  # without worker processes there was never anything to end, and looking for iterators is slow
    kind = module._MultiProcessingDataLoaderIter
    iterators = [one for one in gc.get_objects() if issubclass(type(one), kind)]  # isinstance would run proxies' code
    for iterator in iterators:
        _ask(module, iterator)
    deadline_s = time.monotonic() + GRACE_S
    mine = {child.pid for child in multiprocessing.active_children()}
    for iterator in iterators:
        for worker in getattr(iterator, "_workers", ()):
            if worker.pid in mine:
                worker.join(max(0.0, deadline_s - time.monotonic()))
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    for iterator in iterators:
        iterator._shutdown_workers()
    _forget_persistent([one for one in iterators if getattr(one, "_persistent_workers", False)])


def _ask(module: Any, iterator: Any) -> None:
    if getattr(iterator, "_worker_pids_set", False):
        module._utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    if getattr(iterator, "_shutdown", True) or not hasattr(iterator, "_workers_done_event"):
        return
    iterator._workers_done_event.set()
    for queue in getattr(iterator, "_index_queues", ()):
        queue.put(None)


def _forget_persistent(iterators: list[Any]) -> None:
    """A DataLoader with persistent_workers keeps its iterator and would use its dead workers again."""
    gone = {id(one) for one in iterators}
    kind: Any = sys.modules["torch.utils.data.dataloader"].DataLoader
    for loader in gc.get_objects() if gone else ():
        if issubclass(type(loader), kind) and id(getattr(loader, "_iterator", None)) in gone:
            loader._iterator = None
