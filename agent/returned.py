"""Releasing ranks whose function has returned: not before it has on all nodes, so that any of them can still be made to run it again.

Each node arrives once at a barrier in the generation's key space. A generation that ends meanwhile answers with trouble, and nobody is
released by it.
"""

from collections.abc import Callable
from typing import Any

from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.wire import store as op

KEY = b"\0hyperpodrun/returned"
"""No client's: torch and scripts put their prefixes in front of theirs."""
AGENT = 0
"""The agent's own number among the clients of its key space; processes are counted from 1."""


def arrive(space: KeySpace, nodes: int, then: Callable[[], None]) -> None:
    """This node's ranks have returned; call `then` once those of all `nodes` nodes have."""

    def answered(answer: Any) -> None:
        if answer is True:
            then()

    answered(space.call(space.client(AGENT), op.Arrive(KEY, nodes), answered))
