"""One slot of a simulated job: what is on its disk, what runs there, what has not reached it yet.

Theory: a host has power or not, an agent or not, and workers or not; its clock runs at a rate of its own from an origin of its
own. The disk outlives the agent and not the power.

States: dark (no power), empty (power, no agent), up, frozen.
Invariants: `life` grows whenever an agent starts or ends, so what was meant for an earlier one is known by its number.
"""

import random
from collections import deque

from hyperpodrun.agent.mesh.effects import Event
from hyperpodrun.agent.mesh.inbox import NEVER
from hyperpodrun.agent.mesh.node import Node
from hyperpodrun.agent.wire.mesh import Member, Message, Source, Vote

Generation = tuple[str, int]
"""(chain, generation): one training world."""


class Host:
    """Times: `clock` is local, everything named `_ns` is true time but `lease_ns`."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.power = True
        self.node: Node | None = None
        self.member: Member | None = None
        self.source: Source = ("", 0)
        """What the transport calls this member."""
        self.life = 0
        self.starts = 0
        self.incarnation = 0
        self.frozen = False
        self.stuck_ns = 0
        self.lease_ns = 0
        self.disk: Vote | None = None
        self.works: Generation | None = None
        self.stopping = False
        self.stays = False
        """They were last asked to stop in place."""
        self.parked = False
        """Their processes wait at the restart barrier."""
        self.permit = False
        self.inbox: deque[tuple[Source, Message]] = deque()
        self.events: deque[Event] = deque()
        self.free_ns = 0
        self.draining = False
        self.wake_ns = NEVER
        self.due_ns = NEVER
        """What the agent last said about when it is due, on its own clock."""
        self.crash_after: int | None = None
        self.crash_for_ns = 0
        self.ended: int | None = None
        self.origin_ns = rng.randrange(10**12)
        self.ppm = rng.randint(-300, 300)

    def clock(self, now: int) -> int:
        """Local time."""
        return self.origin_ns + now + now * self.ppm // 1_000_000

    def true(self, local: int) -> int:
        """The true time at which the local clock shows at least `local`."""
        elapsed = local - self.origin_ns
        return elapsed * 1_000_000 // (1_000_000 + self.ppm) + 1

    def has_no_workers(self) -> None:
        """They are gone, and their permit with them."""
        self.works, self.permit, self.stopping, self.parked = None, False, False, False

    def agent_is_gone(self) -> None:
        """The process ended; the keeper took the workers with it."""
        self.node = None
        self.life += 1
        self.has_no_workers()
        self.inbox.clear()
        self.frozen = False
