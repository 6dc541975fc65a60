"""Do two agents mean the same job? What each says of it in its first words, and why another one is refused. Pure.

Theory. All agents of a job must hold the same numbers and, where it is closed, the same roster: a quorum is counted by them (A1, A10),
so two that differ could each form a world. The job's id alone does not say so: it may come from a scheduler's variable or be the
default. Agents that are given different lists of contact points are no strangers: whoever joins later may know one node only.
"""

from hashlib import blake2b

import msgspec

from hyperpodrun.agent.mesh.config import MeshConfig


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What must be the same at all agents. `roster`: a digest of the slots' names, b"" for an open one; `first`: of whom view 0 needs
    the word, "" where any majority may form it.
    """

    min_nodes: int
    max_nodes: int
    slots: int
    detector: str
    roster: bytes = b""
    first: str = ""


def of_job(core: MeshConfig, detector: str) -> Terms:
    """This agent's. `detector`: --failure-detector."""
    roster = (
        blake2b("\0".join(sorted(core.roster)).encode(errors="surrogateescape"), digest_size=16).digest() if core.roster else b""
    )
    first = core.first_contact[:255] if core.roster and not core.forms_anywhere else ""
    return Terms(core.min_nodes, core.max_nodes, core.slots, detector, roster, first)


def encode(terms: Terms) -> bytes:
    """For the transport's greeting."""
    return msgspec.msgpack.encode(terms)


def refusal(me: str, mine: Terms, who: str, greeting: bytes) -> str | None:
    """Why `who`, who says this, is no agent of the job of `me`: a sentence that both sides can read; None when it is one."""
    try:
        theirs = msgspec.msgpack.decode(greeting, type=Terms)
    except msgspec.DecodeError:
        return f"{who} does not say which job it belongs to: install the same hyperpodrun on all nodes"
    if (theirs.min_nodes, theirs.max_nodes, theirs.slots) != (mine.min_nodes, mine.max_nodes, mine.slots):
        what = f"{who} was started with {_size(theirs)}, {me} with {_size(mine)}"
    elif theirs.detector != mine.detector:
        what = f"{who} was started with --failure-detector {theirs.detector!a:.40}, {me} with {mine.detector!r}"
    elif theirs.roster and mine.roster and theirs.roster != mine.roster:
        what = f"{who} was given other nodes than {me} (--peers)"
    elif theirs.first and mine.first and theirs.first != mine.first:
        what = f"{who} was given {theirs.first!a:.300} as the first node of --peers, {me} {mine.first!r}"
    else:
        return None
    return f"{what}. All nodes of one job need the same; if these are two jobs, give each its own --job-id"


def _size(terms: Terms) -> str:
    nodes = f"{terms.max_nodes}" if terms.min_nodes == terms.max_nodes else f"{terms.min_nodes}:{terms.max_nodes}"
    spares = terms.slots - terms.max_nodes
    return f"--nnodes {nodes}" + (f" --spares {spares}" if spares else "")
