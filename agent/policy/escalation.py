"""Which rung follows a fault (see `wire/rungs.py` for the rungs): a pure function of what happened and what is remembered.

Theory: the least that may help, and never the same thing for ever. Each rank climbs a ladder of its own, and the world follows the
highest of those whose faults are decided together:

- A first fault is healed in place, where the user allows it (--inprocess-restart) and the node can; else by new processes: of that
  node where the others may stay in process, of all where restarts in place are not wanted.
- The same rank again before any rank has completed a step: that rung did not help, the next one. Again after progress: the same
  rung, at most `max_rank_faults` times within the memory (`window_s`), then the next. Never a lower one than before.
- Nobody to take a node's place: the world gets smaller where MIN allows; else all processes are replaced once more, then the job ends.
- Generation after generation in which no rank completes a step is a verdict of its own: all processes the time before, the end after
  `no_progress` of them. Faults during a recovery count here: their generation never came to a step.
- What cannot be healed by trying again (`final`) ends the job at once. A rung asked for is the least that is done.
- Workers that failed because a node was lost, or its agent died with its workers, are healed with it: they are no faults, and spend
  nothing. A final failure stays one, also if its node is lost next (simulator, seed 15483).

Budgets. A restart for the fault of a worker, whatever the rung, spends one of --max-restarts. Torchrun's default there is 0, which
with --inprocess-restart would forbid what was asked for: if the user names no number, such a job may spend as many restarts as are
remembered (`MEMORY` within --restart-window) and is ended by lack of progress or by its ladders. Without --inprocess-restart the
number alone decides, as with torchrun: whether a rank makes progress is then unknown, so nothing is climbed, but that a node whose
rank fails again and again gives way to a spare if there is one. Nodes lost and agents that died spend --max-node-failures within
--restart-window.

States: none; the memory comes in and goes out (`history`).
Invariants: bounded memory; never a lower rung than asked but for "replace" without anybody to replace with; an incident of another
generation changes nothing; a job that always fails ends.
"""

from collections.abc import Iterable
from itertools import groupby

from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.rungs import RUNGS, Decision, Fault, Incident, Rules, Rung, Situation

MEMORY = 32
"""So many faults are remembered, beside as many lost nodes as --max-node-failures asks to be counted."""
MOST_AT_ONCE = 4
"""So many workers that failed at once are remembered: more would push out the generations before."""
NODE, NOBODY = -1, -2
"""Ranks of faults that no rank had: of the node itself, of its workers together."""


def decide(situation: Situation) -> Decision:
    """What follows from these incidents. Without one of this generation: nothing but the memory, less what is forgotten by now."""
    rules = situation.rules
    memory = _recall(situation.history, rules, situation.now_s)
    incidents = [i for i in situation.incidents if i.generation == situation.generation]
    broken = [i for i in incidents if i.kind in ("lost", "revived")]
    lost = {i.node for i in broken if i.kind == "lost"}
    ended = [i for i in incidents if i.kind == "failed" and (i.node not in lost or i.symptoms.final)]
    victims = [i for i in ended if broken and i.symptoms.victim and not i.symptoms.final and not i.symptoms.rung]
    failed = [i for i in ended if i not in victims]
    if not incidents:
        return Decision(in_place=rules.inprocess, history=memory, held_back=_offenders(memory, rules))
    if verdict := _verdict(situation, memory, failed, broken):
        return Decision(rung="end", history=memory, reason=verdict[1], code=verdict[0])
    rungs = {i: _rung(i, situation, memory) for i in failed}
    stalled = _stalled(situation, memory, failed)
    if stalled and stalled >= rules.no_progress - 1:
        rungs = {i: _higher(rung, "all") for i, rung in rungs.items()}
    rungs |= {i: _least(i, rules) for i in incidents if i.kind in ("asked", "revived") and i.node not in lost}
    if last := next((i for i, rung in rungs.items() if rung == "end"), None):
        why = (
            "that rung was asked for" if last.symptoms.rung == "end" else f"{_who(last)} fails again and again, and nothing helps"
        )
        return Decision(rung="end", history=memory, reason=why, code=last.code or 1)
    dropped = _dropped(situation, rungs, len(lost))
    faults = rungs | {i: "replace" for i in broken if i.kind == "lost"}
    rungs |= {i: _least(i, rules) for i in victims}
    everywhere = any(rung == "all" or (rung == "replace" and i.node not in dropped) for i, rung in rungs.items())
    fresh = {i.node for i, rung in rungs.items() if rung == "node"} - set(dropped)
    rungs |= faults
    return Decision(
        rung="all" if everywhere and not dropped and not lost else max(rungs.values(), key=RUNGS.index),
        in_place=rules.inprocess and not everywhere,
        fresh=() if everywhere else tuple(sorted(fresh)),
        dropped=dropped,
        history=(history := _remember(situation, memory, faults)),
        held_back=_offenders(history, rules),
        counted=bool(failed),
        reason=_words(situation, everywhere, sorted(fresh), dropped, stalled) if failed and (rules.inprocess or dropped) else "",
    )


def _verdict(
    situation: Situation, memory: tuple[Fault, ...], failed: list[Incident], broken: list[Incident]
) -> tuple[int, str] | None:
    """(exit code, why) when the job is not to go on whatever the rung."""
    rules = situation.rules
    if final := next((i for i in failed if i.symptoms.final), None):
        return final.code or 1, "another attempt would fail the same way"
    limit = rules.max_node_failures
    if broken and limit is not None and sum(f.rank == NODE for f in memory) + len(broken) > limit:
        return exit_codes.UNAVAILABLE, f"more nodes failed than --max-node-failures allows ({limit} within {rules.window_s:g} s)"
    if not failed:
        return None
    code = failed[0].code or 1
    if (limit := rules.max_restarts) is not None:
        if situation.restarts >= limit:
            spent = f"all {limit} restarts are spent" if limit > 1 else "the one restart is spent"
            return code, spent if limit else "no restarts were asked for (--max-restarts)"
    elif rules.inprocess and sum(f.rank != NODE for f in memory) >= MEMORY:
        return code, f"{MEMORY} faults of workers within {rules.window_s:g} s; --max-restarts N allows more"
    if _stalled(situation, memory, failed) >= rules.no_progress:
        return code, f"no rank has completed a step in {rules.no_progress} generations"
    return None


def _least(incident: Incident, rules: Rules) -> Rung:
    """The rung where nothing is remembered."""
    if not rules.inprocess:
        first: Rung = "all"
    elif incident.kind == "asked" or incident.symptoms.in_place:
        first = "inplace"
    else:
        first = "node"
    return _higher(first, incident.symptoms.rung) if incident.symptoms.rung else first


def _rung(incident: Incident, situation: Situation, memory: tuple[Fault, ...]) -> Rung:
    """Where this rank's ladder stands now."""
    rules = situation.rules
    least = _least(incident, rules)
    mine = [f.rung for f in memory if (f.node, f.rank) == (incident.node, _rank(incident))]
    if not mine:
        return least
    top = max(mine, key=RUNGS.index)
    tried = not incident.symptoms.progressed or mine.count(top) >= rules.max_rank_faults
    if not rules.inprocess:
        return _higher(least, "replace" if situation.spares and (tried or top == "replace") else "all")
    return _higher(least, RUNGS[RUNGS.index(top) + 1] if tried else top)


def _stalled(situation: Situation, memory: tuple[Fault, ...], failed: list[Incident]) -> int:
    """Generations in a row, this one too, in which workers failed and no rank had completed a step."""
    if not situation.rules.inprocess or not failed or any(i.symptoms.progressed for i in failed):
        return 0
    return 1 + len({f.generation for f in _trailing(memory)})


def _trailing(memory: Iterable[Fault]) -> list[Fault]:
    """The newest faults of workers, as far back as there was no progress."""
    found: list[Fault] = []
    for fault in reversed([f for f in memory if f.rank != NODE]):
        if fault.progressed:
            break
        found.append(fault)
    return found


def _recall(history: tuple[Fault, ...], rules: Rules, now_s: int) -> tuple[Fault, ...]:
    """What is still remembered: faults of the window, and those since the last progress however long ago. Clocks of two deciders
    may differ: a fault of the future has just happened."""
    stalled = set(_trailing(history))
    return tuple(f for f in history if now_s - f.at_s < rules.window_s or f in stalled)


def _remember(situation: Situation, memory: tuple[Fault, ...], rungs: dict[Incident, Rung]) -> tuple[Fault, ...]:
    """The memory after this decision, within its bounds."""
    progressed = not _stalled(situation, memory, [i for i in rungs if i.kind == "failed"])
    workers = [i for i in rungs if i.kind == "failed"][:MOST_AT_ONCE]
    nodes = [i for i in rungs if i.kind in ("lost", "revived")]
    new = [
        Fault(situation.generation, i.node, _rank(i), rungs[i], i.kind != "failed" or progressed, situation.now_s)
        for i in (*nodes, *workers)
    ]
    room = {True: situation.rules.max_node_failures or MEMORY, False: MEMORY}
    kept = []
    for fault in reversed((*memory, *new)):
        room[fault.rank == NODE] -= 1
        if room[fault.rank == NODE] >= 0:
            kept.append(fault)
    return tuple(reversed(kept))


def _offenders(memory: tuple[Fault, ...], rules: Rules) -> tuple[str, ...]:
    """Nodes that were to be replaced for their workers' faults, or failed themselves again and again."""
    own = [f.node for f in memory if f.rank == NODE]
    replaced = {f.node for f in memory if f.rank != NODE and f.rung == "replace"}
    return tuple(sorted(replaced | {node for node in own if own.count(node) >= rules.max_rank_faults}))


def _dropped(situation: Situation, rungs: dict[Incident, Rung], lost: int) -> tuple[str, ...]:
    """Nodes that are to go, as many as can: those lost take spares first."""
    shrink = situation.shrink if situation.rules.inprocess else 0
    can = max(0, situation.spares + shrink - lost)
    wanted = sorted({i.node for i, rung in rungs.items() if rung == "replace"})
    return tuple(wanted[:can])


def _higher(one: Rung, other: Rung) -> Rung:
    return max(one, other, key=RUNGS.index)


def _who(incident: Incident) -> str:
    return _named(incident.node, _rank(incident))


def _named(node: str, rank: int) -> str:
    if rank < 0:
        return node or "this node"
    return f"local rank {rank} of {node}" if node else f"local rank {rank}"


def _rank(incident: Incident) -> int:
    if incident.kind != "failed":
        return NODE
    return incident.symptoms.rank if incident.symptoms.rank >= 0 else NOBODY


def _words(situation: Situation, everywhere: bool, fresh: list[str], dropped: tuple[str, ...], stalled: int) -> str:
    """What follows, for people."""
    parts = []
    if dropped:
        names = ", ".join(dropped)
        parts.append(
            f"{names} {'are' if len(dropped) > 1 else 'is'} replaced" if situation.spares else f"going on without {names}"
        )
    if everywhere:
        parts.append("all processes are replaced")
    elif fresh:
        parts.append(f"new processes on {', '.join(fresh) or 'this node'}")
    elif not dropped:
        parts.append("restart in place")
    if stalled > 1:
        parts.append(f"no step completed in {stalled} generations")
    return "; ".join(parts)


_DONE: dict[Rung, str] = {
    "inplace": "restarted in place", "node": "new processes on that node", "all": "all processes replaced",
    "replace": "the node replaced, or all processes where nobody could take its place", "end": "the job ended",
}  # fmt: skip


def story(history: tuple[Fault, ...]) -> tuple[str, ...]:
    """What is remembered, a line for each decision, oldest first."""
    lines = []
    for generation, found in groupby(history, key=lambda fault: fault.generation):
        faults = list(found)
        whose = [_named(f.node, f.rank) for f in faults]
        since = "" if any(f.progressed for f in faults) else ", before any step was completed"
        rung = max((f.rung for f in faults), key=RUNGS.index)
        lines.append(f"generation {generation}: {', '.join(dict.fromkeys(whose))} failed{since}: {_DONE[rung]}")
    return tuple(lines)
