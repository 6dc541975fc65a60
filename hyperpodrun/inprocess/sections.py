"""Stretches of the wrapped function in which no restart is raised, for code that does not have `caller` at hand."""

from contextlib import AbstractContextManager, nullcontext

from hyperpodrun.inprocess import wrap


def update_section() -> AbstractContextManager[None]:
    """While the training state is being changed: a raise waits, but not for long (interrupt.UPDATE_S)."""
    session = wrap.running_session()
    return nullcontext() if session is None else session.interrupter.update()
