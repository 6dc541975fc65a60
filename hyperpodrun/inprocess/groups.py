"""torch's process groups: freeing what is blocked in them, and forgetting them.

`free` may run while another thread is inside a collective, or still building a group; `forget` after the function has been left.
What torch keeps of groups (`_world`) is emptied here and not by `destroy_process_group`, which waits for an outstanding operation
and, when a group's making was broken off, leaves a counter behind from which the next names are made: the next init would wait
for ever for keys that the other ranks call by another name. The groups themselves are let go of in a thread, once the
function's frames hold none of them (`frames_are_gone`): their destructors join gloo's threads, which takes tens of milliseconds, or
for ever where an operation is still waiting, and is nobody's business.
Source: torch/distributed/distributed_c10d.py (2.4 to 2.13), `_abort_process_group`, `destroy_process_group`.
"""

import importlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hyperpodrun import ending
from hyperpodrun.agent.wire import names
from hyperpodrun.inprocess import bounded, sockets

_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state", "comms")
_HOOK = "init_process_group.<locals>._distributed_excepthook"
_STORE_AFTER_S = 0.05
"""The agent has ended the generation's store: clients get its error by themselves, nearly always."""


def free(left: Callable[[float], bool]) -> None:
    """Tear what a blocked call waits for. `left(seconds)` waits so long, and says whether the function has been left meanwhile."""
    sockets.shut_gloo()
    _abort_nccl()
    if left(_STORE_AFTER_S):
        return
    host, port = os.environ.get(names.MASTER_ADDR, ""), os.environ.get(names.MASTER_PORT, "")
    if host and port.isdigit():
        sockets.shut_connections_to(host, int(port))
    sockets.shut_gloo()  # made since: by a group that was being built
    world = os.environ.get(names.WORLD_SIZE, "")
    sockets.come_for_missing_peers(int(world) if world.isdigit() else 1)


def forget(timeout_s: float) -> None:
    """No group is left, and the next `init_process_group` begins as in a new process. Raises bounded.TookTooLong."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    sockets.shut_gloo()
    _abort_nccl()
    world = c10d._world
    kept = [*list(getattr(world, "pg_map", ())), *list(getattr(world, "comms", ()))]
    c10d._update_default_pg(None)
    for name in _MAPS:
        held = getattr(world, name, None)
        if held is not None:
            held.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    forget_meshes()
    _unhook()
    _let_go(kept, timeout_s)


def forget_meshes() -> None:
    """DTensors are made anew too.

    What torch has worked out for an operation it keeps with the mesh that it saw first, and takes meshes of the same ranks for equal:
    a process that is another rank now would be given results that lie where the old rank was.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug: Any = importlib.import_module("torch.distributed.tensor.debug")
    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        if hasattr(debug, name):
            getattr(debug, name)()
            return


def _unhook() -> None:
    """Each `init_process_group` puts a hook over `sys.excepthook`, which prefixes a traceback with the rank, and none takes it off."""
    hook: Any = sys.excepthook
    while getattr(hook, "__qualname__", "") == _HOOK:
        hook = inspect.getclosurevars(hook).nonlocals["old_hook"]
    sys.excepthook = hook


def _abort_nccl() -> None:
    """Every NCCL communicator of this process, at the same time: one that waits for another's must not hold it up."""
    threads = [
        threading.Thread(target=_quietly, args=(backend,), name="hyperpodrun-nccl-abort", daemon=True)
        for backend in _nccl_backends()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _nccl_backends() -> list[Any]:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    torch: Any = sys.modules.get("torch")
    kind = getattr(c10d, "ProcessGroupNCCL", None)
    if c10d is None or kind is None:
        return []
    found: dict[int, Any] = {}
    for group in list(c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue
        if isinstance(backend, kind):
            found[id(backend)] = backend
    return list(found.values())


def _quietly(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError:
        pass  # it was already


_letting_go: list[threading.Thread] = []
_frames_gone = threading.Event()
FRAMES_S = 10.0
"""For those who never say that they are."""


GONE_S = 0.3


def end_of_former() -> None:
    """A new generation has begun: what is left of the groups before it goes first, where that does not take long.

    What counts descriptors and threads when the function is entered shall not find two generations'.
    """
    for thread in _letting_go:
        thread.join(GONE_S)


def frames_are_gone() -> None:
    """What the function had in its hands is gone: the last references to its groups are those here."""
    _frames_gone.set()


def _let_go(groups: list[Any], timeout_s: float) -> None:
    """Drop the last references elsewhere. Only what an earlier restart has left is waited for: nothing may pile up."""
    deadline_s = time.monotonic() + timeout_s
    for thread in _letting_go:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            raise bounded.TookTooLong(f"the process groups of the generation before did not end within {timeout_s:g} s")
    _letting_go.clear()
    if groups:
        _frames_gone.clear()
        _letting_go.append(ending.thread(_drop, groups, name="let-go", stop=frames_are_gone))


def _drop(groups: list[Any]) -> None:
    _frames_gone.wait(FRAMES_S)
    groups.clear()
