"""The wrapper's side of the line to the agent, as small as the wrapper needs it."""

from collections.abc import Callable
from typing import Protocol

from hyperpodrun.agent.wire import link


class Line(Protocol):
    """Messages to the agent and back. `send` may be called from any thread and does not wait for the other side."""

    def send(self, message: link.FromWorker) -> None:
        """Raises OSError when the other side has ended."""


Connect = Callable[[Callable[[link.ToWorker], None], Callable[[], None]], Line | None]
"""Given what to do with a message and at the line's end (called in the line's own thread): the line, or None without an agent."""
