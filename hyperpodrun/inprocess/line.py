"""The wrapper's side of the line to the agent, as small as the wrapper needs it."""

from collections.abc import Callable
from typing import Protocol

from hyperpodrun.agent.wire import link


class Line(Protocol):
    """Messages to the agent and back. `send` may be called from any thread and does not wait for the other side."""

    def send(self, message: link.FromWorker) -> None:
        """Raises OSError when the other side has ended, or takes nothing."""

    def beat_with(self, make: Callable[[], link.Beat | None]) -> None:
        """Send what `make` gives every BEAT_S; it is called in the line's thread."""


Connect = Callable[[Callable[[link.ToWorker], None], Callable[[object], None]], Line | None]
"""Given what to do with a message, and at the line's end (with the reason): the line, or None without an agent.

Both are called in the line's own thread.
"""
