"""What each message does.

Theory: every message says where its sender stands (`Brief`). Whoever is behind pulls, or is told (M6); votes count
only in the decision both take part in; leases and the barrier only among members of one view. Messages of strangers
can do no more than ask to join.

States: none of its own; `HANDLERS` is the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyperpodrun.agent.mesh import convening, standing, voice
from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.mesh.history import holds
from hyperpodrun.agent.wire.mesh import (
    Accept,
    AcceptedMsg,
    Ack,
    Beat,
    Brief,
    Chain,
    Decided,
    Go,
    Grant,
    Heartbeat,
    Hello,
    Nack,
    Prepare,
    Probe,
    Promise,
    Pull,
    Ready,
    Report,
    Source,
    Welcome,
)
from hyperpodrun.agent.wire.mesh import Reports as ReportsMsg

if TYPE_CHECKING:
    from hyperpodrun.agent.mesh.node import Node

NEVER = 1 << 62
"""Later than any time; in `lagging`: already accused of it."""


def compare(agent: Node, now: int, source: Source, brief: Brief) -> list[Effect]:
    """Who is behind: I pull, or they are told (M6)."""
    view = agent.view
    node = source[0]
    if view is None:
        if brief.chain:
            agent.bootstrap.overheard(now, node)
        return []
    if brief.chain != view.chain:
        return meet(agent, now, node, brief) if brief.chain else []
    if brief.number == view.number:
        return voice.accuse(agent, now, node, False, False) if agent.lagging.pop(node, 0) == NEVER else []
    if brief.number > view.number:
        if now < agent.pull_ns:
            return []
        agent.pull_ns = now + agent.config.resend_ns // 2
        return [Send(node, Pull(view.chain, view.number))]
    if agent.sources.get(node) == source[1]:
        agent.lagging.setdefault(node, now)
    return tell_behind(agent, now, node, brief.number)


def tell_behind(agent: Node, now: int, node: str, number: int) -> list[Effect]:
    """Send what was decided after `number`, not more often than asks are repeated."""
    if now < agent.told_ns.get(node, 0):
        return []
    agent.told_ns[node] = now + agent.config.resend_ns
    return [Send(node, Chain(agent.history.after(number)))]


def meet(agent: Node, now: int, node: str, theirs: Brief) -> list[Effect]:
    """Two histories of one job met: somebody forgot (A10). The one whose world does not run gives way."""
    view = agent.view
    if view is None or agent.brief_now(now).live or view.mode == "closed":
        if now < agent.told_ns.get(node, 0):
            return []
        agent.told_ns[node] = now + agent.config.resend_ns
        return [Send(node, Ack(agent.here))]
    if theirs.live or (view.mode == "hold" and theirs.chain < view.chain):
        return standing.rejoin(agent, now, f"the job runs in another history ({theirs.chain})")
    return []


def on_heartbeat(agent: Node, now: int, source: Source, message: Heartbeat) -> list[Effect]:
    """Where a subject stands, and gossip."""
    return compare(agent, now, source, message.brief) + voice.take_items(agent, now, message.items)


def on_probe(agent: Node, now: int, source: Source, message: Probe) -> list[Effect]:
    """Answer at once."""
    return [Send(source[0], Ack(agent.here)), *compare(agent, now, source, message.brief)]


def on_ack(agent: Node, now: int, source: Source, message: Ack) -> list[Effect]:
    """Somebody is there: a joiner that was probed, or a member."""
    agent.acked[source] = now
    return compare(agent, now, source, message.brief)


def on_reports(agent: Node, now: int, source: Source, message: ReportsMsg) -> list[Effect]:
    """Alerts and reports for a candidate."""
    return compare(agent, now, source, message.brief) + voice.take_items(agent, now, message.items)


def votes(agent: Node, source: Source, parent: str) -> bool:
    """Whether a message of the agreement concerns the decision this agent takes part in, from somebody who does too."""
    if parent != agent.agreement.parent or agent.ended:
        return False
    if agent.view is None or agent.sources.get(source[0]) == source[1]:
        return True
    return agent.agreement.recovering and source[0] in agent.slots()


def on_prepare(agent: Node, now: int, source: Source, message: Prepare) -> list[Effect]:
    """A roll call (A4)."""
    if agent.view is None:
        return _prepare_joining(agent, now, source, message)
    if votes(agent, source, message.parent):
        return agent.agreement.on_prepare(now, source, message)
    if not message.parent:
        return tell_behind(agent, now, source[0], -1)
    return compare(agent, now, source, message.brief)


def _prepare_joining(agent: Node, now: int, source: Source, message: Prepare) -> list[Effect]:
    """Without a view: the roll call for view 0 (A10), or one of the closed roster by members that lost their quorum (A11)."""
    if agent.ended or agent.works.state != "none":
        return []
    recovery = message.parent != "" and message.ballot.epoch > 0
    if not recovery and (message.parent != "" or agent.bootstrap.knows_view(now)):
        return compare(agent, now, source, message.brief)
    if message.parent != agent.agreement.parent:
        if message.ballot <= agent.agreement.promised:
            return [Send(source[0], Nack(message.parent, message.ballot, agent.agreement.promised))]
        agent.agreement.enlist(message.parent)
    return agent.agreement.on_prepare(now, source, message)


def on_promise(agent: Node, now: int, source: Source, message: Promise) -> list[Effect]:
    """A voter is there, and what it knows."""
    if not votes(agent, source, message.parent):
        return []
    return voice.take_items(agent, now, message.items) + agent.agreement.on_promise(now, source, message)


def on_nack(agent: Node, now: int, source: Source, message: Nack) -> list[Effect]:
    """A voter has promised more."""
    return agent.agreement.on_nack(now, message) if votes(agent, source, message.parent) else []


def on_accept(agent: Node, now: int, source: Source, message: Accept) -> list[Effect]:
    """Phase 2 (A7)."""
    return agent.agreement.on_accept(now, source, message) if votes(agent, source, message.parent) else []


def on_accepted(agent: Node, now: int, source: Source, message: AcceptedMsg) -> list[Effect]:
    """A voter has accepted."""
    if votes(agent, source, message.parent):
        agent.agreement.on_accepted(source, message)
    return []


def on_decided(agent: Node, now: int, source: Source, message: Decided) -> list[Effect]:
    """A proposer tells."""
    return standing.learn(agent, now, source, (message.view,), False)


def on_chain(agent: Node, now: int, source: Source, message: Chain) -> list[Effect]:
    """What this agent lacked."""
    return standing.learn(agent, now, source, message.views, True)


def on_pull(agent: Node, now: int, source: Source, message: Pull) -> list[Effect]:
    """Somebody lacks something."""
    if agent.view is None or message.chain != agent.view.chain:
        return []
    views = agent.history.after(message.number)
    return [Send(source[0], Chain(views))] if views else []


def on_beat(agent: Node, now: int, source: Source, message: Beat) -> list[Effect]:
    """From below in a lease tree (A9)."""
    effects = compare(agent, now, source, message.brief)
    if agent.sources.get(source[0]) == source[1]:
        effects += agent.lease.on_beat(now, source[0], message, agent.agreement.open)
        effects += standing.lease(agent, now)
    return effects


def on_grant(agent: Node, now: int, source: Source, message: Grant) -> list[Effect]:
    """From above."""
    if agent.sources.get(source[0]) != source[1]:
        return []
    return agent.lease.on_grant(now, message) + standing.lease(agent, now)


def on_ready(agent: Node, now: int, source: Source, message: Ready) -> list[Effect]:
    """A member stands at the barrier (A8)."""
    effects = compare(agent, now, source, message.brief)
    if agent.sources.get(source[0]) == source[1]:
        effects += agent.barrier.on_ready(now, source[0], message, agent.here)
    return effects


def on_go(agent: Node, now: int, source: Source, message: Go) -> list[Effect]:
    """Everyone does."""
    if agent.sources.get(source[0]) == source[1]:
        agent.barrier.on_go(message)
    return compare(agent, now, source, message.brief)


def on_hello(agent: Node, now: int, source: Source, message: Hello) -> list[Effect]:
    """Somebody without a view wants in, or one with a view knocks at a slot it lost (A10)."""
    view, node = agent.view, source[0]
    if view is None:
        agent.bootstrap.met(now, message.member, message.settled, message.knows, ())
        if message.settled:
            return [Send(node, Hello(agent.here, agent.member, False))] if agent.works.state == "none" else []
        return [welcome(agent, now, node)]
    if message.settled:
        return [welcome(agent, now, node), *compare(agent, now, source, message.brief)]
    if holds(view, source):
        return tell_behind(agent, now, node, -1)
    effects: list[Effect] = [welcome(agent, now, node)]
    if view.mode == "closed":
        return effects + tell_behind(agent, now, node, -1)
    if node in agent.sources:
        agent.detector.gone(node)
    join = Report("join", source, member=message.member)
    agent.reports.apply(now, join)
    direct = convening.first_candidates(agent)
    if agent.member.node not in direct:
        effects += (Send(to, ReportsMsg(agent.here, (join,))) for to in direct)
    return effects


def welcome(agent: Node, now: int, to: str) -> Effect:
    """The answer to Hello."""
    order = convening.first_candidates(agent) if agent.view is not None else ()
    knows = agent.view.members[:32] if agent.view is not None else agent.bootstrap.recent(now)
    return Send(to, Welcome(agent.here, agent.member, knows, order))


def on_welcome(agent: Node, now: int, source: Source, message: Welcome) -> list[Effect]:
    """The answer to mine."""
    if agent.view is None:
        agent.bootstrap.met(now, message.member, bool(message.brief.chain), message.knows, message.candidates)
        return []
    return compare(agent, now, source, message.brief)


HANDLERS: dict[type, Callable[[Node, int, Source, Any], list[Effect]]] = {
    Heartbeat: on_heartbeat, Probe: on_probe, Ack: on_ack, ReportsMsg: on_reports, Prepare: on_prepare, Promise: on_promise,
    Nack: on_nack, Accept: on_accept, AcceptedMsg: on_accepted, Decided: on_decided, Pull: on_pull, Chain: on_chain, Beat:
    on_beat,
    Grant: on_grant, Ready: on_ready, Go: on_go, Hello: on_hello, Welcome: on_welcome,
}  # fmt: skip
