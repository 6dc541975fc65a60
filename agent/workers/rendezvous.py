"""Address and port of the classic TCPStore (MASTER_ADDR, MASTER_PORT), which rank 0 opens itself.

Between choosing a port and rank 0's bind another program may take it. So the port is chosen below the kernel's ephemeral range,
where nothing gets a port by itself, at random, and tried out on both address families; and when rank 0 still finds it taken
the attempt is repeated with another port without costing a restart (`names_taken_port`, policy/job.py).
Source: ip(7) ip_local_port_range; torch's TCPStore binds the wildcard address of IPv6 and IPv4.
"""

import errno
import random
import re
import socket

FIRST_PORT = 12000
DATA_PORTS = range(18000, 20000)
"""Planned for data between ranks (data_ports.py)."""
MESH_PORTS = range(29400, 29500)
"""Of agents, which may be started later than what would take one of them."""
_MIN_RANGE = 1000
_TRIES = 200
_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to outgoing connections."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first, last = file.read().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999


def loopback() -> str:
    """An address on which ranks of this host reach each other: 127.0.0.1, or ::1 where there is no IPv4."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
            return address
        except OSError:
            continue
    return "127.0.0.1"


def is_free(port: int) -> bool:
    """Can a server bind this port on every address of this host now?"""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            continue  # this family does not exist here
    return True


def choose_port(avoid: frozenset[int] = frozenset()) -> int:
    """A free port, below the ephemeral range where that leaves room. Raises OSError when none is found."""
    first, _ = ephemeral_range()
    if first - FIRST_PORT >= _MIN_RANGE:
        # A generator of our own: the choice must not depend on anybody's seed, or two jobs choose alike.
        chooser = random.SystemRandom()
        for _ in range(_TRIES):
            port = chooser.randrange(FIRST_PORT, first)
            if port not in avoid and port not in DATA_PORTS and port not in MESH_PORTS and is_free(port):
                return port
    for _ in range(_TRIES):
        family = socket.AF_INET6 if loopback() == "::1" else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        if port not in avoid and is_free(port):
            return port
    raise OSError("no free TCP port was found on this host: end what holds them (ss -ltn), or give --master-port")


def names_taken_port(text: str, port: int) -> bool:
    """Does a failed rank's output say that the rendezvous port was in use?"""
    return _TAKEN.search(text) is not None and str(port) in text
