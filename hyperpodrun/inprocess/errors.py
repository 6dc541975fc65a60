"""What the wrapper raises, and what is raised at it."""

from hyperpodrun.agent.wire.link import Rung


class RestartRequested(BaseException):
    """Leave the wrapped function, to run it again in the next generation.

    Raised into the function when the agents have decided so; user code may raise it as well, to ask for a restart of the job:
    `rung` is then the least that will do ("": whatever the policy says). Not an Exception: `except Exception` must not eat it.
    """

    def __init__(self, reason: str = "", rung: Rung = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.rung = rung


RankShouldRestart = RestartRequested


class HealthCheckError(Exception):
    """This process, its device or its node is not fit to go on. The process is replaced."""

    def __init__(self, reason: str, rung: Rung = "inplace") -> None:
        super().__init__(reason)
        self.reason = reason
        self.rung = rung


class InternalError(Exception):
    """The wrapper or its line to the agent has failed, not the wrapped function."""
