"""What this machine allows: checked before anything starts, so that a job does not die half way up.

Every refusal here is exit code 78: the command line is right, the machine or its set-up is not. Estimates are low on purpose; a
job that they refuse cannot run.
"""

import os
from collections.abc import Mapping

from hyperpodrun.cli.refusal import MachineRefusal, quoted

OWN_FILES = 40
"""Descriptors of the launcher beside the ranks': sockets, epoll, libraries that are being loaded, job files."""
FILES_PER_RANK = 4
"""Two pipes, both ends of which are open while the worker starts."""
OWN_PROCESSES = 4
"""Keeper, agent, forkserver, and one helper."""


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def count_gpus(environment: Mapping[str, str]) -> tuple[int, str]:
    """(GPUs that workers would see, "") or (0, why the driver could not be asked)."""
    from hyperpodrun.agent.health import gpus

    try:
        return len(gpus.visible_gpus(dict(environment))), ""
    except gpus.GpuQueryError as error:
        return 0, str(error).rstrip(".") or "no reason given"


def check_limits(workers: int) -> None:
    """Refuse when this process's limits cannot hold that many workers."""
    import resource

    files_needed = OWN_FILES + FILES_PER_RANK * workers
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < files_needed:
        raise MachineRefusal(
            f"the limit on open files is {files} and {workers} worker(s) need about {files_needed}; "
            f"raise it with ulimit -n {files_needed} or start fewer workers"
        )
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes == resource.RLIM_INFINITY or os.geteuid() == 0:  # the kernel exempts root
        return
    needed = OWN_PROCESSES + workers
    running = _own_tasks(os.getuid()) if needed < processes < 10 * needed + 10_000 else 0
    if running + needed > processes:
        raise MachineRefusal(
            f"the limit on processes is {processes}, {running} are running and {workers} worker(s) need {needed} more; "
            f"raise it with ulimit -u or start fewer workers"
        )


def _own_tasks(uid: int) -> int:
    """Threads of all of a user's processes, which is what RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended meanwhile
    return count


def check_host(host: str, source: str) -> None:
    """Refuse a host that this machine has no address for: torch would try again and again for half an hour."""
    import socket

    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MachineRefusal(
            f"{source}: the host {quoted(host)} cannot be resolved ({reason}); give an address, or a name that this machine knows"
        ) from None


def loopback_works() -> bool:
    """Whether there is a route to this machine itself. A fresh network namespace has none."""
    import socket

    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # of a datagram socket: asks for the route, sends nothing
            return True
        except OSError:
            continue
    return False


def check_log_dir(path: str, source: str, *, create: bool) -> None:
    """Refuse when log files could not be written below `path`. With `create` the folder is made and really written to."""
    try:
        if os.path.exists(path) and not os.path.isdir(path):
            raise NotADirectoryError(0, "it is not a directory")
        if create:
            os.makedirs(path, exist_ok=True)
            probe = os.path.join(path, f".hyperpodrun-{os.getpid()}-{os.urandom(4).hex()}")
            os.mkdir(probe)
            os.rmdir(probe)
            return
        nearest = os.path.abspath(path)
        while not os.path.lexists(nearest):
            nearest = os.path.dirname(nearest)
        if not os.path.isdir(nearest):
            raise NotADirectoryError(0, f"{quoted(nearest)} is no directory")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(0, f"{quoted(nearest)} cannot be written to")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MachineRefusal(f"{source}: log files cannot be written under {quoted(path)}: {reason}") from None
