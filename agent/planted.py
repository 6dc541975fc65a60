"""Which planted faults (hyperpodrun.inprocess.inject) have not struck: a rehearsal that rehearsed nothing should not look like one.

Each strike leaves a claim, a file named by the job and the number of the order, in the launcher's folder or the one that was named.
"""

import os
from collections.abc import Sequence


def not_struck(orders: Sequence[str], folder: str, job_id: str) -> list[str]:
    """Of these orders, those without a claim."""
    try:
        claims = os.listdir(folder)
    except OSError:
        claims = []
    job = "".join(letter if letter.isalnum() else "_" for letter in job_id)
    return [
        order for number, order in enumerate(orders) if not any(name.startswith(f"injected.{job}.{number}.") for name in claims)
    ]
