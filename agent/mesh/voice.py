"""What an agent tells the others about members and about itself (M4, M7).

Theory: each alert or report goes directly to the first candidates, who will act on it, and by gossip to all, who will
if those die. An agent that hears itself accused answers the accuser at once (M5): if only heartbeats were lost, the
accusation is taken back.

States: none of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperpodrun.agent.mesh import convening
from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.mesh.view import member_of
from hyperpodrun.agent.wire.mesh import Ack, Alert, Item, Report, ReportKind
from hyperpodrun.agent.wire.mesh import Reports as ReportsMsg
from hyperpodrun.agent.wire.rungs import UNKNOWN, Symptoms

if TYPE_CHECKING:
    from hyperpodrun.agent.mesh.node import Node


def accuse(agent: Node, now: int, subject: str, down: bool, loud: bool) -> list[Effect]:
    """Accuse a member, or take it back."""
    agent.alert_seq = max(agent.alert_seq + 1, now // 1_000_000)
    alert = Alert(agent.digest, agent.member.node, subject, agent.alert_seq, down, loud)
    agent.note(now, f"{'accuses' if down else 'hears'} {subject} {'again' if not down else 'loudly' if loud else ''}")
    if not agent.alerts.apply(now, alert):
        return []
    return tell(agent, (alert,))


def say(agent: Node, now: int, kind: ReportKind, detail: str, code: int = 0, symptoms: Symptoms = UNKNOWN) -> list[Effect]:
    """Make a report of this agent's own, to be repeated until dealt with."""
    if agent.view is None:
        return []
    report = Report(kind, agent.member.source, agent.view.generation, code, detail, symptoms=symptoms)
    agent.reports.mine[kind] = report
    agent.repeat_gap_ns = agent.config.hello_ns
    agent.repeat_ns = now + agent.repeat_gap_ns
    agent.reports.apply(now, report)
    agent.note(now, f"{kind}: {detail}")
    return tell(agent, (report,))


def certify(agent: Node, now: int, node: str) -> list[Effect]:
    """Somebody vouches that a slot is gone for good (A11)."""
    member = member_of(agent.view, node) if agent.view is not None else None
    report = Report("dead", member.source if member is not None else (node, 0))
    agent.note(now, f"{node} is certified dead")
    agent.agreement.hurry(now)
    return tell(agent, (report,)) if agent.reports.apply(now, report) else []


def accuse_unready(agent: Node, now: int, node: str) -> list[Effect]:
    """A member does not come to the barrier, or as its leader does not open it (A8)."""
    member = member_of(agent.view, node) if agent.view is not None else None
    if agent.view is None or member is None:
        return []
    report = Report("unready", member.source, agent.view.generation, 0, "not at the barrier in time")
    agent.note(now, f"{node} is not at the barrier in time")
    return tell(agent, (report,)) if agent.reports.apply(now, report) else []


def tell(agent: Node, items: tuple[Item, ...]) -> list[Effect]:
    """To the first candidates directly, to all by and by (M7)."""
    if not items:
        return []
    for item in items:
        agent.gossip.put(item)
    message = ReportsMsg(agent.here, items)
    return [Send(node, message) for node in convening.first_candidates(agent) if node != agent.member.node]


def remind(agent: Node, now: int) -> list[Effect]:
    """Ask those who keep a joiner out (M8) whether they still do: an agent that was started again does not know what it said."""
    barred = agent.alerts.barred().intersection(joiner.node for joiner in agent.reports.joiners(now))
    if not barred or agent.member.node not in convening.first_candidates(agent):
        return []
    bars = [alert for alert in agent.alerts.standing() if alert.subject in barred and alert.observer != agent.member.node]
    return [Send(bar.observer, ReportsMsg(agent.here, (bar,))) for bar in bars[: convening.MOST_BARRED]]


def take_back(agent: Node, now: int, own: Alert) -> list[Effect]:
    """An accusation of this agent's own comes back to it: what was said since is said again, and what the agent before this one
    said is looked into."""
    last = agent.alerts.said(own.observer, own.subject)
    if own.view != agent.digest or (last is not None and last.seq == own.seq):
        return []
    if last is not None and last.seq > own.seq:
        return tell(agent, (last,))
    if own.subject not in agent.sources:
        agent.unheard.add(own.subject)  # it stands until that one is heard: a knock asks
        return []
    agent.alert_seq = max(agent.alert_seq, own.seq)
    return accuse(agent, now, own.subject, own.subject in agent.detector.down, False)


def take_items(agent: Node, now: int, items: tuple[Item, ...]) -> list[Effect]:
    """Take in what others tell; pass on what is news."""
    effects: list[Effect] = []
    for item in items:
        if isinstance(item, Alert):
            if item.down and item.observer == agent.member.node:
                effects += take_back(agent, now, item)
            if agent.alerts.apply(now, item):
                agent.gossip.put(item)
                if item.down and item.subject == agent.member.node:
                    agent.detector.refuted()
                    effects.append(Send(item.observer, Ack(agent.here)))
        elif agent.reports.apply(now, item) and item.kind != "join":
            agent.gossip.put(item)
    return effects
