"""Faults that HYPERPODRUN_INJECT plants: read before anything starts, since each rank would fail by a wrong word in it."""

from collections.abc import Mapping

from hyperpodrun.agent.wire import names
from hyperpodrun.cli.refusal import Refusal


def planted(environment: Mapping[str, str], most_ranks: int, notes: list[str]) -> tuple[str, ...]:
    """The orders, as they are written. `most_ranks`: of the largest world. Raises Refusal."""
    text = environment.get(names.INJECT, "")
    if not text:
        return ()
    from hyperpodrun.inprocess import inject

    try:
        faults = inject.parse(text)
    except inject.BadInjection as error:
        raise Refusal(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{names.INJECT}={text!r}: the file cannot be read: {error}") from error
    for fault in faults:
        if fault.ranks and min(fault.ranks) >= most_ranks:
            notes.append(f"{names.INJECT}: {fault.text!r} can strike nobody, the ranks are 0 to {most_ranks - 1}")
    return tuple(fault.text for fault in faults)
