"""Starting the workers of one attempt: from the forkserver where that is right, else an interpreter each.

The forkserver is given up for the rest of the job, with one sentence to the user, when it cannot preload or turns out unfit,
and when it died twice without having started workers in between. Programs that are no Python, other interpreters and tools that
watch interpreters start are spawned from the beginning.

One start at a time: *idle*, *waiting* (for the forkserver to be ready), *under way* (asked; pids not known yet), then idle again.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import exit_codes, launch
from hyperpodrun.agent.workers import command, environment, spawn
from hyperpodrun.agent.workers.forkserver import Forkserver, State

_LOSSES_UNTIL_SPAWN = 2


class _Attempt(msgspec.Struct):
    workers: list[launch.Worker]
    streams: Sequence[tuple[int, int]]
    on_started: Callable[[list[tuple[int, int]]], None]
    on_failed: Callable[[str, int], None]


class WorkerStarter:
    """`base_env` is the agent's environment, launcher's mark included; `watch_child(pid, callback)` tells the wait status of a
    child the agent reaped; `open_helper(name)` gives a helper's stdout and stderr (closed here); `say` shows the user a sentence.
    """

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        base_env: Mapping[bytes, bytes],
        watch_child: Callable[[int, Callable[[int], None]], None],
        open_helper: Callable[[str], tuple[int, int]],
        say: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._env = environment.common_env(config, base_env)
        self._watch_child = watch_child
        self._open_helper = open_helper
        self._say = say
        self._python = config.python or sys.executable
        self._flags = command.interpreter_flags(sys.orig_argv)
        self._folder = os.path.join(sys.modules["hyperpodrun"].__path__[0], "worker")
        self._spawner = spawn.Spawner(reactor, watch_child, os.path.join(self._folder, "prelude.py"), self._command)
        self._server = Forkserver(reactor, self._on_message, self._on_death)
        forkable = config.start_method == "forkserver" and config.program.run_as != "program"
        obstacle = "" if command.same_interpreter(config.python) else "PYTHON_EXEC names another interpreter"
        obstacle = obstacle or command.wants_own_interpreter(self._flags, self._env)
        self._forking = forkable and not obstacle
        self._vain_preload = obstacle if forkable and config.preload else ""
        self._losses = 0
        self._skip_told = False
        self._waiting: _Attempt | None = None
        self._under_way: _Attempt | None = None

    def prepare(self) -> None:
        """Start the forkserver now, in the background; a no-op where workers are spawned, or when it runs already."""
        if self._vain_preload:
            self._say(f"--preload: nothing is imported early, each worker has an interpreter of its own: {self._vain_preload}")
            self._vain_preload = ""
        if not self._forking or self._server.pid is not None:
            return
        program = self._config.program
        argv = [
            self._python, *self._flags, os.path.join(self._folder, "forkserver.py"), str(os.getpid()), program.run_as,
            ",".join(self._config.preload), str(len(self._flags)), *self._flags, program.target, *program.args,
        ]  # fmt: skip
        streams: tuple[int, ...] = ()
        try:
            streams = out, err = self._open_helper("forkserver")
            self._server.begin([os.fsencode(word) for word in argv], self._env, (out, err), self._watch_child)
        except OSError as error:
            self._spawn_from_now_on(f"the process to fork them from cannot be started ({error.strerror})")
        finally:
            for fd in streams:
                os.close(fd)

    def start(
        self,
        workers: list[launch.Worker],
        streams: Sequence[tuple[int, int]],
        on_started: Callable[[list[tuple[int, int]]], None],
        on_failed: Callable[[str, int], None],
    ) -> None:
        """Start these workers; `streams` are the write ends of each one's stdout and stderr, and stay the caller's.

        One of the two callbacks comes later, from the loop, unless `cancel` comes first. `on_started` gets (local rank, pid) of
        all: children of this process that have run nothing of the user's before it returns. `on_failed` gets a sentence and the
        launcher's exit code for it; nothing of this attempt runs any more then.
        """
        self._waiting = _Attempt(workers, streams, on_started, on_failed)
        self.prepare()
        self._advance()

    def helper_pids(self) -> set[int]:
        """Processes that outlive an attempt: spared by sweeps."""
        return set() if self._server.pid is None or self._server.state == "gone" else {self._server.pid}

    def cancel(self) -> None:
        """Give up a start that is under way: its callbacks will not come, and nothing of it will run."""
        self._waiting = self._under_way = None
        self._spawner.cancel()
        self._server.discard()

    def close(self) -> None:
        """End the forkserver, and a start that is under way."""
        self.cancel()
        self._forking = False
        self._server.kill()

    def _advance(self) -> None:
        attempt = self._waiting
        if attempt is None:
            return
        if not self._forking:
            self._waiting = None
            self._spawner.start(attempt.workers, attempt.streams, attempt.on_started, attempt.on_failed)
        elif self._server.state == "ready":
            self._waiting = None
            try:
                self._server.fork(attempt.workers, attempt.streams)
            except ConnectionError:
                self._waiting = attempt  # the process is dead; the kernel will say so in a moment
                return
            except OSError as error:
                hint = spawn.HINTS.get(error.errno or 0, "see unix(7)")
                reason = f"the workers cannot be started: {error.strerror}; {hint}"
                self._reactor.call_later(0, lambda: attempt.on_failed(reason, exit_codes.CONFIG))
                return
            self._under_way = attempt

    def _on_message(self, message: launch.FromForkserver) -> None:
        match message:
            case launch.Ready(skipped=skipped):
                if skipped and not self._skip_told:
                    self._skip_told = True
                    self._say(f"each rank imports torch by itself, which takes longer: {self._config.program.target}, {skipped}")
            case launch.Unfit(reason=reason):
                self._spawn_from_now_on(reason)
            case launch.Forked(pids=pids):
                self._losses = 0
                attempt, self._under_way = self._under_way, None
                if attempt is not None:
                    attempt.on_started(pids)
                    self._server.let_go(len(pids))
            case launch.Failed(reason=reason):
                attempt, self._under_way = self._under_way, None
                if attempt is not None:
                    attempt.on_failed(f"the workers cannot be started: {reason}", exit_codes.CONFIG)
        self._advance()

    def _on_death(self, how: str, state: State) -> None:
        self._losses += 1
        # Nothing of it ran: its gate is closed.
        self._waiting, self._under_way = self._under_way or self._waiting, None
        if state == "loading":
            self._spawn_from_now_on(f"the process that imports for all of them {how}")
        elif self._losses >= _LOSSES_UNTIL_SPAWN:
            self._spawn_from_now_on(f"the process to fork them from {how}, {self._losses} times")
        else:
            self._say(f"the process to fork workers from {how}; it is started again")
            self.prepare()
        self._advance()

    def _spawn_from_now_on(self, reason: str) -> None:
        self._forking = False
        self._say(f"each worker gets an interpreter of its own (--start-method spawn): {reason}")

    def _command(self, worker: launch.Worker) -> spawn.Command:
        argv = command.command(self._config.program, self._python, self._flags, worker.argv)
        program = argv[0] if self._config.program.run_as != "program" else command.find_program(argv[0], dict(worker.env))
        return program, argv
