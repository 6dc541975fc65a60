"""Where an agent stands: learning of views, adopting them, starting over, ending (A7, A8).

Theory: a view is adopted only when it was decided: by this agent's own count of a quorum's acceptances, or because
somebody who adopted it says so. The parent's digest must be that of the view left; what is missing is pulled.
Adopting is the only thing that stops workers while there is a quorum. An incarnation that is not in the newest view
of its chain is over: its workers are killed and the agent comes back as another.

States: joining (no view), settled, ended.
Invariants: views are adopted in order; the vote file holds the view before anything that follows from it is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hyperpodrun.agent.mesh import convening, voice
from hyperpodrun.agent.mesh.agreement import Agreement
from hyperpodrun.agent.mesh.alerts import Alerts
from hyperpodrun.agent.mesh.effects import Adopt, Effect, End, Persist, Send
from hyperpodrun.agent.mesh.history import follows, holds, linked
from hyperpodrun.agent.mesh.reports import Reports
from hyperpodrun.agent.mesh.rings import rings
from hyperpodrun.agent.mesh.view import candidates, digest_of, incarnations
from hyperpodrun.agent.wire.mesh import NOWHERE, Decided, Pull, Source, View, Vote

if TYPE_CHECKING:
    from hyperpodrun.agent.mesh.node import Node


def take_decision(agent: Node, now: int) -> list[Effect]:
    """This agent's own proposal was accepted by a quorum: adopt it, tell old, new and dropped members (A7)."""
    nxt = agent.agreement.decision
    agent.agreement.decision = None
    if nxt is None:
        return []
    told = {member.node for member in nxt.members}
    if agent.view is not None:
        told |= {member.node for member in agent.view.members}
    effects: list[Effect] = list(adopt(agent, now, nxt, False))
    word = Decided(nxt)
    effects += (Send(node, word) for node in sorted(told) if node != agent.member.node)
    return effects


def learn(agent: Node, now: int, source: Source, views: tuple[View, ...], may_jump: bool) -> list[Effect]:
    """Decided views from somebody: adopt what follows ours; ask for what is missing (A7)."""
    if not views or not linked(views) or agent.ended:
        return []
    effects: list[Effect] = []
    if agent.view is None:
        if agent.works.state != "none":
            return []
        mine = next((i for i, view in enumerate(views) if holds(view, agent.member.source)), None)
        if mine is None:
            closed = views[-1].mode == "closed"
            return end(agent, now, views[-1].exit_code, views[-1].reason) if closed else []
        effects += adopt(agent, now, views[mine], True)
        views = views[mine + 1 :]
    for nxt in views:
        view = agent.view
        if view is None or nxt.chain != view.chain or nxt.number <= view.number:
            continue
        if follows(view, agent.digest, nxt):
            effects += adopt(agent, now, nxt, False)
        elif nxt.number == view.number + 1:
            agent.note(now, f"view {nxt.number} of {source[0]} does not follow ours")
            return effects
        elif may_jump:
            effects += adopt(agent, now, views[-1], True)
            return effects
        else:
            return [*effects, Send(source[0], Pull(view.chain, view.number))]
    return effects


def adopt(agent: Node, now: int, nxt: View, jumped: bool) -> list[Effect]:
    """A8. Not, however, one of an older epoch than this agent accepted another in for the same place: a late word from the
    dead (A11).
    """
    accepted = agent.agreement.accepted
    if accepted is not None and accepted.ballot.epoch > nxt.epoch and accepted.view.number == nxt.number and accepted.view != nxt:
        return []
    digest = digest_of(nxt)
    cause = agent.cause(now, f"view {nxt.number} generation {nxt.generation} {nxt.mode}: {nxt.reason}")
    if not holds(nxt, agent.member.source):
        if agent.is_leaving:
            return end(agent, now, 0, "left")
        return rejoin(agent, now, f"dropped in view {nxt.number}: {nxt.reason}")
    before = agent.view
    joined = before is None
    effects: list[Effect] = []
    agent.agreement.floor = floor_after(agent, nxt)
    stay = {member.node for member in nxt.members}
    agent.unheard = (agent.unheard | agent.detector.down) - stay
    settle(agent, now, nxt, digest, None, jumped and not joined)
    if jumped or joined:
        agent.history.views.clear()
        agent.history.add(nxt, True)
    effects += (Persist(agent.agreement.vote()), Adopt(nxt, digest, cause))
    fresh = before is None or before.generation != nxt.generation or before.mode != nxt.mode
    if nxt.mode != "run" or (fresh and nxt.generation != agent.works.generation):
        effects += agent.works.stop(False, cause, stays_in_place(agent, nxt, jumped))
    agent.barrier.adopt(now, nxt, fresh, not agent.works.idle, now + agent.config.fence_ns if nxt.ghosts else now)
    if agent.agreement.floor and nxt.mode == "run":
        agent.barrier.reset()
        effects += voice.say(agent, now, "restart", "the view before a recovery is not run", agent.agreement.floor)
    if nxt.mode == "closed":
        effects += end(agent, now, nxt.exit_code, nxt.reason)
    return effects


def stays_in_place(agent: Node, nxt: View, jumped: bool) -> bool:
    """Whether processes here may stay: a decision that was missed may have replaced them."""
    here = agent.member.node
    return nxt.mode != "closed" and nxt.restart == "inprocess" and here in nxt.order and here not in nxt.fresh and not jumped


def floor_after(agent: Node, nxt: View) -> int:
    """A value that a recovery had to take over (A5) keeps its generation, which a view that only the dead knew of may have
    used as well. So it is adopted but not run: whoever accepted it in a later epoch waits for a view of that epoch, whose
    generation is beyond all those.
    """
    accepted = agent.agreement.accepted
    floor = agent.agreement.floor
    if accepted is not None and accepted.view == nxt:
        floor = max(floor, accepted.ballot.epoch)
    return floor if floor > nxt.epoch else 0


def settle(agent: Node, now: int, view: View, digest: str, vote: Vote | None, careful: bool) -> None:
    """Everything that is per view starts anew."""
    agent.view, agent.digest = view, digest
    nodes = tuple(member.node for member in view.members)
    agent.sources = incarnations(tuple(member.source for member in view.members))
    agent.rings = rings(nodes, agent.config.rings)
    agent.order = candidates(digest, nodes)
    agent.history.add(view, not agent.history.views)
    agent.unanswered.clear()
    agent.lagging.clear()
    agent.told_ns.clear()
    agent.heartbeat_ns = agent.repeat_ns = now
    agent.alerts = Alerts(digest, agent.rings)
    agent.detector.adopt(now, tuple(agent.rings.subjects.get(agent.member.node, ())))
    agent.gossip.adopt(len(nodes))
    agent.reports.adopt(view, agent.sources)
    agent.lease.adopt(now, view, digest, agent.order)
    agent.works.adopt(now, view, careful)
    agent.agreement.begin(now, view, digest, vote)
    agent.bootstrap.settle(nodes)
    agent.vacant = tuple(node for node in agent.bootstrap.slots() if node not in agent.sources)
    agent.here = agent.brief_now(now)


def lease(agent: Node, now: int) -> list[Effect]:
    """What is due of this agent's part in the lease trees (A9)."""
    if now < agent.lease.due_ns:
        return []
    return agent.lease.tick(now, tuple(convening.trusted(agent)), agent.here, agent.agreement.open)


def rejoin(agent: Node, now: int, why: str) -> list[Effect]:
    """This incarnation is over: kill its workers, come back as another (A8)."""
    cause = agent.cause(now, why)
    effects: list[Effect] = list(agent.works.stop(True, cause))
    agent.member = msgspec.structs.replace(agent.member, incarnation=agent.rng.getrandbits(63), role="standby")
    agent.view, agent.digest, agent.sources, agent.vacant = None, "", {}, ()
    agent.here = NOWHERE
    agent.rings, agent.order = rings((), agent.config.rings), ()
    agent.history.views.clear()
    agent.lease.reset()
    agent.barrier.reset()
    agent.detector.adopt(now, ())
    agent.reports = Reports(agent.config)
    agent.agreement = Agreement(agent.config, agent.member.source, agent, agent.rng)
    agent.agreement.begin(now, None, "")
    agent.bootstrap.start(now)
    agent.works.reset()
    effects.append(Persist(agent.agreement.vote()))
    return effects


def end(agent: Node, now: int, code: int, reason: str) -> list[Effect]:
    """The job is over for this agent. In a closed job it goes on telling so until the driver ends the process."""
    agent.ended = True
    agent.leave_by_ns = None
    cause = agent.cause(now, f"ends with code {code}: {reason}")
    return [*agent.works.stop(False, cause), Persist(None), End(code, reason, cause)]
