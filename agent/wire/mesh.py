"""What agents say to each other, and the values they agree on.

Values: `Member`, `View`, `Ballot`, `Vote`. Messages: one struct each, tagged, MessagePack. Everything is immutable; a
decoder for `Message` checks every type. Times on the wire are nanoseconds of the *sender's* clock and only ever
echoed back to it: no two clocks are compared.

A node is one slot of the job; an incarnation is one life of that slot's vote file (MESH A2). A message's source,
which the transport vouches for, is the pair of both.
"""

from typing import Literal

import msgspec

from hyperpodrun.agent.wire.rungs import UNKNOWN, Fault, Symptoms

Role = Literal["active", "standby"]
Mode = Literal["run", "hold", "closed"]
Restart = Literal["none", "process", "inprocess"]
Source = tuple[str, int]


class Member(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One agent of the job. `group` is its topology key; `wish` the position it would like (--node-rank), None: any."""

    node: str
    incarnation: int
    role: Role = "standby"
    nproc: int = 1
    group: str = ""
    wish: int | None = None
    addresses: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """What the transport calls this agent."""
        return (self.node, self.incarnation)


class View(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One agreed state of the job (MESH section 1).

    `chain` names the history it belongs to: a token drawn by whoever formed view 0. `order` holds the active nodes by
    position in the world; ranks are consecutive in it. `fence`: slots in which workers of an earlier world may still run,
    so that the right to write checkpoints is withheld ("" stands for slots without a known name). `ghosts`: the active sets
    of earlier worlds that may still be running *in full*. `restarts` counts the failures that cost the job a restart.

    `restart`: how the workers of the view before end, if this one restarts the world; "inprocess": processes stay and go to the
    barrier, where they can, but those of the nodes in `fresh` are replaced. `faults`: what the next decision about a rung remembers,
    oldest first, bounded.
    """

    chain: str
    epoch: int
    number: int
    generation: int
    parent: str
    members: tuple[Member, ...]
    tiebreak: str
    order: tuple[str, ...]
    mode: Mode
    restart: Restart = "none"
    restarts: int = 0
    fence: tuple[str, ...] = ()
    ghosts: tuple[tuple[str, ...], ...] = ()
    exit_code: int = 0
    reason: str = ""
    fresh: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


class Ballot(msgspec.Struct, frozen=True, gc=False, array_like=True, order=True):
    """Ordered by epoch, round, proposer; no two proposers ever use the same one. The epoch grows with each recovery (A11)."""

    epoch: int
    round: int
    node: str
    incarnation: int


ZERO = Ballot(0, 0, "", 0)


class Accepted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A value this voter has accepted, and under which ballot."""

    ballot: Ballot
    view: View


class Vote(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The vote file (A2): who I am, the view I am in, what I promised and accepted for the next one.

    `floor`: the least epoch in which this agent's workers may start again, because a recovery (A11) went through this view.
    """

    incarnation: int
    view: View | None
    promised: Ballot = ZERO
    accepted: Accepted | None = None
    floor: int = 0


class Brief(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where the sender stands. `live`: its world runs and its lease is good."""

    chain: str
    epoch: int
    number: int
    digest: str
    live: bool


NOWHERE = Brief("", 0, -1, "", False)


class Alert(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="alert"):
    """`observer` does not hear `subject` (or hears it again: down=False). Valid in the view with this digest; `seq` grows."""

    view: str
    observer: str
    subject: str
    seq: int
    down: bool
    loud: bool = False


ReportKind = Literal["failed", "finished", "leaving", "restart", "revived", "unready", "join", "dead"]


class Report(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="report"):
    """Something that the next view should take into account (M7).

    failed    workers of `about` failed in `generation` with `code`; `symptoms` says more
    finished  all workers of `about` ended well in `generation`
    leaving   `about` leaves in good order; its workers are already gone
    restart   a restart of `generation` is asked for, by `symptoms.rung` at least; it is nobody's fault
    revived   the agent of `about` died in `generation`, its workers with it, and is back
    unready   `about` did not reach the barrier of `generation` in time
    join      `member` asks to be taken in
    dead      a person or the scheduler certifies that `about` is gone for good and runs nothing
    """

    kind: ReportKind
    about: Source
    generation: int = 0
    code: int = 0
    detail: str = ""
    member: Member | None = None
    symptoms: Symptoms = UNKNOWN


Item = Alert | Report


class Heartbeat(msgspec.Struct, frozen=True, gc=False, tag="heartbeat"):
    """Subject to observer, each interval; carries gossip (M6)."""

    brief: Brief
    items: tuple[Item, ...] = ()


class Probe(msgspec.Struct, frozen=True, gc=False, tag="probe"):
    """Answer at once."""

    brief: Brief


class Ack(msgspec.Struct, frozen=True, gc=False, tag="ack"):
    """The answer to a probe, and the unasked answer of an accused (M5)."""

    brief: Brief


class Reports(msgspec.Struct, frozen=True, gc=False, tag="reports"):
    """Alerts and reports sent straight to the first candidates (M7)."""

    brief: Brief
    items: tuple[Item, ...]


class Prepare(msgspec.Struct, frozen=True, gc=False, tag="prepare"):
    """Roll call (A4) for the successor of the view with digest `parent`."""

    brief: Brief
    parent: str
    ballot: Ballot


class Promise(msgspec.Struct, frozen=True, gc=False, tag="promise"):
    """I will accept nothing below `ballot`. `spent`: don't count my tiebreak. `items`: what I know that the proposer may not."""

    parent: str
    ballot: Ballot
    accepted: Accepted | None
    spent: bool
    me: Member
    items: tuple[Item, ...] = ()


class Nack(msgspec.Struct, frozen=True, gc=False, tag="nack"):
    """`ballot` is too low: I promised `promised`."""

    parent: str
    ballot: Ballot
    promised: Ballot


class Accept(msgspec.Struct, frozen=True, gc=False, tag="accept"):
    """Accept this view as the successor (A7)."""

    parent: str
    ballot: Ballot
    view: View


class AcceptedMsg(msgspec.Struct, frozen=True, gc=False, tag="accepted"):
    """I accepted what `ballot` proposed. `spent` as in Promise."""

    parent: str
    ballot: Ballot
    spent: bool


class Decided(msgspec.Struct, frozen=True, gc=False, tag="decided"):
    """This view is decided."""

    view: View


class Pull(msgspec.Struct, frozen=True, gc=False, tag="pull"):
    """Send me what was decided in `chain` after `number`."""

    chain: str
    number: int


class Chain(msgspec.Struct, frozen=True, gc=False, tag="chain"):
    """Decided views, consecutive, the newest last; the answer to Pull and to anyone who is behind."""

    views: tuple[View, ...]


class Beat(msgspec.Struct, frozen=True, gc=False, tag="beat"):
    """One level up in the tree of the candidate `root` (A9).

    `evidence`: for stamps of the root, the members (bit i, little-endian: the view's i-th) that echoed it with nothing open;
    `asks`: a grant is wanted at once.
    """

    brief: Brief
    root: str
    sent_ns: int
    evidence: tuple[tuple[int, bytes], ...]
    asks: bool


class Grant(msgspec.Struct, frozen=True, gc=False, tag="grant"):
    """One level down in the tree of `root`. `stamp`: the newest, to be echoed (0: none yet). `sent_ns`: as in the last beat.

    `age_ns`: since when, as that beat came in, a quorum was known to be with us (negative: known later); None: not known.
    """

    view: str
    root: str
    sent_ns: int
    stamp: int
    age_ns: int | None


class Ready(msgspec.Struct, frozen=True, gc=False, tag="ready"):
    """My workers of earlier generations are gone (A8)."""

    brief: Brief
    generation: int


class Go(msgspec.Struct, frozen=True, gc=False, tag="go"):
    """Everyone is ready for `generation`."""

    brief: Brief
    generation: int


class Hello(msgspec.Struct, frozen=True, gc=False, tag="hello"):
    """I am here and (unless `settled`) want to be taken in. `knows`: agents heard of lately."""

    brief: Brief
    member: Member
    settled: bool
    knows: tuple[Member, ...] = ()


class Welcome(msgspec.Struct, frozen=True, gc=False, tag="welcome"):
    """The answer to Hello: where I stand, who I am, whom I know, and to whom a join is best told."""

    brief: Brief
    member: Member
    knows: tuple[Member, ...]
    candidates: tuple[str, ...]


Message = (
    Heartbeat | Probe | Ack | Reports | Prepare | Promise | Nack | Accept | AcceptedMsg | Decided | Pull | Chain
    | Beat | Grant | Ready | Go | Hello | Welcome
)  # fmt: skip
