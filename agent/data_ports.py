"""The ports on which this node's ranks listen for each other's data, planned before anybody needs them (API section 4, MESH S9).

Local rank r's port is `first` + r, so whoever knows each node's host and first port knows every rank's address. Ports are planned
in aligned blocks. A block is taken by an abstract Unix socket of that name: those live in the network namespace, as TCP ports do,
only one process can have one, and the kernel gives it back when the agent dies. So no two agents of a host plan the same ports,
whatever jobs and users they belong to.

Source: unix(7) on abstract names; ip(7) on ip_local_port_range and ip_local_reserved_ports.
"""

import socket
from collections.abc import Iterable

from hyperpodrun.agent.workers import rendezvous

BLOCK = 16
"""Ports in a block."""
SPAN = 2000
"""So many ports from the wanted one on are looked at."""
RESERVED_PORTS = "/proc/sys/net/ipv4/ip_local_reserved_ports"


class DataPorts:
    """`count` ports from `first` on are this agent's until `close`."""

    def __init__(self, first: int, count: int, held: list[socket.socket]) -> None:
        self.first = first
        self.count = count
        self._held = held

    @property
    def ports(self) -> range:
        """All of them."""
        return range(self.first, self.first + self.count)

    def close(self) -> None:
        """Give them back."""
        for one in self._held:
            one.close()
        self._held = []


def plan(count: int, first: int) -> DataPorts:
    """`count` ports in the first free block, or blocks, from `first` on. Raises OSError with a sentence."""
    for start in range(first, min(first + SPAN, 65536 - count + 1), BLOCK):
        held: list[socket.socket] = []
        for block in range(start // BLOCK, (start + count - 1) // BLOCK + 1):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            held.append(one)
            try:
                one.bind(f"\0hyperpodrun-data-ports-{block}")
            except OSError:
                break
        else:
            if all(rendezvous.is_free(port) for port in range(start, start + count)):
                return DataPorts(start, count, held)
        for one in held:
            one.close()
    raise OSError(f"no {count} free ports in a row from {first} on for data between ranks: give another --data-port")


def exposed(planned: Iterable[int], ephemeral: tuple[int, int], reserved: str) -> str:
    """A sentence when the kernel may give planned ports away to outgoing connections, else "".

    `reserved` is the text of ip_local_reserved_ports, which takes ports out of `ephemeral` (first and last).
    """
    kept = set(_numbers(reserved))
    open_to_all = sorted(port for port in set(planned) - kept if ephemeral[0] <= port <= ephemeral[1])
    if not open_to_all:
        return ""
    ports = _ranges(open_to_all)
    command = f"sysctl -w net.ipv4.ip_local_reserved_ports={_ranges(sorted({*open_to_all, *kept}))}"
    return (
        f"ports {ports}, which this job plans to use, lie in the range from which the kernel serves outgoing connections "
        f"({ephemeral[0]}-{ephemeral[1]}), so another program may hold one when it is needed; to keep them free: {command}"
    )


def reserved_ports() -> str:
    """What the kernel keeps out of its range now."""
    try:
        with open(RESERVED_PORTS) as file:
            return file.read().strip()
    except OSError:
        return ""


def _numbers(text: str) -> Iterable[int]:
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            yield from range(int(first), int(last or first) + 1)


def _ranges(ports: list[int]) -> str:
    parts: list[list[int]] = []
    for port in ports:
        if parts and port == parts[-1][1] + 1:
            parts[-1][1] = port
        else:
            parts.append([port, port])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)
