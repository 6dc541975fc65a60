"""What is torn down between two generations, in parts.

A part has two moments. `free()` is called from another thread while the function still runs, when raising an exception has not made it
leave: it unblocks calls into libraries. Calling the part is called after the function has been left, in any case. Parts run in
the order in which they stand, each for at most its `timeout_s`; one that fails or is late does not stop the others. After a
failure the process is replaced: what could not be torn down might still write into the next generation's memory.

The default order: data loaders of this process (they feed what comes next), torch.distributed (nothing moves any more), async
checkpoint writers (which may have been waiting for a collective), TransformerEngine's communication buffers, where it is loaded.

    abort = AbortAll(AbortDataLoaders(), AbortTorchDistributed(timeout_s=5), my_callable)
"""

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hyperpodrun.inprocess import bounded, groups, loaders
from hyperpodrun.inprocess.finalize import CheckpointlessFinalizeCleanup, Finalize

__all__ = [
    "Abort", "AbortAll", "AbortAsyncCheckpoint", "AbortDataLoaders", "AbortFailed", "AbortTorchDistributed",
    "AbortTransformerEngine", "CheckpointlessAbortManager", "CheckpointlessFinalizeCleanup", "Finalize",
]  # fmt: skip


class AbortFailed(Exception):
    """Parts of the abort failed: the process cannot be used again."""


class Abort:
    """Base class of the parts. Override `__call__`, and `free` when a call into a library has to be unblocked."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s

    def free(self, left: Callable[[float], bool]) -> None:
        """Unblock the function's thread. `left(seconds)` waits at most so long and says whether the function has been left."""

    def __call__(self) -> None:
        """Tear down. Runs in a thread of its own."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__


class AbortTorchDistributed(Abort):
    """All process groups of torch.distributed: NCCL's are aborted at once, gloo's connections are shut down, all are forgotten."""

    def free(self, left: Callable[[float], bool]) -> None:
        """See groups.free."""
        groups.free(left)

    def __call__(self) -> None:
        """See groups.forget."""
        groups.forget(self.timeout_s)


class AbortDataLoaders(Abort):
    """Iterators of this process's DataLoaders: their worker processes end, and their pin-memory threads."""

    def __call__(self) -> None:
        """See loaders.shut_down."""
        loaders.shut_down()


class AbortAsyncCheckpoint(Abort):
    """torch DCP's background process for async_save. A save that was under way stays incomplete.

    Saves on threads end by themselves: with the error of the collective that they wait for, or with their file.
    """

    def __call__(self) -> None:
        """End the process; the next async_save starts another one."""
        module: Any = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
        writer = getattr(module, "_CHECKPOINT_PROCESS", None)
        if writer is None:
            return
        module._CHECKPOINT_PROCESS = None
        process = writer.process
        if process is not None and process.pid in {child.pid for child in multiprocessing.active_children()}:
            process.kill()
            process.join(self.timeout_s)


class AbortTransformerEngine(Abort):
    """TransformerEngine's user buffers, which hold communicators of their own. Nothing when it has not been imported."""

    def __call__(self) -> None:
        """Raises what TransformerEngine raises."""
        module: Any = sys.modules.get("transformer_engine.pytorch.module.base")
        if module is not None and getattr(module, "_ub_communicators", None):
            module.destroy_ub()


class AbortAll(Abort):
    """Several parts, in order. Any callable without arguments may stand among them; its limit is `timeout_s`."""

    def __init__(self, *parts: Callable[[], Any], timeout_s: float = 10.0) -> None:
        super().__init__(timeout_s)
        self.parts = tuple(flatten(parts))

    def free(self, left: Callable[[float], bool]) -> None:
        """All parts at once: one may be waiting for another."""
        threads = [
            threading.Thread(target=part.free, args=(left,), name=f"hyperpodrun-free-{part.name}", daemon=True)
            for part in self.parts
            if isinstance(part, Abort) and type(part).free is not Abort.free
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout_s)

    def __call__(self) -> None:
        """As `run`, without a limit of the whole."""
        self.run(float("inf"))

    def run(self, limit_s: float) -> None:
        """All parts; each starts, but none waits longer than what is left of `limit_s` seconds.

        Raises AbortFailed, which names the parts that failed, after all have run.
        """
        failures = []
        deadline_s = time.monotonic() + limit_s
        for part in self.parts:
            name = part.name if isinstance(part, Abort) else getattr(part, "__name__", type(part).__name__)
            own_s = part.timeout_s if isinstance(part, Abort) else self.timeout_s
            try:
                bounded.run(part, max(0.0, min(own_s, deadline_s - time.monotonic())), name)
            except BaseException as error:  # noqa: BLE001 - the other parts have their turn whatever this one did
                failures.append(f"{name}: {type(error).__name__}: {error}")
        if failures:
            raise AbortFailed("; ".join(failures))


def flatten(parts: Iterable[Any]) -> Iterable[Callable[[], Any]]:
    """The parts in order, whatever they are wrapped in. Raises TypeError."""
    for part in parts:
        if isinstance(part, AbortAll):
            yield from part.parts
        elif isinstance(part, (list, tuple)):
            yield from flatten(part)
        elif callable(part):
            yield part
        else:
            raise TypeError(f"abort: {part!r} cannot be called; give Abort objects or functions without arguments")


class CheckpointlessAbortManager:
    """Where scripts find the default."""

    @staticmethod
    def get_default_checkpointless_abort() -> AbortAll:
        """Data loaders, torch.distributed, async checkpoint writers, TransformerEngine: in this order."""
        return AbortAll(AbortDataLoaders(), AbortTorchDistributed(), AbortAsyncCheckpoint(), AbortTransformerEngine())
