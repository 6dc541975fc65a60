"""What the wrapped function is told about where it goes on."""

from hyperpodrun.inprocess.caller import HPCallWrapper
from hyperpodrun.inprocess.progress import counters


def test_the_step_upon_restart_is_the_one_that_was_restored() -> None:
    caller = HPCallWrapper(None)
    counters.note_step(41)
    counters.begin()
    assert caller.step_upon_restart == 42
    counters.note_restored(30)
    counters.note_step(30)
    assert caller.step_upon_restart == 30
    counters.begin()
    assert caller.step_upon_restart == 31
    counters.note_restored(0)
