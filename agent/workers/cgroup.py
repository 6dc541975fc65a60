"""A cgroup of the workers' own, where one is to be had: cgroup.kill then ends them all in one write.

Only where cgroup v2 is mounted and the launcher's own cgroup was delegated (we may make folders in it and move processes). No
controller is switched on, so limits and accounting stay where they were. Everywhere else this does nothing; sweeps find the
processes by their parents in any case. Source: cgroups(7), kernel documentation admin-guide/cgroup-v2 ("cgroup.kill").
"""

import os
from collections.abc import Iterable


class WorkerCgroup:
    """`root` is where cgroup v2 is mounted, `membership` the text of /proc/self/cgroup (both given in tests)."""

    def __init__(self, name: str, root: str = "/sys/fs/cgroup", membership: str | None = None) -> None:
        self._folder: str | None = None
        own = self._own(root, membership)
        if own is None or not os.access(os.path.join(own, "cgroup.procs"), os.W_OK):
            return
        folder = os.path.join(own, f"hyperpodrun-{name}")
        try:
            os.mkdir(folder)
        except FileExistsError:
            pass  # made by this job's agent before the present one
        except OSError:
            return  # not delegated
        self._folder = folder
        if not os.path.exists(os.path.join(folder, "cgroup.kill")):
            self.remove()  # kernel before 5.14

    @staticmethod
    def _own(root: str, membership: str | None) -> str | None:
        if not os.path.exists(os.path.join(root, "cgroup.controllers")):
            return None  # cgroup v1 or none
        if membership is None:
            try:
                with open("/proc/self/cgroup") as file:
                    membership = file.read()
            except OSError:
                return None
        for line in membership.splitlines():
            if line.startswith("0::"):
                return os.path.normpath(root + line[3:])
        return None

    def add(self, pids: Iterable[int]) -> None:
        """Move these processes in. One that is gone, or may not be moved, stays where it is."""
        if self._folder is None:
            return
        for pid in pids:
            try:
                with open(os.path.join(self._folder, "cgroup.procs"), "w") as file:
                    file.write(str(pid))
            except OSError:
                continue

    def kill(self) -> None:
        """SIGKILL to all in it, children made meanwhile included."""
        if self._folder is None:
            return
        try:
            with open(os.path.join(self._folder, "cgroup.kill"), "w") as file:
                file.write("1")
        except OSError:
            pass  # the sweep ends them one by one

    def remove(self) -> None:
        """Remove the (by now empty) cgroup."""
        if self._folder is None:
            return
        try:
            os.rmdir(self._folder)
        except OSError:
            return  # not empty: something unkillable is in it, it was reported
        self._folder = None
