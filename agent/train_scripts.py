"""The pre- and post-train scripts: run once a node before each start, and after success.

One at a time; it is over when its process has ended and what it left behind has been swept.
"""

import os
from collections.abc import Callable

from hyperpodrun.agent.attempt import reason_of
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import exit_codes, names
from hyperpodrun.agent.workers.output import Output
from hyperpodrun.agent.workers.script import Script
from hyperpodrun.agent.workers.sweep import Sweeper

CANNOT_RUN = 126


class TrainScripts:
    """`base_env` is the launcher's environment; `on_ended(code)` comes from the loop, once for each `run`."""

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        base_env: dict[bytes, bytes],
        output: Output,
        sweeper: Sweeper,
        watch_child: Callable[[int, Callable[[int], None]], None],
        on_ended: Callable[[int], None],
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._base_env = base_env
        self._output = output
        self._sweeper = sweeper
        self._on_ended = on_ended
        self._script = Script(reactor, watch_child, config.python)

    def run(self, which: str, restart_count: int) -> None:
        """`which` is "pre" or "post"; `restart_count` that of the attempt it belongs to."""
        config = self._config
        path, args = (
            (config.pre_train_script, config.pre_train_args)
            if which == "pre"
            else (config.post_train_script, config.post_train_args)
        )
        assert path is not None
        name = f"{which}-train"
        env = self._base_env | {
            names.JOB_ID.encode(): os.fsencode(config.job_id),
            names.RESTART_COUNT.encode(): b"%d" % restart_count,
            names.JOB_RESTART_COUNT.encode(): b"%d" % restart_count,
        }
        streams = self._output.open_helper(name)

        def ended(status: int) -> None:
            self._output.helper_ended(name)
            self._sweeper.sweep(lambda _left: self._on_ended(exit_codes.from_wait_status(status)))

        try:
            self._script.start(path, args, env, streams, ended)
        except OSError as error:
            self._output.say(f"the {name} script cannot be run: {reason_of(error)}")
            self._output.helper_ended(name)
            self._reactor.call_later(0, lambda: self._on_ended(CANNOT_RUN))
        finally:
            for fd in streams:
                os.close(fd)

    def stop(self, kill: bool) -> None:
        """End the script that runs, with the grace or at once."""
        self._script.stop(kill, self._config.shutdown_timeout_s)
