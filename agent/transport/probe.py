"""A plain TCP connect, to tell a host whose agent is gone (refused) from one that is silent (M2).

The kernel accepts for a process that is stopped or busy, so "accepted" does not say that anybody is at home.
"""

import errno
import os
import socket
from collections.abc import Callable
from typing import Literal

from hyperpodrun.agent.reactor import Reactor, Timer

Outcome = Literal["refused", "accepted", "timeout", "unreachable"]


AGAIN_S = 0.06
MOST_ATTEMPTS = 8


def probe_tcp(reactor: Reactor, host: str, port: int, callback: Callable[[Outcome], None], timeout_s: float = 1.0) -> None:
    """Connect to a numeric host; `callback` is called once, from the loop and never before this returns."""
    _Probe(reactor, host, port, callback, timeout_s)


class _Probe:
    """A first packet that is lost is sent again only after 1 s (RFC 6298), longer than a silent peer is waited for: so a connect that
    is not answered gets company of another one every `AGAIN_S`. The first answer counts.
    """

    def __init__(self, reactor: Reactor, host: str, port: int, callback: Callable[[Outcome], None], timeout_s: float) -> None:
        self._reactor = reactor
        self._place = (host, port)
        self._callback = callback
        self._attempts: list[socket.socket] = []
        self._limit = reactor.call_later(timeout_s, lambda: self._end("timeout"))
        self._again: Timer | None = None
        self._attempt()

    def _attempt(self) -> None:
        self._again = None
        host, _ = self._place
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        attempt = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._attempts.append(attempt)
        try:
            code = attempt.connect_ex(self._place)
        except OSError as error:  # a zone that does not exist, for one
            code = error.errno or errno.EHOSTUNREACH
        if code != errno.EINPROGRESS:
            self._again = self._reactor.call_later(0, lambda: self._end(_outcome(code)))
            return
        self._reactor.on_writable(attempt.fileno(), lambda: self._ready(attempt))
        if len(self._attempts) < MOST_ATTEMPTS:
            self._again = self._reactor.call_later(AGAIN_S, self._attempt)

    def _ready(self, attempt: socket.socket) -> None:
        self._end(_outcome(attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))

    def _end(self, outcome: Outcome) -> None:
        for timer in (self._limit, self._again):
            if timer:
                timer.cancel()
        for attempt in self._attempts:
            self._reactor.forget(attempt.fileno())
            attempt.close()
        self._attempts.clear()
        self._callback(outcome)


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
