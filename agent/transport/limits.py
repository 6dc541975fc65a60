"""Room for descriptors (Z4): a link takes about six, and libzmq spins when it cannot accept.

Source: getrlimit(2); zmq_ctx_set(3) ZMQ_MAX_SOCKETS.
"""

import resource

ENOUGH_FILES = 1 << 16


def raise_open_files() -> int:
    """Raise RLIMIT_NOFILE's soft limit to the hard one (at most 65536). The former soft limit, which workers should get back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft
