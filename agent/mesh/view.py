"""A view's identity, and what every view must satisfy.

A view is a value (`wire.mesh.View`); its digest names it in messages, and its successor holds that digest as `parent`.

Invariants (`validate`): members sorted by node and unique; `order` of a running view is exactly its active members,
each once; a running world has at least one node; the tiebreak is a member.
"""

import functools
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from hyperpodrun.agent.mesh.rings import position
from hyperpodrun.agent.wire.mesh import Brief, Member, Source, View


def digest_of(view: View) -> str:
    """32 hex digits over the canonical encoding: fields in order, nothing left out."""
    return blake2b(msgspec.msgpack.encode(view), digest_size=16).hexdigest()


def brief_of(view: View, digest: str, live: bool) -> Brief:
    """Where somebody in `view` stands."""
    return Brief(view.chain, view.epoch, view.number, digest, live)


def member_of(view: View, node: str) -> Member | None:
    """The member in that slot, whatever its incarnation."""
    for member in view.members:
        if member.node == node:
            return member
    return None


@functools.lru_cache(maxsize=8)
def incarnations(sources: tuple[Source, ...]) -> Mapping[str, int]:
    """Each member's, by node."""
    return dict(sources)


@functools.lru_cache(maxsize=8)
def candidates(digest: str, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """All of a view's nodes in the order in which they may propose (A3): pseudo-random, other in every view."""
    return tuple(sorted(nodes, key=lambda node: position(digest, node)))


def ranks_of(view: View) -> dict[str, range]:
    """Each active node's ranks: consecutive, by position in the world."""
    nproc = {member.node: member.nproc for member in view.members}
    first = 0
    ranks = {}
    for node in view.order:
        ranks[node] = range(first, first + nproc[node])
        first += nproc[node]
    return ranks


def validate(view: View) -> None:
    """Raise ValueError, saying what is wrong, if `view` could not have been made by `succession`."""
    nodes = [member.node for member in view.members]
    if not nodes or nodes != sorted(set(nodes)):
        raise ValueError("members are not sorted and unique")
    active = sorted(member.node for member in view.members if member.role == "active")
    if view.mode == "run" and (not view.order or sorted(view.order) != active):
        raise ValueError("the order of a running world is not its active members")
    if view.tiebreak not in nodes:
        raise ValueError("the tiebreak is no member")
