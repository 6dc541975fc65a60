"""From a view and a roll call to the next view (A5): a pure function.

Theory: the roll call, not suspicion, says who is there. A member is dropped only when it leaves, when its slot has a
new incarnation, when it is accused and does not answer, when its links fail one way for long, or when it cannot reach
the restart barrier. One that is silent in the roll call without being accused stays: it may just be slow, and if it
is dead its observers will say so.

Which rung follows a fault, and so who else goes, is not chosen here (`Decide`); `plain` is all that the mesh itself knows.

What may still run elsewhere is carried along. `fence`: members of earlier worlds that were dropped and of whose
workers nobody knows that they are gone; until a lease has run out, or the slot says so itself, no checkpoint may be
written. `ghosts`: earlier worlds of which *no* member is known to have stopped; until then a world that shares no
node with one of them may not even start, or two whole worlds of one job would run.

Invariants: the result passes `view.validate`; its parent is the digest given; generation grows exactly when the world
restarts.
"""

import msgspec

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.ranks import assign
from hyperpodrun.agent.wire.mesh import Member, Report, Restart, View
from hyperpodrun.agent.wire.rungs import Decide, Decision, Incident, Situation


class RollCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a proposer knows when its roll call closes. Node names unless said otherwise."""

    answered: frozenset[str]
    accused: frozenset[str] = frozenset()
    """At least L alerts."""
    convicted: frozenset[str] = frozenset()
    """At least H alerts, or no answer to roll calls, for `one_way_ns`."""
    unready: frozenset[str] = frozenset()
    certified: frozenset[str] = frozenset()
    """Vouched for to be dead for good (A11); nothing of theirs runs."""
    leaving: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    joiners: tuple[Member, ...] = ()
    failures: tuple[Report, ...] = ()
    restarts: tuple[Report, ...] = ()
    """Restarts without a fault, and agents that died and are back."""
    now_s: int = 0
    """The time of day."""
    started: bool = False
    """GO was seen for the view's generation: every older world has a stopped member."""
    fence_over: bool = False
    """The view needed no fence, or its fence time has passed."""
    settled: bool = False
    """The view is older than any lease from before it: no world before it runs anywhere."""


def keeps(member: Member, roll: RollCall, reborn: frozenset[str]) -> bool:
    """Whether a member of the view stays in the next one."""
    node = member.node
    if node in roll.leaving or node in reborn or node in roll.convicted or node in roll.unready or node in roll.certified:
        return False
    return node in roll.answered or node not in roll.accused


def genesis(config: MeshConfig, members: tuple[Member, ...], chain: str) -> View:
    """View 0 of a new history. Not all slots here: one of the others might run something that we forgot, hence the fence."""
    order = assign((), {}, members, config.min_nodes, config.max_nodes, True)
    if order is None:
        raise ValueError("view 0 needs a feasible world")
    here = frozenset(member.node for member in members)
    absent = tuple(node for node in config.roster if node not in here) or ("",)
    return View(
        chain=chain, epoch=0, number=0, generation=0, parent="", members=_with_roles(members, order),
        tiebreak=_tiebreak(config, order, members, ""), order=order, mode="run",
        fence=absent if len(members) < config.slots else (),
        reason="the job starts",
    )  # fmt: skip


def plain(situation: Situation) -> Decision:
    """Every fault restarts all, until the restarts are spent."""
    failed = [i for i in situation.incidents if i.kind == "failed"]
    most = situation.rules.max_restarts
    if failed and (failed[0].symptoms.final or (most is not None and situation.restarts >= most)):
        return Decision(rung="end", code=failed[0].code)
    return Decision(rung="all" if situation.incidents else "", counted=bool(failed))


def successor(config: MeshConfig, view: View, digest: str, roll: RollCall, decide: Decide = plain) -> View | None:
    """The next view, or None when there is nothing to change."""
    joiners = tuple(j for j in roll.joiners if not any(m.source == j.source for m in view.members))
    reborn = frozenset(j.node for j in joiners)
    kept = tuple(m for m in view.members if keeps(m, roll, reborn))
    members = tuple(sorted((*kept, *joiners), key=lambda m: m.node))
    if view.mode == "closed":
        return None
    if not members:  # all leave at once: nobody would be left to decide a view without them
        return _closed(view, digest, 0, "all nodes left") if roll.leaving.issuperset(m.node for m in view.members) else None
    stay = frozenset(m.node for m in kept)
    gone = tuple(m for m in view.members if m.node not in stay)
    running = view.mode == "run"
    if running and not joiners and not gone and all(node in roll.finished for node in view.order):
        return _closed(view, digest, 0, "all workers have finished")
    decision = decide(_situation(config, view, roll, members, gone))
    if decision.rung == "end":
        failed = f"workers of {roll.failures[0].about[0]} failed: {roll.failures[0].detail}" if roll.failures else ""
        why = f"{failed} ({decision.reason})" if failed and decision.reason else failed or decision.reason
        return msgspec.structs.replace(_closed(view, digest, decision.code, why), faults=decision.history)
    broken = running and (decision.rung != "" or any(m.role == "active" for m in gone))
    grow = config.elastic_now or broken or not running
    order = None
    if decision.dropped:
        rest = tuple(m for m in members if m.node not in decision.dropped)
        order = _world(config, view, rest, grow, decision.held_back)
        if order is None:  # those at hand do not fit: nobody goes, all processes are replaced
            decision = msgspec.structs.replace(decision, dropped=(), fresh=(), in_place=False)
        else:
            members, gone = rest, (*gone, *(m for m in kept if m.node in decision.dropped))
    if order is None:
        order = _world(config, view, members, grow, decision.held_back)
    restart = broken or (order is not None and order != view.order) or (order is not None and not running)
    if not gone and not joiners and not restart:
        return None
    mode, generation = view.mode, view.generation
    if order is None:
        mode = "hold"
    elif restart:
        mode, generation = "run", view.generation + 1
    confirmed = roll.leaving | reborn | roll.certified
    unknown = {m.node for m in gone if m.role == "active"} | set(() if roll.fence_over else view.fence)
    return View(
        chain=view.chain, epoch=view.epoch, number=view.number + 1, generation=generation, parent=digest,
        members=_with_roles(members, view.order if order is None else order),
        tiebreak=_tiebreak(config, order or view.order, members, view.tiebreak),
        order=view.order if order is None else order, mode=mode,
        restart=_restart(view, mode, restart, decision),
        restarts=view.restarts + decision.counted, fence=tuple(sorted(unknown - confirmed)),
        ghosts=_ghosts(view, roll, confirmed, restart or mode != view.mode),
        reason=_reason(view, roll, gone, joiners, decision),
        fresh=decision.fresh if restart or mode != view.mode else (), faults=decision.history,
    )  # fmt: skip


def _restart(view: View, mode: str, restarts: bool, decision: Decision) -> Restart:
    """Processes may stay from world to world, and through a time without one, as long as no decision in between has given them up."""
    stay = decision.in_place and (view.mode == "run" or view.restart == "inprocess")
    if mode == "run" and restarts:
        return "inprocess" if stay else "process"
    return "inprocess" if mode == "hold" and stay else "none"


def _situation(
    config: MeshConfig, view: View, roll: RollCall, members: tuple[Member, ...], gone: tuple[Member, ...]
) -> Situation:
    """What the policy is to decide on. Only a running world has faults."""
    active = frozenset(view.order)
    there = [m.node for m in members]
    incidents: list[Incident] = []
    if view.mode == "run":
        # Who was to be ready and was not counts as lost; who left or asked, does not.
        lost = [m.node for m in gone if m.role == "active" and m.node not in roll.leaving]
        incidents += (Incident("lost", view.generation, node) for node in lost)
        incidents += (Incident("failed", r.generation, r.about[0], r.code, r.detail, r.symptoms) for r in roll.failures)
        incidents += (
            Incident("revived" if r.kind == "revived" else "asked", r.generation, r.about[0], 0, r.detail, r.symptoms)
            for r in roll.restarts
        )
    return Situation(
        rules=config.rules, generation=view.generation, restarts=view.restarts, history=view.faults,
        incidents=tuple(incidents), spares=sum(node not in active for node in there),
        shrink=max(0, sum(node in active for node in there) - config.min_nodes), now_s=roll.now_s,
    )  # fmt: skip


def _world(
    config: MeshConfig, view: View, members: tuple[Member, ...], grow: bool, held_back: tuple[str, ...]
) -> tuple[str, ...] | None:
    """The next world (A6). Repeat offenders get no new place in it unless there is no world without them."""
    here = frozenset(m.source for m in members)
    lost = {m.node: m for m in view.members if m.source not in here}
    out = frozenset(held_back).difference(view.order)
    good = tuple(m for m in members if m.node not in out)
    order = assign(view.order, lost, good, config.min_nodes, config.max_nodes, grow)
    return order if order is not None else assign(view.order, lost, members, config.min_nodes, config.max_nodes, grow)


def _ghosts(view: View, roll: RollCall, confirmed: frozenset[str], ends: bool) -> tuple[tuple[str, ...], ...]:
    worlds = [] if roll.started or roll.settled else list(view.ghosts)
    if ends and view.mode == "run" and view.order not in worlds:
        worlds.append(view.order)
    return tuple(world for world in worlds if not confirmed.intersection(world))


def _closed(view: View, digest: str, code: int, reason: str) -> View:
    return msgspec.structs.replace(
        view, number=view.number + 1, parent=digest, mode="closed", restart="none", exit_code=code, reason=reason
    )


def _with_roles(members: tuple[Member, ...], order: tuple[str, ...]) -> tuple[Member, ...]:
    """Active are exactly those with a place."""
    place = frozenset(order)
    return tuple(
        msgspec.structs.replace(m, role="active" if m.node in place else "standby") for m in sorted(members, key=lambda m: m.node)
    )


def _tiebreak(config: MeshConfig, order: tuple[str, ...], members: tuple[Member, ...], before: str) -> str:
    """The operator's choice, else the node of the first rank that is there, else the previous one, else the first name."""
    here = [m.node for m in members]
    for node in (config.tiebreak, *order, before):
        if node in here:
            return node
    return min(here)


def _reason(view: View, roll: RollCall, gone: tuple[Member, ...], joiners: tuple[Member, ...], decision: Decision) -> str:
    parts = []
    if failed := roll.failures:
        parts.append(f"workers failed on {', '.join(sorted({r.about[0] for r in failed}))}: {failed[0].detail}")
    if decision.reason:
        parts.append(decision.reason)
    if roll.restarts:
        parts.append(roll.restarts[0].detail)
    left = [m.node for m in gone if m.node in roll.leaving]
    new = {m.node for m in joiners}
    lost = [m.node for m in gone if m.node not in roll.leaving and m.node not in new and m.node not in decision.dropped]
    for nodes, verb in ((left, "left"), (lost, "lost"), (sorted(new), "joined")):
        if nodes:
            parts.append(f"{', '.join(nodes[:8])}{' and others' if len(nodes) > 8 else ''} {verb}")
    return "; ".join(parts) or "the world is feasible again"
