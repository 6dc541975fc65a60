"""What a process saves before others take its place.

A process at the restart barrier that is to be replaced (not in place: new processes of its node, or of all) still holds the newest
state that there is. Who keeps something of that kind registers here how to save it. It is called in the function's thread, between
two calls of the function, when nothing of the old generation runs any more; the agent waits for it, but not longer than
--shutdown-timeout.
"""

import sys
import traceback
from collections.abc import Callable

_savers: dict[str, Callable[[], None]] = {}


def at_parting(name: str, save: Callable[[], None]) -> None:
    """From now on call this, in place of what had the same name."""
    _savers[name] = save


def part() -> None:
    """Save everything; what one cannot do does not keep the others from it."""
    for name, save in list(_savers.items()):
        try:
            save()
        except Exception:  # noqa: BLE001 - somebody else's code, and this process ends
            print(f"hyperpodrun: {name} could not be saved for the next processes:", file=sys.stderr)
            traceback.print_exc()
