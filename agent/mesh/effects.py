"""What the cores ask the driver to do, and what the driver tells them: plain frozen values.

Effects are carried out in the order given. `Persist` is done (on disk, renamed) before the next effect is looked at:
the promises that rest on it come after it (A2). Each effect that people may ask about carries `cause`, an id that
`Node.story` explains.
"""

from typing import Literal

import msgspec

from hyperpodrun.agent.wire.mesh import Message, View, Vote
from hyperpodrun.agent.wire.rungs import UNKNOWN, Asked, Symptoms


class Send(msgspec.Struct, frozen=True, gc=False):
    """To whoever lives in slot `to` now; may be lost."""

    to: str
    message: Message


class Persist(msgspec.Struct, frozen=True, gc=False):
    """Write the vote file; None: remove it."""

    vote: Vote | None


class Adopt(msgspec.Struct, frozen=True, gc=False):
    """This agent now stands at `view`."""

    view: View
    digest: str
    cause: str


class StopWorkers(msgspec.Struct, frozen=True, gc=False):
    """End the workers of `generation` and before, then tell `WorkersGone`. `kill`: without grace (fence, eviction).

    `in_place`: live workers that can are to go to the restart barrier instead of ending; where none can, all end. Said again without
    it when the processes are to end after all.
    """

    generation: int
    kill: bool
    cause: str
    in_place: bool = False


class StartWorkers(msgspec.Struct, frozen=True, gc=False):
    """Start this node's workers of the view's generation; those that wait at the restart barrier go on in it."""

    view: View
    cause: str


class Permit(msgspec.Struct, frozen=True, gc=False):
    """From now on the workers of this generation may write checkpoints (A9)."""

    chain: str
    generation: int


class Lease(msgspec.Struct, frozen=True, gc=False):
    """Workers may run until this time of the local clock; a watchdog outside the agent holds them to it."""

    until_ns: int


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Try a plain TCP connect to the slot's inbox and tell `Connected` (M2)."""

    to: str


class End(msgspec.Struct, frozen=True, gc=False):
    """The job is over for this agent."""

    code: int
    reason: str
    cause: str


Effect = Send | Persist | Adopt | StopWorkers | StartWorkers | Permit | Lease | Connect | End
Effects = tuple[Effect, ...]


class ConnectionLost(msgspec.Struct, frozen=True, gc=False):
    """The connection to a peer closed (M2, loud)."""

    node: str


class Connected(msgspec.Struct, frozen=True, gc=False):
    """How `Connect` ended: "open", or "refused" (which includes a name that does not exist). Silence tells nothing."""

    node: str
    outcome: Literal["open", "refused"]


class WorkersGone(msgspec.Struct, frozen=True, gc=False):
    """The answer to StopWorkers: no worker of `generation` or before runs here. `parked`: live ones wait at the restart barrier."""

    generation: int
    parked: bool = False


class WorkersFailed(msgspec.Struct, frozen=True, gc=False):
    """A worker of `generation` failed here; also while that generation is still on its way to the barrier."""

    generation: int
    code: int
    detail: str
    symptoms: Symptoms = UNKNOWN


class WorkersFinished(msgspec.Struct, frozen=True, gc=False):
    """All workers of `generation` here ended well."""

    generation: int


class LeaveAsked(msgspec.Struct, frozen=True, gc=False):
    """This agent was asked to leave; its workers are to be stopped."""


class RestartAsked(msgspec.Struct, frozen=True, gc=False):
    """Somebody asks for a restart of the world, by `rung` at least; it is nobody's fault."""

    detail: str
    rung: Asked = ""


class CertifyDead(msgspec.Struct, frozen=True, gc=False):
    """The scheduler, or a person (`hyperpodctl certify-dead`), vouches that nothing runs in this slot and nothing of it comes
    back (A11).
    """

    node: str


Event = ConnectionLost | Connected | WorkersGone | WorkersFailed | WorkersFinished | LeaveAsked | RestartAsked | CertifyDead
