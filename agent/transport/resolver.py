"""Names to addresses without stopping the loop: getaddrinfo blocks, for half a minute where DNS is down.

One short-lived daemon thread a question, at most `MOST_THREADS` at once; questions for the same name are merged. Threads only
call getaddrinfo and put the answer into a queue; everything else happens on the loop. A thread that hangs holds up nobody and
does not keep the process alive.
"""

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.addresses import is_numeric

MOST_THREADS = 8

Found = Callable[[list[str], str], None]
"""Called with the numeric addresses, in getaddrinfo's order, and the reason when there is none."""


class Resolver:
    """`ask` answers on the loop; numeric hosts at once, before it returns."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._waiting: dict[str, list[Found]] = {}
        self._queued: deque[str] = deque()
        self._running = 0
        self._answers: queue.SimpleQueue[tuple[str, list[str], str]] = queue.SimpleQueue()
        self._bell = -1

    def ask(self, host: str, found: Found) -> None:
        """Look this host up."""
        if is_numeric(host):
            found([host], "")
            return
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._reactor.on_readable(self._bell, self._answered)
        if host in self._waiting:
            self._waiting[host].append(found)
            return
        self._waiting[host] = [found]
        self._queued.append(host)
        self._start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._waiting.clear()
        self._queued.clear()
        if self._bell >= 0:
            self._reactor.forget(self._bell)
            os.close(self._bell)
            self._bell = -1

    def _start(self) -> None:
        while self._queued and self._running < MOST_THREADS:
            self._running += 1
            threading.Thread(
                target=_look_up, args=(self._queued.popleft(), self._answers, os.dup(self._bell)), daemon=True
            ).start()

    def _answered(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while not self._answers.empty():
            host, addresses, reason = self._answers.get()
            self._running -= 1
            for found in self._waiting.pop(host, []):
                found(addresses, reason)
        self._start()


def _look_up(host: str, answers: "queue.SimpleQueue[tuple[str, list[str], str]]", bell: int) -> None:
    addresses: list[str] = []
    reason = ""
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            if family in (socket.AF_INET, socket.AF_INET6):
                addresses.append(str(place[0]))
    except socket.gaierror as error:
        reason = error.strerror or "the name is not known"
    except (OSError, UnicodeError) as error:
        reason = str(error)
    answers.put((host, list(dict.fromkeys(addresses)), reason))
    os.eventfd_write(bell, 1)
    os.close(bell)  # each thread has a copy: the loop may close its own at any time
