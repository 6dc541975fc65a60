"""What people are told about the mesh: one sentence an event. Pure."""

import math
from collections.abc import Collection

from hyperpodrun.agent.wire.mesh import Member, View

MOST_NAMED = 8


def named(nodes: Collection[str]) -> str:
    """Node names as part of a sentence; the first few of many."""
    shown = sorted(nodes)
    if len(shown) <= MOST_NAMED:
        return ", ".join(shown)
    return f"{', '.join(shown[:MOST_NAMED])} and {len(shown) - MOST_NAMED} others"


def looking(contacts: Collection[str], min_nodes: int, slots: int, limit_s: float) -> str:
    """No view yet."""
    wanted = f"{min_nodes}" if min_nodes == slots else f"{min_nodes} to {slots}"
    at = f" at {named(contacts)}" if contacts else ""
    return f"looking for the other nodes{at}; {wanted} are needed, and are waited for up to {limit_s:g} s"


def never_met(here: Collection[str], missing: Collection[str], min_nodes: int, limit_s: float) -> str:
    """The time to find each other is over."""
    who = f"here are {named(here)}" if here else "only this one is here"
    text = f"no world of at least {min_nodes} nodes within {limit_s:g} s (--rdzv-conf join_timeout): {who}; "
    return text + (
        f"not reached: {named(missing)}" if missing else "too few contact points are known, name all nodes with --peers"
    )


def adopted(
    view: View, before: View | None, me: str, min_nodes: int, max_restarts: int | None, slots: Collection[str]
) -> str | None:
    """A new view; None when nothing changed that people would ask about. `slots`: all that this job is known to have."""
    here = [member.node for member in view.members]
    if view.mode == "closed" or (before is not None and before.number == view.number):
        return None  # the end is told with the reason; an agent that came back stands where it stood
    if view.mode == "hold":
        missing = set(slots) - set(here)
        waits = f"waiting for {named(missing)}" if missing else "waiting for further nodes"
        return (
            f"view {view.number}: training is held: {len(here)} of at least {min_nodes} nodes are here ({named(here)}); "
            f"{waits} ({view.reason})"
        )
    standby = me not in view.order
    if view.number == 0 or view.restart != "none" or before is None:
        of = f" of {len(here)}" if len(here) > len(view.order) else ""
        text = (
            f"view {view.number}: world {view.generation} on {len(view.order)}{of} nodes, rank 0 on {view.order[0]}, "
            f"restart {view.restarts}{'' if max_restarts is None else f' of {max_restarts}'}: {view.reason}"
        )
        return f"{text}; this node is standing by" if standby else text
    if standby and me in before.order:
        return f"view {view.number}: this node is standing by"
    return None


def no_majority(view: View, silent: Collection[str], lease_s: float, limit_s: float) -> str:
    """Too few of the view's members answer to decide anything."""
    here = [member.node for member in view.members if member.node not in silent]
    return (
        f"only {named(here)} of the {len(view.members)} nodes of view {view.number} answer, and that is no majority: "
        f"nothing can be decided, waiting for {named(silent)}. Should none return, the workers here are ended within {lease_s:g} s, "
        "so that never two worlds train at once; they start again when enough nodes are back. If one of them is gone for good and "
        "nothing of it runs any more, say so: hyperpodctl certify-dead NODE"
        + ("" if limit_s == math.inf else f". In {limit_s:g} s the silent are taken for dead (--on-quorum-loss, UNSAFE)")
    )


def taken_for_dead(silent: Collection[str], limit_s: float) -> str:
    """--on-quorum-loss=continue:S comes into force."""
    return (
        f"UNSAFE: nothing was heard of {named(silent)} for {limit_s:g} s, and --on-quorum-loss=continue says to take them for dead: "
        "this node goes on without them. If they are only cut off and go on too, two worlds of this job train at once"
    )


def cannot_go_on(known: int, slots: int) -> str:
    """--on-quorum-loss=continue:S, and it cannot be."""
    return (
        f"--on-quorum-loss=continue cannot go on: of the {slots} nodes this job may have only {known} are known by name, "
        "and each must answer or be taken for dead; name all of them with --peers"
    )


def dropped() -> str:
    """The others went on without this agent."""
    return (
        "the other nodes went on without this one (they could not reach it, or its workers failed again and again): "
        "its workers are ended, and it joins again"
    )


def same_wish(one: str, other: str, wish: int) -> str:
    """Two nodes insist on the same --node-rank."""
    first, second = sorted((one, other))
    return f"{first} and {second} both insist on --node-rank {wish}: give each node its own, or leave it to the launcher"


def insist_on_one_rank(me: Member, other: Member) -> bool:
    """Does another node insist on the rank that this one insists on?"""
    return me.wish is not None and me.wish == other.wish and me.node != other.node
