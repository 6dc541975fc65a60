"""The rungs of escalation, and what agents must know of a fault to choose one.

Theory: a fault is healed by the least that helps, and what did not help is not tried again for ever. The rungs, lowest first:

- inplace   every live worker re-enters its function in the same process, dead ones are forked anew
- node      all worker processes of the named nodes are replaced, the others stay in process
- all       all worker processes of the job are replaced
- replace   the named nodes are dropped; spares take their places, or the world gets smaller
- end       the job ends

Which one it is, `policy/escalation.py` says (`Decide`); the mesh puts its word into the view, a job of one node follows it directly.
States: none, these are values.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

Rung = Literal["inplace", "node", "all", "replace", "end"]
RUNGS: tuple[Rung, ...] = ("inplace", "node", "all", "replace", "end")
Asked = Rung | Literal[""]
"""A rung that somebody asks for as the least; "": none."""


class Symptoms(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What is known of a failed worker, beside its code and words.

    `rank`: its local rank; -1 when it is no one worker's failure. `final`: trying again cannot help (the program cannot be executed).
    `rung`: the least rung asked for (`report_fault(rung=)`). `in_place`: its node could restart in place: the others there wait for
    it in their processes. `progressed`: some rank here completed a step in this generation, or nobody can know.
    `victim`: its words say that a peer was lost.
    """

    rank: int = -1
    final: bool = False
    rung: Asked = ""
    in_place: bool = False
    progressed: bool = True
    victim: bool = False


UNKNOWN = Symptoms()


class Fault(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A fault that was dealt with: what the next decision remembers.

    `rank` is local, -1: the node or its agent itself, -2: no one rank's. `rung` was chosen for it ("replace" also where nobody could
    take its place and all processes were replaced instead). `at_s`: seconds since the epoch by the clock of whoever decided.
    """

    generation: int
    node: str
    rank: int
    rung: Rung
    progressed: bool
    at_s: int


class Rules(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the user allows. Times are seconds."""

    inprocess: bool = False
    """--inprocess-restart."""
    max_restarts: int | None = None
    """Restarts that faults of workers may cost the job, whatever the rung; None: see policy/escalation.py."""
    max_node_failures: int | None = None
    """Nodes lost, and agents that died, within any `window_s`; None: any number."""
    window_s: float = 3600.0
    """So long a fault is remembered."""
    max_rank_faults: int = 3
    """So many remembered faults of one rank are healed by the same rung if there was progress between them; then the next."""
    no_progress: int = 6
    """So many generations in a row that fail before any rank has completed a step end the job."""


class Incident(msgspec.Struct, frozen=True, gc=False):
    """A fault, or another reason to restart, that waits for a decision.

    failed    a worker of `node` failed with `code`
    lost      `node` is gone
    revived   the agent of `node` died, its workers with it, and is back
    asked     nobody's fault: somebody asks for a restart
    """

    kind: Literal["failed", "lost", "revived", "asked"]
    generation: int
    node: str
    code: int = 0
    detail: str = ""
    symptoms: Symptoms = UNKNOWN


class Situation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """All that a decision rests on. `generation` runs; `restarts` are spent; `spares` nodes could take another's place, and so many
    as `shrink` may go without anybody in their place.
    """

    rules: Rules
    generation: int
    restarts: int = 0
    history: tuple[Fault, ...] = ()
    incidents: tuple[Incident, ...] = ()
    spares: int = 0
    shrink: int = 0
    now_s: int = 0


class Decision(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What follows. `rung` "": nothing.

    `in_place`: should the world restart, processes stay, but those of the nodes in `fresh`. `dropped`: nodes that are to go.
    `held_back`: repeat offenders, which are given no place while a world is feasible without them. `history` as it is from now on.
    `counted`: it spends a restart. `reason` in words; `code`: how the job ends.
    """

    rung: Asked = ""
    in_place: bool = False
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    history: tuple[Fault, ...] = ()
    counted: bool = False
    reason: str = ""
    code: int = 0


Decide = Callable[[Situation], Decision]
