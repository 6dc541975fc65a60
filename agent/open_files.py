"""Room for descriptors (Z4): the mesh needs about six a connection, and libzmq spins when it cannot accept.

The soft limit is raised for this process alone. What is started from here is given the former one back: programs that use select(2)
must not meet descriptors above 1023 because their launcher has many peers (that is what the soft limit is for).

States: *as found*, *raised* (`raise_limit` was called in this process).
Source: getrlimit(2), prlimit(2), select(2) BUGS; zmq_ctx_set(3) ZMQ_MAX_SOCKETS.
"""

import resource

ENOUGH_FILES = 1 << 16

_former: tuple[int, int] | None = None
"""(soft, hard) as this process found them, once it has changed them."""


def raise_limit() -> None:
    """Raise RLIMIT_NOFILE's soft limit to the hard one (at most 65536)."""
    global _former
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _former = _former or (soft, hard)


def give_back(pid: int) -> None:
    """Give this child, which was just started, the limit that this process found."""
    if _former is not None:
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _former)
        except OSError:
            pass  # it has ended already, or became another user's (setuid)
