"""What a training script needs around the wrapper."""

import os
import time
from collections.abc import Callable

from hyperpodrun.agent.wire import link, names
from hyperpodrun.inprocess.line import Line

_LOOK_EVERY_S = 0.05


class HPAgentK8sAPIFactory:
    """Makes the wrapper's line to the agent of this node; None where there is no agent.

    The name is the documented one; Kubernetes is not needed. Give another callable as `hp_api_factory=` to speak over a line of
    one's own (tests do): it gets `(on_message, on_end)` and returns an object with `send`, or None.
    """

    def __call__(self, on_message: Callable[[link.ToWorker], None], on_end: Callable[[object], None]) -> Line | None:
        """See line.Connect."""
        from hyperpodrun.link import Link, NoLauncher

        try:
            line = Link.current()
        except NoLauncher:
            return None
        line.subscribe(on_message, on_end)
        return line


def wait_rank(timeout: float | None = None) -> tuple[int, int]:
    """(rank, world size), once both are known and stand in os.environ. Raises TimeoutError after `timeout` seconds.

    They are known at once in every worker of this launcher: a spare's workers are forked when it is taken in, by a forkserver that
    has imported torch before. What has to wait is code that another process starts with an environment of its own.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    while True:
        rank, world_size = os.environ.get(names.RANK, ""), os.environ.get(names.WORLD_SIZE, "")
        if rank.isdigit() and world_size.isdigit():
            return int(rank), int(world_size)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise TimeoutError(f"no rank was given to this process within {timeout:g} s; is it started by hyperpodrun?")
        time.sleep(_LOOK_EVERY_S)
