"""A loop whose time passes only when a test says so."""

import pytest

from hyperpodrun.agent.reactor import Reactor


class Clock(Reactor):
    """The reactor's timers without its clock: `pass_time` fires what falls due."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds go by."""
        end_s = self.time_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            self.time_s = max(self.time_s, self._timers[0][0])
            self._fire_timers()
        self.time_s = end_s


@pytest.fixture
def clock() -> Clock:
    return Clock()
