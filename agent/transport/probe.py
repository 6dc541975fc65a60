"""A plain TCP connect, to tell a host whose agent is gone (refused) from one that is silent (M2).

The kernel accepts for a process that is stopped or busy, so "accepted" does not say that anybody is at home.
"""

import errno
import os
import socket
from collections.abc import Callable
from typing import Literal

from hyperpodrun.agent.reactor import Reactor

Outcome = Literal["refused", "accepted", "timeout", "unreachable"]


def probe_tcp(reactor: Reactor, host: str, port: int, callback: Callable[[Outcome], None], timeout_s: float = 1.0) -> None:
    """Connect to a numeric host; `callback` is called once, from the loop and never before this returns."""
    probe = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        code = probe.connect_ex((host, port))
    except OSError as error:  # a zone that does not exist, for one
        code = error.errno or errno.EHOSTUNREACH

    def end(outcome: Outcome) -> None:
        timer.cancel()
        reactor.forget(probe.fileno())
        probe.close()
        callback(outcome)

    def ready() -> None:
        end(_outcome(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))

    if code == errno.EINPROGRESS:
        timer = reactor.call_later(timeout_s, lambda: end("timeout"))
        reactor.on_writable(probe.fileno(), ready)
    else:
        timer = reactor.call_later(0, lambda: end(_outcome(code)))


def _outcome(code: int) -> Outcome:
    if code == 0:
        return "accepted"
    if code in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refused"
    return "timeout" if code == errno.ETIMEDOUT else "unreachable"


def peer_of(fd: int) -> str:
    """The numeric address at the other end of a connection that is not ours; "?" when it is already closed."""
    try:
        with socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM) as copy:
            return plain(str(copy.getpeername()[0]))
    except (OSError, IndexError, TypeError):
        return "?"


def plain(host: str) -> str:
    """An IPv4 address that came in through an IPv6 socket, without its ::ffff: prefix."""
    return host.removeprefix("::ffff:") if "." in host else host


def own_addresses() -> list[str]:
    """This host's addresses that others may reach: all but loopback and link-local ones, the one towards the network first."""
    import fcntl
    import struct

    found: list[str] = []
    for family, target in ((socket.AF_INET, "192.0.2.254"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as question:
                question.connect((target, 9))  # sends nothing: only asks the routing table
                found.append(str(question.getsockname()[0]))
        except OSError:
            continue
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(question, 0x8915, struct.pack("256s", os.fsencode(name)[:15]))  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
            except OSError:
                continue
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in table]
    except OSError:
        pass
    usable = [host for host in found if not host.startswith(("127.", "169.254.", "fe80:", "0.")) and host not in ("::1", "::")]
    return list(dict.fromkeys(usable))
