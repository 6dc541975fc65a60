"""Running something for a limited time."""

import threading
from collections.abc import Callable
from typing import Any


class TookTooLong(Exception):
    """It still runs, in a thread of its own that nobody waits for."""


def run(action: Callable[[], Any], timeout_s: float, name: str) -> Any:
    """The result of `action`, run in another thread. Raises what it raises, and TookTooLong."""
    outcome: list[Any] = []
    problem: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(action())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            problem.append(error)

    thread = threading.Thread(target=body, name=f"hyperpodrun-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TookTooLong(f"{name} did not end within {timeout_s:.3g} s")
    if problem:
        raise problem[0]
    return outcome[0]
