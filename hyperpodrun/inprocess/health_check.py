"""Is this process, its device, its node fit for another generation? Asked after finalize, before the barrier.

A check is any callable without arguments; it raises HealthCheckError (or anything else) when the answer is no. The process is then
replaced; `HealthCheckError(reason, rung="replace")` asks for another node. Checks are put together in a list or with `All`:

    @HPWrapper(health_check=[CudaHealthCheck(), FaultCounter(max_faults=5), DiskSpace("/checkpoints", 10 << 30), my_check])
"""

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hyperpodrun.agent.wire.link import Rung
from hyperpodrun.inprocess import bounded
from hyperpodrun.inprocess.errors import HealthCheckError

Check = Callable[[], Any]


class All:
    """Several checks, in order; the first that fails ends it. Lists and None are taken too."""

    def __init__(self, *checks: Check | Iterable[Any] | None) -> None:
        self.checks = tuple(_flatten(checks))

    def __call__(self) -> None:
        """Raises what the first failing check raises."""
        for check in self.checks:
            check()


def _flatten(checks: Iterable[Any]) -> Iterable[Check]:
    for check in checks:
        if check is None:
            continue
        if callable(check):
            yield check
        elif isinstance(check, (list, tuple)):
            yield from _flatten(check)
        else:
            raise TypeError(f"health_check: {check!r} cannot be called; give functions without arguments, which raise when unfit")


class CudaHealthCheck:
    """The current CUDA device finishes what it has, and multiplies two small matrices right, within `timeout` seconds.

    Nothing without CUDA, and where the process has not touched it yet. The factors are small whole numbers, so that the sum of the
    product is exact, and known from sums of the factors.
    """

    def __init__(self, timeout: float = 30.0, size: int = 256) -> None:
        self.timeout_s = float(timeout)
        self.size = size

    def __call__(self) -> None:
        """Raises HealthCheckError."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return
        device = torch.cuda.current_device()
        try:
            right = bounded.run(lambda: self._multiply(torch, device), self.timeout_s, "cuda-health-check")
        except bounded.TookTooLong as error:
            raise HealthCheckError(f"CUDA device {device} does not answer: it had {self.timeout_s:g} s") from error
        except Exception as error:
            raise HealthCheckError(f"CUDA device {device} is unusable: {error}") from error
        if not right:
            raise HealthCheckError(
                f"CUDA device {device} computes wrongly: a product of two small matrices differs", rung="replace"
            )

    def _multiply(self, torch: Any, device: int) -> bool:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)
        numbers = torch.arange(self.size, dtype=torch.float32, device=device)
        left = (numbers[:, None] + 3 * numbers[None, :]) % 7
        product = left @ left.T  # sums of whole numbers below 2**24: exact in float32, TF32's factors included
        total = float(product.double().sum().item())
        columns = left.double().sum(0)
        return total == float((columns * columns).sum().item())


class FaultCounter:
    """At most `max_faults` restarts of this process, of those in the last `window` seconds (None: ever). Then it is replaced."""

    def __init__(self, max_faults: int | None = None, window: float | None = None, rung: Rung = "inplace") -> None:
        self.max_faults = max_faults
        self.window_s = window
        self.rung = rung
        self._at_s: deque[float] = deque()

    def __call__(self) -> None:
        """Counts one. Raises HealthCheckError."""
        now_s = time.monotonic()
        self._at_s.append(now_s)
        if self.window_s is not None:
            while self._at_s[0] < now_s - self.window_s:
                self._at_s.popleft()
        if self.max_faults is not None and len(self._at_s) > self.max_faults:
            when = "" if self.window_s is None else f" within {self.window_s:g} s"
            raise HealthCheckError(f"{len(self._at_s)} restarts{when} (FaultCounter: {self.max_faults})", self.rung)


class DiskSpace:
    """At least `free_bytes` and `free_inodes` are left to this user on the file system of `path`."""

    def __init__(self, path: str | os.PathLike[str], free_bytes: int = 1 << 30, free_inodes: int = 0) -> None:
        self.path = os.fspath(path)
        self.free_bytes = free_bytes
        self.free_inodes = free_inodes

    def __call__(self) -> None:
        """Raises HealthCheckError, which asks for another node."""
        try:
            free_bytes, free_inodes = shutil.disk_usage(self.path).free, os.statvfs(self.path).f_favail
        except OSError as error:
            raise HealthCheckError(f"{self.path} cannot be read: {error.strerror}", rung="replace") from error
        if free_bytes < self.free_bytes:
            raise HealthCheckError(f"{self.path}: {_mib(free_bytes)} MiB free, {_mib(self.free_bytes)} wanted", rung="replace")
        if free_inodes < self.free_inodes:
            raise HealthCheckError(f"{self.path}: {free_inodes} inodes free, {self.free_inodes} wanted", rung="replace")


class SharedMemorySpace(DiskSpace):
    """The same for /dev/shm, in which copies of the state and cached batches lie."""

    def __init__(self, free_bytes: int = 64 << 20) -> None:
        super().__init__("/dev/shm", free_bytes)


def _mib(size_bytes: int) -> int:
    return size_bytes >> 20
