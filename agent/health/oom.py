"""Did the kernel's out-of-memory killer strike among our processes? Only the cgroup's own counter answers that.

A worker that was SIGKILLed says nothing; the kernel log is not readable in containers. But each memory cgroup counts:

- v2: `oom_kill` in memory.events, which includes the groups below (cgroup-v2.rst). The victim's own group counts, whoever's
  limit was hit, so the launcher's group sees every kill among its workers and none among its neighbours;
- v1: `oom_kill` in memory.oom_control (Linux 4.13), of the group alone.

The launcher's group may have no such file (memory controller not enabled there, or the path is one of the host's while only a
part of the tree is mounted here): then the nearest group above that has it counts, neighbours included.
"""

_UNLIMITED_BYTES = 1 << 60
"""v1 writes a number near 2**63 for "no limit"."""


class OomWatch:
    """`root` is where cgroups are mounted, `membership` the text of /proc/self/cgroup (both given in tests)."""

    def __init__(self, root: str = "/sys/fs/cgroup", membership: str | None = None) -> None:
        self._folders = _own_and_above(root, _own_membership() if membership is None else membership)
        self._counter = next((path for path in map(_counter_path, self._folders) if path), None)
        self._before = self._read()

    def snapshot(self) -> None:
        """Count from now on."""
        self._before = self._read()

    def killed_since(self) -> int | None:
        """Processes killed since the last snapshot; None when it cannot be known."""
        now = self._read()
        if now is None or self._before is None:
            return None
        return max(0, now - self._before)

    def limit_bytes(self) -> int | None:
        """The tightest memory limit on the launcher's group; None when there is none, or none to be seen."""
        limits = []
        for folder in self._folders:
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _text(f"{folder}/{name}").strip()
                if text.isdecimal() and int(text) < _UNLIMITED_BYTES:
                    limits.append(int(text))
        return min(limits, default=None)

    def _read(self) -> int | None:
        return None if self._counter is None else _oom_kills(self._counter)


def _own_membership() -> str:
    return _text("/proc/self/cgroup")


def _own_and_above(root: str, membership: str) -> list[str]:
    """The folder of each cgroup that bears on this process's memory, the nearest first; v1's memory hierarchy before v2."""
    v1, v2 = [], []
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            v1 += _chain(f"{root}/memory", path)
        elif number == "0" and not controllers:
            v2 += _chain(root, path) + _chain(f"{root}/unified", path)
    return v1 + v2


def _chain(top: str, path: str) -> list[str]:
    """The folders from `top`/`path` up to `top`. A path outside of our cgroup namespace begins with /..: nothing here has it."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return ["/".join([top, *parts[:count]]) for count in range(len(parts), -1, -1)]


def _counter_path(folder: str) -> str | None:
    for name in ("memory.events", "memory.oom_control"):
        path = f"{folder}/{name}"
        if _oom_kills(path) is not None:
            return path
    return None


def _oom_kills(path: str) -> int | None:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _text(path: str) -> str:
    """A small kernel file; "" when it is missing or unreadable."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
