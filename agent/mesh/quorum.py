"""Who may decide (A1): a majority of a view's members, or exactly half of them with the tiebreak.

Theory: two quorums of one view always share a member. Two majorities do; a half with the tiebreak and a majority do;
two halves that both hold the tiebreak do. Taking quorums away (a spent tiebreak, `may_tiebreak=False`) keeps that
true.

When no quorum is left (A11), the closed roster may decide: every slot that is not certified dead. That shares a
living member with every quorum that still has one; a quorum of which all are gone can have told nobody who is still
there and would not say so.

View 0 has no members to ask (A10): `Genesis` decides it by slots.
"""

from collections.abc import Collection

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.wire.mesh import View


def is_quorum(view: View, nodes: Collection[str], may_tiebreak: bool) -> bool:
    """True when `nodes` (those not in the view do not count) may decide the successor of `view`.

    `may_tiebreak`: the tiebreak's vote, if it is among `nodes`, may count for the half: false once its agent restarted in
    this view, because it cannot know what a recovery decided while it was away.
    """
    if 2 * len(nodes) < len(view.members):
        return False
    votes = 0
    tiebreak = False
    for member in view.members:
        if member.node in nodes:
            votes += 1
            tiebreak = tiebreak or member.node == view.tiebreak
    double = 2 * votes
    return double > len(view.members) or (double == len(view.members) and tiebreak and may_tiebreak)


def is_genesis_quorum(config: MeshConfig, nodes: Collection[str]) -> bool:
    """True when `nodes` may form view 0.

    (a) Any min_nodes of a closed roster, when that is more than half of it. (b) Otherwise only with the first contact.
    """
    if config.forms_anywhere:
        here = sum(1 for node in config.roster if node in nodes)
        return here >= config.min_nodes and 2 * here > config.slots
    return config.first_contact in nodes and len(nodes) >= config.min_nodes


def is_recovery_quorum(config: MeshConfig, slots: Collection[str], certified: Collection[str], nodes: Collection[str]) -> bool:
    """True when `nodes` are all of the job's `slots` but those certified dead, and every slot is known by name."""
    return len(slots) == config.slots and all(slot in nodes or slot in certified for slot in slots)
