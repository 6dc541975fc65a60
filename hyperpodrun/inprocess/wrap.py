"""`@HPWrapper`: the function that is run again, in the same process, after a fault anywhere in the job.

Theory. One process, one line to its agent (session.py); the agents decide, the wrapper obeys. A generation here:

    wait at the barrier -> Enter: new variables -> initialize -> function
        returned -> held until all ranks have -> the value is returned
        raised   -> Fault is told  \\
        ordered out (interrupt.py)  > abort -> frames are cleared -> finalize -> health check -> the barrier again

An exception is told first and acted upon at once, without waiting for the agents: what the other ranks wait for is torn by it. While
the process is on its way to the barrier further orders are ignored: it is on its way already. When abort, finalize or the
health check fail, the process is replaced (`Unfit`, then that exception ends it).

What passes through: SystemExit and KeyboardInterrupt, told before (but not a SystemExit that user code made of our own order to
leave), and whatever leaves the function in a child that was forked inside it. Everything else, BaseExceptions included, is a fault.
Arguments are handed in again as they are: what the function changes in them stays changed.
A wrapped function inside another one is a plain call. One wrapped call a process is protected; what runs behind it is not, a
second one included: a fault there restarts the process. Generator and async functions are refused: when their bodies run, the
wrapper has been left.

Invariants: nothing of a generation runs when AtBarrier is sent; no exception, frame or value of an earlier call is kept.
"""

import functools
import inspect
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hyperpodrun.agent.wire import link, names
from hyperpodrun.inprocess import describe, groups
from hyperpodrun.inprocess.abort import AbortAll, CheckpointlessAbortManager
from hyperpodrun.inprocess.caller import HPCallWrapper
from hyperpodrun.inprocess.errors import HealthCheckError, InternalError, RankShouldRestart, RestartRequested
from hyperpodrun.inprocess.finalize import CheckpointlessFinalizeCleanup
from hyperpodrun.inprocess.health_check import CudaHealthCheck
from hyperpodrun.inprocess.line import Connect
from hyperpodrun.inprocess.progress import counters
from hyperpodrun.inprocess.session import Session, protect
from hyperpodrun.inprocess.train_utils import HPAgentK8sAPIFactory

__all__ = ["HPCallWrapper", "HPWrapper", "HealthCheckError", "InternalError", "RankShouldRestart", "RestartRequested"]

_running: HPCallWrapper | None = None  # of the protected call in this process
_used = False  # a protected call has been made
_watched: Session | None = None  # where processes only are restarted: one for all calls
_watched_calls = 0  # that are under way, one inside another


class HPWrapper:
    """Decorator, with or without arguments: `@HPWrapper`, `@HPWrapper()`, `@HPWrapper(abort_timeout=30.0)`.

    health_check: callable or list, see health_check.py. hp_api_factory: see train_utils.py. abort_timeout: seconds that the abort
    may take as a whole (the shorter of this and `--abort-timeout` counts). abort, finalize, initialize: callables without
    arguments, or lists of them; see abort.py and finalize.py; initialize runs before each call, as part of it. enabled=False: the
    function as it is, with a `caller`. checkpoint_manager: handed on as `caller.checkpoint_manager`. heartbeat_timeout: longest
    time in seconds between two `caller.ping()`, counted from the first. trace_file_path: one JSON line a stage is added to it.

    Raises TypeError for what cannot be wrapped.
    """

    def __new__(cls, *function: Any, **options: Any) -> Any:
        """The decorator; or, bare, the wrapped function itself."""
        if not function:
            return super().__new__(cls)
        (only,) = function
        return cls(**options)(only)

    def __init__(
        self,
        *,
        health_check: Any = None,
        hp_api_factory: Connect | None = None,
        abort_timeout: float | None = None,
        abort: Any = None,
        finalize: Any = None,
        initialize: Any = None,
        enabled: bool = True,
        checkpoint_manager: Any = None,
        heartbeat_timeout: float | None = None,
        trace_file_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.enabled = enabled
        self.checkpoint_manager = checkpoint_manager
        self.abort_timeout_s = abort_timeout
        self.heartbeat_timeout_s = heartbeat_timeout
        self.trace_file_path = trace_file_path
        self.abort = CheckpointlessAbortManager.get_default_checkpointless_abort() if abort is None else AbortAll(abort)
        self.finalize = _each("finalize", CheckpointlessFinalizeCleanup() if finalize is None else finalize)
        self.initialize = _each("initialize", initialize)
        self.health_check = _each("health_check", CudaHealthCheck() if health_check is None else health_check)
        self._connect: Connect = HPAgentK8sAPIFactory() if hp_api_factory is None else hp_api_factory

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`."""
        where = _Where(_checked(function))

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._call(function, where, args, kwargs)

        return wrapped

    def _call(self, function: Callable[..., Any], where: "_Where", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        global _running, _used
        session = self._session() if self.enabled and _running is None else None
        if session is None:
            caller = _running or HPCallWrapper(None, self.checkpoint_manager)
            args, kwargs = where.with_caller(args, kwargs, caller)
            with self._watching():
                return function(*args, **kwargs)
        caller = HPCallWrapper(session, self.checkpoint_manager)
        args, kwargs = where.with_caller(args, kwargs, caller)
        _running, _used = caller, True
        protect(session)
        try:
            return _Rounds(self, session, caller).run(function, args, kwargs)
        finally:
            _running = None
            protect(None)
            session.set_stage("returned", tell=False)

    def _session(self) -> Session | None:
        """The line to the agent, if it restarts in place."""
        global _watched
        if _used:
            _warn_once("a second wrapped call of this process runs unprotected: a fault in it restarts the process")
        if _used or _watched is not None:
            return None
        session = Session()
        session.heartbeat_timeout_s = self.heartbeat_timeout_s
        if not session.connect(self._connect):
            if names.JOB_ID not in os.environ:
                _warn_once("HPWrapper does nothing here: this process was not started by hyperpodrun --inprocess-restart")
            return None
        if session.inplace:
            return session
        _watched = session
        return None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Where processes only are restarted the agent watches the outermost call for hangs; what follows it is nobody's."""
        global _watched_calls
        session = _watched
        if session is None or not self.enabled:
            yield
            return
        if not _watched_calls:
            session.heartbeat_timeout_s = self.heartbeat_timeout_s
            session.watch_only()
        _watched_calls += 1
        try:
            yield
        finally:
            _watched_calls -= 1
            if not _watched_calls:
                session.set_stage("returned", tell=False)


class _Rounds:
    """All generations of one wrapped call."""

    def __init__(self, options: HPWrapper, session: Session, caller: HPCallWrapper) -> None:
        self._options = options
        self._session = session
        self._caller = caller
        self._reserve = describe.Reserve()
        self._pid = os.getpid()
        session.unblock = lambda: options.abort.free(session.interrupter.left.wait)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        while True:
            self._enter(session.wait_for_enter())
            error: BaseException | None = None
            value = None
            try:
                value = self._attempt(function, args, kwargs)
            except BaseException as caught:
                if os.getpid() != self._pid:
                    raise  # a child that the function has forked: its end is its own
                status = _exit_status(caught)
                if status is not None and not (isinstance(caught, SystemExit) and session.interrupter.mine(caught)):
                    if status:
                        self._tell(
                            caught, status
                        )  # before its connections end, which would make others look like the first to fail
                    raise
                self._tell(caught)
                error = caught
            if os.getpid() != self._pid:
                return value
            if error is None and not session.interrupted():
                self._trace("returned")
                if session.hold():
                    return value
            del value
            self._leave(error)
            del error

    def _enter(self, enter: link.Enter) -> None:
        for name, value in enter.env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        caller = self._caller
        caller.generation, caller.restart_count = enter.generation, enter.restart_count
        caller.restart_mode, caller.restart_reason = enter.mode, enter.reason
        self._reserve.hold()
        groups.end_of_former()

    def _attempt(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        counters.begin()
        session.set_stage("function")
        self._trace("function")

        def body() -> Any:
            session.armed()
            _inject("enter")
            for action in self._options.initialize:
                action()
            value = function(*args, **kwargs)
            _inject("return")
            return value

        return session.interrupter.run(body)

    def _tell(self, error: BaseException, exit_status: int | None = None) -> None:
        """Report it, unless it only is the way out that the agent asked for. `exit_status`: the process ends with it."""
        if isinstance(error, MemoryError):
            self._reserve.spend()
        session = self._session
        if session.interrupted():
            return
        self._trace("fault", describe.headline(error))
        restart = isinstance(error, RestartRequested)
        kind = "RestartRequested" if restart else describe.kind_of(error)
        rung: Any = getattr(error, "rung", "")  # RestartRequested, and errors that know that no restart helps
        session.fault(kind, describe.headline(error), describe.text_of(error), rung, exit_status)

    def _leave(self, error: BaseException | None) -> None:
        """From the function to the barrier. Raises when this process cannot be used again; the agent knows by then."""
        if (told_at_s := self._session.told_at_s) is not None:
            self._trace("told", at_s=told_at_s)
        try:
            self._stage("aborting")
            limit_s = self._session.abort_limit_s(self._options.abort_timeout_s)
            began_s = time.monotonic()
            if not self._session.rejoin_stopper(limit_s):
                raise InternalError(f"the function was left, but freeing it still goes on after {limit_s:g} s")
            self._options.abort.run(max(0.0, limit_s - (time.monotonic() - began_s)))
            if error is not None:
                describe.release(error)
            groups.frames_are_gone()
            self._stage("finalizing")
            for action in self._options.finalize:
                action()
            self._stage("health check")
            for action in self._options.health_check:
                action()
        except BaseException as problem:  # whatever it is, it ends this process
            asked = problem.rung if isinstance(problem, HealthCheckError | RestartRequested) else ""
            rung: link.Rung = asked or "inplace"
            reason = describe.headline(problem)
            self._trace("unfit", reason)
            self._session.send(link.Unfit(self._session.generation, reason, rung))
            raise
        self._trace("waiting")

    def _stage(self, stage: link.Stage) -> None:
        self._session.set_stage(stage)
        self._trace(stage)
        _inject(stage)

    def _trace(self, stage: str, reason: str = "", at_s: float | None = None) -> None:
        path = self._options.trace_file_path
        if path is None:
            return
        line = {
            "t": time.time() if at_s is None else at_s,
            "rank": self._caller.rank,
            "pid": os.getpid(),
            "generation": self._caller.generation,
            "stage": stage,
            "reason": reason or self._session.reason,
        }
        try:
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            _warn_once(f"trace_file_path: {path} cannot be written: {error.strerror}")


def _exit_status(error: BaseException) -> int | None:
    """The wait(2) status of a process that this exception ends; None: it does not.

    Source: CPython Python/pythonrun.c, handle_system_exit.
    """
    if isinstance(error, KeyboardInterrupt):
        return int(signal.SIGINT)
    if not isinstance(error, SystemExit):
        return None
    code = error.code
    if code is None:
        return 0
    return ((code if isinstance(code, int) else 1) & 0xFF) << 8


def _inject(phase: str) -> None:
    """A planted fault (inject.py), where one is asked for."""
    if names.INJECT in os.environ:
        from hyperpodrun.inprocess import inject

        inject.point(phase)


class _Where:
    """The argument of a function that gets the caller."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = inspect.signature(function)
        self._name: str | None = None
        named = [
            parameter
            for parameter in self._signature.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        for parameter in named:
            if "HPCallWrapper" in str(parameter.annotation):
                self._name = parameter.name
                return
        if any(parameter.name == "caller" for parameter in named):
            self._name = "caller"

    def with_caller(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: HPCallWrapper
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to call with: the caller is put in where none was given, or None."""
        name = self._name
        if name is None or kwargs.get(name) is not None:
            return args, kwargs
        place = list(self._signature.parameters).index(name)
        if len(args) <= place or self._signature.parameters[name].kind == inspect.Parameter.KEYWORD_ONLY:
            return args, {**kwargs, name: caller}
        if args[place] is None:
            return (*args[:place], caller, *args[place + 1 :]), kwargs
        return args, kwargs


def _checked(function: Any) -> Any:
    """Raises TypeError for what cannot be run again."""
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"HPWrapper belongs under @{type(function).__name__}, next to the function")
    if inspect.isclass(function) or not callable(function):
        raise TypeError(f"HPWrapper wraps functions, not {function!r}")
    plain = function.func if isinstance(function, functools.partial) else function
    body = plain if inspect.isroutine(plain) else type(plain).__call__
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise TypeError(
            f"HPWrapper: {_name(function)} is a generator function: its body would run after the wrapper was left; "
            "wrap the function that loops over it"
        )
    if inspect.iscoroutinefunction(body):
        raise TypeError(
            f"HPWrapper: {_name(function)} is an async function: its body would run after the wrapper was left; "
            "wrap a plain function that calls asyncio.run() on it"
        )
    return function


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _each(option: str, actions: Any) -> tuple[Callable[[], Any], ...]:
    if actions is None:
        return ()
    found = tuple(actions) if isinstance(actions, (list, tuple)) else (actions,)
    for action in found:
        if not callable(action):
            raise TypeError(f"{option}: {action!r} cannot be called; give a function without arguments, or a list of them")
    return found


_warned: set[str] = set()


def _warn_once(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        warnings.warn(sentence, stacklevel=5)
