"""When an agent calls a roll call, whom it waits for, and what it proposes (A3-A5).

Theory: every agent decides nothing alone. Whoever knows of something that asks for a new view (suspicion that has
settled, reports, joiners, a value accepted and not decided) waits for its turn: the candidates' order is pseudo-
random in each view and the same at all, suspects are skipped, each next one waits `stagger_ns` longer and steps back
when somebody else's ballot was seen. So one proposer is the rule, and none is special.

States: none of its own; `convene_ns` is when this agent's turn comes, None: nothing to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from hyperpodrun.agent.mesh.effects import Effect, Send
from hyperpodrun.agent.mesh.succession import RollCall, genesis, successor
from hyperpodrun.agent.wire.mesh import Alert, Item, Probe, Promise, View

replace = msgspec.structs.replace
DIRECT = 3
"""How many candidates are told directly (M7)."""
MOST_BARRED = 32
"""So many unheard ones are named in a promise; there are more only while a large part of the job is away."""

if TYPE_CHECKING:
    from hyperpodrun.agent.mesh.node import Node


def convene(agent: Node, now: int) -> list[Effect]:
    """Propose when it is time and this agent's turn."""
    agent.convene_ns = None
    if agent.agreement.phase != "idle" or agent.agreement.decision is not None or agent.ended:
        return []
    if agent.view is not None and agent.alerts.is_quiet and agent.reports.is_empty and agent.agreement.accepted is None:
        return []  # nothing asks for a view: nearly always
    at = turn_at(agent, now)
    if at is None:
        return []
    at = max(at, agent.agreement.not_before_ns)
    if at > now:
        agent.convene_ns = at
        return []
    agent.proposed_ns = now
    agent.acked.clear()
    effects: list[Effect] = []
    if agent.view is None:
        agent.agreement.enlist("")  # whoever asked for a recovery is gone: this is about view 0 again
    else:
        effects += (Send(j.node, Probe(agent.here)) for j in agent.reports.joiners(now, barred(agent)))
    return effects + agent.agreement.propose(now, stranded(agent))


def stranded(agent: Node) -> bool:
    """The last roll call found no quorum: ask the closed roster, every other time (A11)."""
    known = agent.view is not None and len(agent.slots()) == agent.config.slots
    return known and agent.agreement.failures % 2 == 1


def waits_for(agent: Node) -> tuple[str, ...]:
    """Whom this agent cannot go on without, for people: those who did not answer its last roll call if that found no quorum."""
    agreement = agent.agreement
    if agent.view is None or not agreement.failures:
        return ()
    return tuple(member.node for member in agent.view.members if member.node not in agreement.promises)


def turn_at(agent: Node, now: int) -> int | None:
    """When this agent should propose if nobody else does; None: nothing asks for a view."""
    if agent.view is None:
        return agent.bootstrap.form_at(now) if agent.works.state == "none" else None
    config = agent.config
    put_off = agent.alerts.settle(now)
    ats = [agent.reports.convene_at(now, barred(agent))]
    if agent.alerts.first_ns is not None:
        ats.append(min(agent.alerts.first_ns + config.quiet_cap_ns, agent.alerts.last_ns + config.quiet_ns))
    if agent.agreement.open:
        ats.append(agent.agreement.accepted_ns + config.open_ns)
    ready = [at for at in ats if at is not None]
    if agent.view.mode == "closed":
        return None
    if not ready:
        return put_off
    turn = 0
    for node in trusted(agent):
        if node == agent.member.node:
            break
        turn += 1
    at = min(ready) + turn * config.stagger_ns
    return at if put_off is None else min(at, put_off)


def trusted(agent: Node) -> Iterator[str]:
    """Candidates nobody suspects, in this view's order; one by one, for nearly always the first ones are enough."""
    out = {*agent.alerts.suspects(), *agent.detector.down, *agent.reports.nodes("leaving")}
    return (node for node in agent.order if node not in out) if out else iter(agent.order)


def first_candidates(agent: Node) -> tuple[str, ...]:
    """Who is told directly (M7)."""
    return tuple(itertools.islice(trusted(agent), DIRECT))


def awaited(agent: Node, answered: Collection[str]) -> bool:
    """Somebody who should answer has not."""
    lost = agent.alerts.beyond_doubt()
    asked = agent.electorate()
    if len(answered) + len(lost) < len(asked) or any(node not in answered and node not in lost for node in asked):
        return True
    return any(j.source not in agent.acked for j in agent.reports.joiners(agent.proposed_ns, barred(agent)))


def barred(agent: Node) -> frozenset[str]:
    """Who may not be taken in: a member lost it and has not heard it since (M8)."""
    return agent.alerts.barred().union(agent.unheard)


def choose(agent: Node, now: int, promises: Mapping[str, Promise]) -> View | None:
    """A5."""
    view = agent.view
    if view is None:
        members = tuple(promise.me for _, promise in sorted(promises.items()))
        return replace(genesis(agent.config, members, f"{agent.rng.getrandbits(64):016x}"), epoch=agent.agreement.epoch)
    agent.alerts.settle(now, must=True)
    reports = agent.reports
    roll = RollCall(
        answered=frozenset(promises),
        accused=frozenset(agent.alerts.suspects()),
        convicted=agent.alerts.certain(now, agent.config.one_way_ns) | mute(agent, now, promises),
        unready=reports.nodes("unready"), certified=reports.nodes("dead"),
        leaving=reports.nodes("leaving"), finished=reports.nodes("finished"),
        joiners=tuple(j for j in reports.joiners(now, barred(agent)) if j.source in agent.acked),
        failures=reports.of("failed"), restarts=reports.of("restart") + reports.of("revived"),
        now_s=agent.config.wall_s(now),
        started=agent.barrier.state == "gone", fence_over=agent.works.fence_over(now), settled=agent.works.settled(now),
    )  # fmt: skip
    if agent.agreement.recovering:
        roll = of_all(agent, roll, promises)
    floor = max((agent.agreement.floor, *(report.code for report in reports.of("restart"))))
    nxt = in_epoch(successor(agent.config, view, agent.digest, roll, agent.decide), max(agent.agreement.epoch, floor))
    return past_the_lost(nxt) if agent.agreement.recovering or floor > view.epoch else nxt


def in_epoch(view: View | None, epoch: int) -> View | None:
    """The view with the epoch of the ballot that proposes it."""
    return None if view is None else replace(view, epoch=epoch)


def past_the_lost(view: View | None) -> View | None:
    """After a recovery: views that only the dead knew of may have had generations, and checkpoints, of their own. Theirs stay
    below 2^20 an epoch.
    """
    return None if view is None else replace(view, generation=max(view.generation, view.epoch << 20))


def of_all(agent: Node, roll: RollCall, promises: Mapping[str, Promise]) -> RollCall:
    """The roll call of the closed roster (A11): members that are there with their vote files stay, new incarnations join,
    nobody else.
    """
    stay = frozenset(node for node, promise in promises.items() if agent.sources.get(node) == promise.me.incarnation)
    fresh = tuple(promise.me for node, promise in sorted(promises.items()) if node not in stay)
    return replace(roll, answered=stay, convicted=frozenset(agent.sources) - stay, joiners=fresh)


def mute(agent: Node, now: int, promises: Mapping[str, Promise]) -> frozenset[str]:
    """Members that have answered none of this proposer's roll calls for long, though nobody accuses them."""
    for node in agent.electorate():
        if node in promises:
            agent.unanswered.pop(node, None)
            continue
        since, last = agent.unanswered.get(node, (now, now))
        if now - last > 2 * agent.config.backoff_cap_ns:
            since = now
        agent.unanswered[node] = (since, now)
    long_ns = agent.config.one_way_ns
    return frozenset(node for node, (since, _) in agent.unanswered.items() if now - since >= long_ns)


def testimony(agent: Node) -> tuple[Item, ...]:
    """My own alerts, whom I have not heard since they were dropped (M8), and all pending reports."""
    mine = (alert for alert in agent.alerts.standing() if alert.observer == agent.member.node)
    unheard = (Alert(agent.digest, agent.member.node, node, 0, True) for node in sorted(agent.unheard)[:MOST_BARRED])
    return (*mine, *unheard, *agent.reports.all())
