"""The worker's end of the link: one object and one thread a process, made at first use.

Theory. The thread does all that is done with the socket. Others only append to a queue and ring a bell (an eventfd): both are single
steps of the interpreter, and no lock is held in between, so a signal handler that raises in the main thread, at whatever
instruction, leaves the link as it was before the call or as it is after it. Nor does anybody wait for the agent: the socket does
not block, and a queue that the agent does not empty is full after a while, which `send` tells.

States: *connecting*, *open*, *lost* (the agent has ended; everybody who listens has been told), *closed* (this process ends).
Invariants: messages leave in the order in which `send` was called by one thread, each whole or not at all; callbacks run in the
link's thread, one at a time, and the last one is on_lost; a forked child has no link until it asks for one of its own, and holds
no copy of its parent's; what was queued before the interpreter ends is sent, for at most EXIT_S.
Source: unix(7), eventfd(2), os.register_at_fork, the GIL's atomicity of deque.append, list.pop and dict.setdefault.
"""

import atexit
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from hyperpodrun.agent.wire import address, names
from hyperpodrun.agent.wire.link import BEAT_S, PACKET_BYTES, Beat, FromWorker, ToWorker
from hyperpodrun.link.errors import LinkLost, LinkStuck, NoLauncher

CONNECT_S = 10.0
"""How long an agent may be too busy to take the connection."""
SEND_S = 10.0
"""How long `send` waits for room in the queue."""
EXIT_S = 1.0
"""How long the end of the process waits for the last messages to leave."""
MOST_QUEUED = 256
"""Messages, beyond what the kernel holds, that wait for the agent to take them."""
_MOST_KEPT = 1024
_READS = 64
_ENDED = "the launcher's agent has ended, or has closed the link of this process; then the launcher's output says why"
# Left to the thread in which they arise.
_OWN_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}

_current: dict[int, "Link"] = {}


class Link:
    """To be had from `current()`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queue: deque[bytes] = deque()
        self._right_to_run = [None]
        self._listeners: list[_Listener] = []
        self._kept: deque[ToWorker] = deque(maxlen=_MOST_KEPT)
        self._beat: Callable[[], Beat | None] | None = None
        self._thread_id = 0
        self._lost: LinkLost | None = None
        self._closing_at_s: float | None = None
        self._ended = threading.Event()

    @classmethod
    def current(cls) -> "Link":
        """This process's link; connects in the background at the first call. Raises NoLauncher outside hyperpodrun."""
        pid = os.getpid()
        link = _current.get(pid)
        if link is None:
            where = os.environ.get(names.LINK, "")
            if not where.startswith("unix:"):
                raise NoLauncher(f"{names.LINK} is not set: this process has no launcher; start the program with hyperpodrun")
            made = cls(where.removeprefix("unix:"))
            link = _current.setdefault(pid, made)
            if link is not made:  # another thread was faster
                made._close_descriptors()
        link._start()
        return link

    @property
    def lost(self) -> LinkLost | None:
        """Why nothing is sent or received any more; None while the link is up."""
        return self._lost

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child of the process whose link this is."""
        if os.getpid() != self._pid:
            raise RuntimeError("this link belongs to the parent process: call Link.current() in the child")

    def send(self, message: FromWorker) -> None:
        """Give a message to the link's thread; returns before it has left. From any thread.

        Raises LinkLost when the agent has ended, LinkStuck when it has taken nothing for SEND_S, ValueError when the message is
        longer than PACKET_BYTES, RuntimeError in a forked child, which has to ask for its own `current()`.
        """
        self.check_process()
        data = msgspec.msgpack.encode(message)
        if len(data) > PACKET_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too long for the link, the limit is {PACKET_BYTES}")
        self._wait_for_room()
        self._queue.append(data)
        os.eventfd_write(self._bell, 1)

    def subscribe(self, on_message: Callable[[ToWorker], object], on_lost: Callable[[LinkLost], object]) -> None:
        """Call `on_message` for each message from now on, `on_lost` once when none will come any more.

        Called in the link's thread, where they must not wait, and in which all signals are blocked (threads started there begin
        so); `on_lost` in the caller's when the link is lost already. Messages that came before the first subscription are given
        to that one.
        """
        listener = _Listener(on_message, on_lost)
        self._listeners.append(listener)
        if self._lost is not None:
            listener.tell_lost(self._lost)
        else:
            os.eventfd_write(self._bell, 1)

    def beat_with(self, make: Callable[[], Beat | None]) -> None:
        """Send what `make` gives (None: nothing) every BEAT_S seconds. Called in the link's thread, where it must not wait.

        The main thread counts in plain attributes that `make` reads: no lock is needed for numbers that only grow.
        """
        self._beat = make

    # --- any thread

    def _start(self) -> None:
        # A thread whose start was interrupted by a signal handler is started again; only the first one to run stays.
        if self._right_to_run and not self._ended.is_set():
            threading.Thread(target=self._run, name="hyperpodrun-link", daemon=True).start()

    def _wait_for_room(self) -> None:
        limit_s = 0.0
        while True:
            if self._lost is not None:
                raise LinkLost(*self._lost.args)
            if len(self._queue) < MOST_QUEUED:
                return
            now_s = time.monotonic()
            limit_s = limit_s or now_s + SEND_S
            if now_s >= limit_s or threading.get_ident() == self._thread_id:
                raise LinkStuck(f"the launcher's agent takes no messages: {MOST_QUEUED} wait for it; is its process stopped?")
            time.sleep(0.001)

    def _close(self) -> None:
        """Send what is queued and end the thread, for at most EXIT_S."""
        self._closing_at_s = time.monotonic() + EXIT_S
        os.eventfd_write(self._bell, 1)
        self._ended.wait(EXIT_S)

    def _close_descriptors(self) -> None:
        """Close them here; the kernel's objects live on in whichever process holds copies."""
        if self._socket.fileno() >= 0:
            self._socket.close()
        os.close(self._bell)

    # --- the link's thread

    def _run(self) -> None:
        try:
            self._right_to_run.pop()
        except IndexError:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS)  # signals are for the others
        self._thread_id = threading.get_ident()
        reason = "the link has failed"
        try:
            self._connect()
            reason = self._serve()
        except OSError as error:
            reason = f"the launcher's agent cannot be reached at {self._path}: {error.strerror}"
        except msgspec.DecodeError as error:
            reason = f"the launcher's agent speaks another version of hyperpodrun: {error}"
        finally:
            self._end(LinkLost(reason))

    def _connect(self) -> None:
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET_BYTES)
        limit_s = time.monotonic() + CONNECT_S
        with address.fitting(self._path) as path:
            while (number := self._socket.connect_ex(path)) == errno.EAGAIN and time.monotonic() < limit_s:
                time.sleep(0.01)  # as many as the agent can have waiting are waiting
        if number:
            raise OSError(number, os.strerror(number))

    def _serve(self) -> str:
        """Until the link's end; says why it came."""
        decoder = msgspec.msgpack.Decoder(ToWorker)
        buffer = bytearray(PACKET_BYTES)
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        beat_at_s = time.monotonic() + BEAT_S
        while True:
            blocked = not self._flush()
            until_s = beat_at_s
            if (closing_at_s := self._closing_at_s) is not None:
                if not self._queue or time.monotonic() >= closing_at_s:
                    return "this process is ending"
                until_s = min(beat_at_s, closing_at_s)
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if blocked else 0))
            # Never longer than a beat: a sender may have been interrupted between queue and bell.
            poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
            try:
                os.eventfd_read(self._bell)
            except BlockingIOError:
                pass
            for _ in range(_READS):
                try:
                    size_bytes = self._socket.recv_into(buffer)
                except BlockingIOError:
                    break
                except OSError:
                    return _ENDED
                if size_bytes == 0:
                    return _ENDED
                self._kept.append(decoder.decode(memoryview(buffer)[:size_bytes]))
                self._deliver()
            self._deliver()
            if (now_s := time.monotonic()) >= beat_at_s:
                beat_at_s = now_s + BEAT_S
                self._send_beat()

    def _flush(self) -> bool:
        """Send what the socket takes. False: it takes no more now."""
        while self._queue:
            try:
                self._socket.send(self._queue[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                return True  # the other end is closed: what it said before can still be read, then comes its end
            self._queue.popleft()
        return True

    def _deliver(self) -> None:
        while self._kept and (listeners := list(self._listeners)):
            message = self._kept.popleft()
            for listener in listeners:
                _guarded(listener.on_message, message)

    def _send_beat(self) -> None:
        beat = _guarded(self._beat) if self._beat is not None else None
        if beat is not None and len(self._queue) < MOST_QUEUED:
            self._queue.append(msgspec.msgpack.encode(beat))

    def _end(self, lost: LinkLost) -> None:
        self._lost = lost
        if os.getpid() != self._pid:
            return
        self._socket.close()
        self._queue.clear()
        if self._closing_at_s is None:
            for listener in list(self._listeners):
                listener.tell_lost(lost)
        self._ended.set()


class _Listener:
    """Who is told; of the link's end once, whichever thread comes first."""

    def __init__(self, on_message: Callable[[ToWorker], object], on_lost: Callable[[LinkLost], object]) -> None:
        self.on_message = on_message
        self._on_lost = [on_lost]

    def tell_lost(self, lost: LinkLost) -> None:
        try:
            on_lost = self._on_lost.pop()
        except IndexError:
            return
        _guarded(on_lost, lost)


def _guarded(function: Callable[..., Any], *args: object) -> Any:
    """The link survives whoever listens: what a callback raises is shown, as for any thread."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 - somebody else's code
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _after_fork_in_child() -> None:
    """The parent's links stay the parent's: no copy of a socket may keep it open when the parent has ended."""
    for link in _current.values():
        link._lost = LinkLost("this link belongs to the parent process")
        link._close_descriptors()
    _current.clear()


def _at_exit() -> None:
    link = _current.get(os.getpid())
    if link is not None:
        link._close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
