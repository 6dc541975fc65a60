"""What this process and its agent have told each other: one Session for a process, shared by its wrappers.

Written by the line's thread (`_receive`), by the thread that runs the function, and read by both; one lock. The line's thread never
waits: what takes time (making the function leave) is done by a *stopper*, a thread that lives until the function has been left.

States (`stage`, from wire/link.py): *waiting* at the barrier, *function*, *aborting*, *finalizing*, *health check*, *returned*.
Invariants: generations only grow; an Interrupt of an older generation, or of one that is already being left, does nothing; at most
one stopper lives.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from hyperpodrun import ending
from hyperpodrun.agent.wire import link, names
from hyperpodrun.inprocess import parting
from hyperpodrun.inprocess.errors import InternalError
from hyperpodrun.inprocess.interrupt import Interrupter
from hyperpodrun.inprocess.line import Connect, Line
from hyperpodrun.inprocess.progress import counters

WELCOME_S = 30.0
STDERR = 2


class Session:
    """Made by `connect`. `heartbeat_timeout_s`: longest time between two `ping()`; None: not watched."""

    def __init__(self) -> None:
        self.interrupter = Interrupter()
        self.heartbeat_timeout_s: float | None = None
        self.unblock: Callable[[], None] = _nothing
        self.welcome: link.Welcome | None = None
        self.generation = -1
        self.stage: link.Stage = "waiting"
        self.reason = ""
        self.told_at_s: float | None = None
        """When the order to leave the present generation arrived, if it has (time.time)."""
        self._pid = os.getpid()
        self._line: Line | None = None
        self._changed = threading.Condition()
        self._entry: link.Enter | None = None
        self._left = -1  # generations up to this one have been left, or are being
        self._interrupted = -1
        self._released = -1
        self._parting = False
        self._ending: link.End | None = None
        self._lost = ""
        """Why there is no agent any more."""
        self._ended = threading.Event()  # this process is about to
        self._stopper: threading.Thread | None = None

    def connect(self, connect: Connect) -> bool:
        """Greet the agent and hear what it allows. False: there is none. Raises InternalError when it does not answer."""
        self._line = connect(self._receive, self._end)
        if self._line is None:
            return False
        generation = os.environ.get(names.GENERATION, "")
        hello = link.Hello(
            local_rank=int(os.environ.get(names.LOCAL_RANK, "0")),
            generation=int(generation) if generation.lstrip("-").isdigit() else -1,
            restartable=True,
        )
        self.send(hello)
        with self._changed:
            if not self._changed.wait_for(lambda: self.welcome is not None or self._lost, WELCOME_S) or self._lost:
                raise InternalError("the agent of this node did not answer this process; is it one of its workers?")
        self._line.beat_with(self._beat)
        counters.on_first_step = self._tell_first_step
        if self.welcome is not None and self.welcome.hang_timeout_s is not None:
            ending.thread(self._count, self.welcome.hang_timeout_s, name="count", stop=self._ended.set)
        return True

    @property
    def inplace(self) -> bool:
        """Does the agent restart in place?"""
        return self.welcome is not None and self.welcome.inplace

    def watch_only(self) -> None:
        """The agent restarts processes only: what is told to it are beats, for its hang watch."""
        self.generation = int(os.environ.get(names.GENERATION, "0"))
        counters.begin()
        self.stage = "function"

    def abort_limit_s(self, asked_s: float | None) -> float:
        """How long an abort may take: the agent's limit, or a shorter one."""
        limit_s = 60.0 if self.welcome is None else self.welcome.abort_timeout_s
        return limit_s if asked_s is None else min(limit_s, asked_s)

    @property
    def alive(self) -> bool:
        """In this very process (not a fork of it), and the agent is there."""
        return self._line is not None and not self._lost and os.getpid() == self._pid

    def send(self, message: link.FromWorker) -> None:
        """To the agent. That it has ended is told by the line, not here; a forked child says nothing."""
        if self._line is None or os.getpid() != self._pid:
            return
        try:
            self._line.send(message)
        except OSError:
            pass

    # --- the thread that runs the function

    def wait_for_enter(self) -> link.Enter:
        """At the barrier. Raises InternalError when the agent ends."""
        self.set_stage("waiting", tell=False)
        self.send(link.AtBarrier(self.generation))
        while (entry := self._next_word()) is None:
            parting.part()
            self.send(link.Parted(self.generation))
        return entry

    def _next_word(self) -> link.Enter | None:
        """At the barrier: the order to enter; None: to part."""
        with self._changed:
            while self._entry is None or self._entry.generation <= self.generation:
                self._check_line()
                self._check_end()
                if self._parting:
                    self._parting = False
                    return None
                self._changed.wait()
            self.generation = self._entry.generation
            self.reason = self._entry.reason
            self.told_at_s = None
            return self._entry

    def set_stage(self, stage: link.Stage, tell: bool = True) -> None:
        """For the agent's deadlines."""
        with self._changed:
            self.stage = stage
            if stage not in ("function", "returned", "waiting"):
                self._left = max(self._left, self.generation)
        if tell:
            self.send(link.StageChanged(self.generation, stage))

    def interrupted(self) -> bool:
        """Has the agent ended this generation?"""
        return self._interrupted >= self.generation

    def armed(self) -> None:
        """The region has just been armed: an order may have come before."""
        with self._changed:
            if self._interrupted >= self.generation:
                self._start_stopper(self.reason)

    def rejoin_stopper(self, timeout_s: float) -> bool:
        """Wait for the stopper to be done with this process's sockets. False: it is stuck."""
        with self._changed:
            stopper, self._stopper = self._stopper, None
        if stopper is None:
            return True
        stopper.join(timeout_s)
        return not stopper.is_alive()

    def hold(self) -> bool:
        """The function has returned here. True: everywhere; False: it has to run again. Raises InternalError."""
        self.set_stage("returned", tell=False)
        self.send(link.Returned(self.generation))
        with self._changed:
            while True:
                if self._released >= self.generation:
                    return True
                if self._interrupted >= self.generation:
                    return False
                self._check_line()
                self._check_end()
                self._changed.wait()

    def fault(self, kind: str, headline: str, text: str = "", rung: link.Rung = "", exit_status: int | None = None) -> None:
        """Tell the agent of a fault of this generation."""
        self.send(link.Fault(self.generation, kind, headline, text, rung, exit_status))

    def leave_by_itself(self, reason: str) -> None:
        """As if the agent had ordered it: this process has reported a fault from beside the function's thread."""
        self._receive(link.Interrupt(self.generation, reason))

    def _check_line(self) -> None:
        if self._lost:
            raise InternalError(self._lost)

    def _check_end(self) -> None:
        if self._ending is not None:
            raise SystemExit(self._ending.code)

    # --- the line's thread

    def _receive(self, message: link.ToWorker) -> None:
        if os.getpid() != self._pid:
            return
        if isinstance(message, link.Dump):
            self._dump()
            return
        with self._changed:
            if isinstance(message, link.Welcome):
                self.welcome = message
            elif isinstance(message, link.Enter):
                if self._entry is None or message.generation > self._entry.generation:
                    self._entry = message
            elif isinstance(message, link.End):
                self._ending = message
            elif isinstance(message, link.Part):
                self._parting = True
            elif isinstance(message, link.Released):
                self._released = max(self._released, message.generation)
            elif isinstance(message, link.Interrupt) and message.generation > max(self._interrupted, self._left):
                self._interrupted = message.generation
                self.reason = message.reason
                self.told_at_s = time.time()
                if message.generation >= self.generation and self.stage == "function":
                    self._start_stopper(message.reason)
            self._changed.notify_all()

    def _start_stopper(self, reason: str) -> None:
        if self._stopper is not None or self.interrupter.left.is_set():
            return  # one is at work, or the region is open: whoever arms it looks (`armed`)
        self._stopper = threading.Thread(
            target=self.interrupter.stop, args=(reason, self.unblock), name="hyperpodrun-stop", daemon=True
        )
        self._stopper.start()

    def _dump(self) -> None:
        """In this thread, which has the interpreter's lock meanwhile: no other thread changes its frames, or begins, or ends."""
        try:
            faulthandler.dump_traceback(STDERR, all_threads=True)
        except (OSError, RuntimeError, ValueError):
            pass  # closed by the program: the agent still tells what the kernel says
        self.send(link.Dumped())

    def _end(self, reason: object) -> None:
        with self._changed:
            self._lost = str(reason)
            self._changed.notify_all()

    # --- beats

    def _beat(self) -> link.Beat | None:
        """What the line's thread sends every BEAT_S."""
        if not self.alive:
            return None
        self._watch_heart(self.stage, counters.now().pinged_at_s)
        return self._made_beat()

    def _made_beat(self) -> link.Beat:
        now, stage = counters.now(), self.stage
        watched = self.welcome is not None and self.welcome.hang_timeout_s is not None and stage == "function"
        return link.Beat(self.generation, stage, now.steps, now.calls, now.still_s if watched else None, now.groups)

    def _tell_first_step(self) -> None:
        """At once: whether a generation got anywhere decides what follows its end, and that may come before the next beat."""
        if (beat := self._beat()) is not None:
            self.send(beat)

    def _watch_heart(self, stage: str, pinged_at_s: float | None) -> None:
        limit_s = self.heartbeat_timeout_s
        if limit_s is None or stage != "function" or pinged_at_s is None or self.interrupted():
            return
        silent_s = time.monotonic() - pinged_at_s
        if silent_s > limit_s:
            reason = f"no ping() for {silent_s:.1f} s (heartbeat_timeout={limit_s:g})"
            self.fault("HeartbeatTimeout", reason)
            self.leave_by_itself(reason)

    def _count(self, hang_timeout_s: float) -> None:
        """A thread of its own: it may be the last to hold a group, whose end can take its time. The agent hears of it at once when
        the timeout is over.
        """
        every_s = link.count_every_s(hang_timeout_s)
        while self.alive and not self._ended.is_set():
            wait_s = every_s
            if self.stage == "function":
                counters.count_collectives()
                left_s = hang_timeout_s - counters.now().still_s
                if left_s <= 0:
                    self.send(self._made_beat())
                else:
                    wait_s = min(every_s, left_s)
            self._ended.wait(wait_s)


def _nothing() -> None:
    pass


_protected: Session | None = None


def protect(session: Session | None) -> None:
    """The session of the wrapped call that runs in this process; None when it has ended."""
    global _protected
    _protected = session


def update_section() -> AbstractContextManager[None]:
    """Around an update of the state (hyperpodrun.recovery): a restart is raised behind it, unless it takes longer than UPDATE_S.

    Nothing outside a protected call, and in threads other than the function's.
    """
    return nullcontext() if _protected is None else _protected.interrupter.update()
