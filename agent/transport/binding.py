"""Where an agent listens: the first free port of its range, on the addresses it may use.

Without a job secret that is this machine only, unless the operator says otherwise: whoever can connect to an unencrypted mesh
can stop the job.
"""

import errno
import socket
from collections.abc import Sequence

import zmq

from hyperpodrun.agent.transport.addresses import endpoint, is_loopback, is_numeric
from hyperpodrun.agent.transport.probe import plain
from hyperpodrun.agent.transport.zsocket import Socket

EVERYWHERE = "*"
LOOPBACK = ("127.0.0.1", "::1")
FREE_PORT_TRIES = 20


class BindError(OSError):
    """No port, or no such address: the text is a sentence for the user."""


def hosts_to_bind(wanted: Sequence[str], open_to_network: bool) -> tuple[str, ...]:
    """Numeric hosts, or `*`. Names are looked up (blocking: they are this host's own). Raises BindError."""
    if not wanted:
        return (EVERYWHERE,) if open_to_network else LOOPBACK
    hosts: list[str] = []
    for host in wanted:
        hosts += [host] if host == EVERYWHERE or is_numeric(host) else _look_up(host)
    outside = [host for host in hosts if host == EVERYWHERE or not is_loopback(host)]
    if outside and not open_to_network:
        raise BindError(
            f"without a job secret the mesh listens on this machine only, not on {outside[0]}: "
            "give --job-secret-file, or --insecure-mesh in a network where nobody else is"
        )
    return tuple(dict.fromkeys(hosts))


def bind(inbox: Socket, hosts: Sequence[str], first_port: int, span: int) -> tuple[int, tuple[str, ...]]:
    """Bind to one port on all hosts; the port, and the hosts that exist here. `first_port` 0: any free one. Raises BindError."""
    candidates = [0] * FREE_PORT_TRIES if first_port == 0 else range(first_port, min(first_port + span, 65536))
    for port in candidates:
        if bound := _bind_all(inbox, hosts, port):
            return bound
    if first_port == 0:
        raise BindError("no free port was found for the mesh")
    ports = f"port {first_port} is" if span == 1 else f"ports {first_port} to {first_port + span - 1} are all"
    raise BindError(
        f"{ports} in use on this host (by another job?): give this job another --mesh-port (0, on a single host: any free one)"
    )


def _bind_all(inbox: Socket, hosts: Sequence[str], port: int) -> tuple[int, tuple[str, ...]] | None:
    bound: list[str] = []
    for host in hosts:
        try:
            inbox.bind(endpoint(host, port) if port else f"tcp://{f'[{host}]' if ':' in host else host}:*")
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                for done in bound:
                    inbox.unbind(done)
                return None
            # A kernel without IPv6, or without ::1, is no reason to stay away from the other addresses.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV) and len(hosts) > 1:
                continue
            raise BindError(_reason(host, port, error)) from None
        bound.append(bytes(inbox.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
        port = int(bound[-1].rpartition(":")[2])
    if not bound:
        raise BindError(f"none of the addresses {', '.join(hosts)} exists on this host")
    return port, tuple(_host_of(place) for place in bound)


def _host_of(place: str) -> str:
    host = plain(place.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
    return EVERYWHERE if host in ("0.0.0.0", "::") else host


def _look_up(host: str) -> list[str]:
    try:
        return [str(place[0]) for _, _, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise BindError(
            f"{host} is no address of this host ({error.strerror}): give --local-addr an address that it has"
        ) from None


def _reason(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{host} is no address of this host: give --local-addr an address that it has"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user: give --mesh-port a port above 1023"
    return f"the mesh cannot listen on {host}, port {port}: {error.strerror}"
