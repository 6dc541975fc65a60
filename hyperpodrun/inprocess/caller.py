"""`caller`: what the wrapped function sees of the wrapper."""

import os
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any

from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire.link import Rung
from hyperpodrun.inprocess.errors import RestartRequested
from hyperpodrun.inprocess.progress import counters
from hyperpodrun.inprocess.session import Session


class HPCallWrapper:
    """Injected into a wrapped function as its argument `caller`, or as the one that is annotated with this class.

    One object for all calls of the function in this process; its attributes are those of the present generation. Without an agent
    the ranks are those of the environment, `generation` and `restart_count` as the launcher gave them, else 0.
    """

    def __init__(self, session: Session | None, checkpoint_manager: Any = None) -> None:
        self._session = session
        self._thread = get_ident()
        self.checkpoint_manager = checkpoint_manager
        self.generation = _number(names.GENERATION, 0)
        """Grows with each restart of any kind."""
        self.restart_count = _number(names.JOB_RESTART_COUNT, _number(names.RESTART_COUNT, 0))
        """Of the job, in place or not."""
        self.restart_mode = "start"
        """"start", "inplace" (this process has run the function before) or "process" (a new process of a job that has)."""
        self.restart_reason = ""

    @property
    def rank(self) -> int:
        """In the present generation."""
        return _number(names.RANK, 0)

    @property
    def world_size(self) -> int:
        """In the present generation."""
        return _number(names.WORLD_SIZE, 1)

    @property
    def step_upon_restart(self) -> int:
        """The step that this run of the function begins with: what RecoverableState.restore() gave.

        Before that: the step after the last one that was noted in this process, 0 in a new one.
        """
        return counters.first_step

    def ping(self) -> None:
        """This rank makes progress (`--hang-timeout`, `heartbeat_timeout`)."""
        counters.note_call(ping=True)

    def critical_section(self) -> AbstractContextManager[None]:
        """No restart is raised inside, in the function's own thread. `--abort-timeout` is its bound: then the process is killed.

        Communication may be aborted inside after half a second: what it waits for may be gone.
        """
        return nullcontext() if self._session is None else self._session.interrupter.critical()

    def report_fault(self, reason: str, rung: Rung = "") -> None:
        """Ask for a restart of the job, of at least this rung ("inplace", "node", "all", "replace", "end"; "": the policy's choice).

        In the function's thread this raises RestartRequested; in others it returns at once, and speaks of the present generation: end
        threads that watch over one with it. Without an agent it raises in any thread.
        """
        if rung not in ("", "inplace", "node", "all", "replace", "end"):
            raise ValueError(f"rung={rung!r}: one of 'inplace', 'node', 'all', 'replace', 'end', or '' for the policy's choice")
        if self._session is None or get_ident() == self._thread:
            raise RestartRequested(reason, rung)
        self._session.fault("RestartRequested", reason, rung=rung)
        self._session.leave_by_itself(reason)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.lstrip("-").isdigit() else default
